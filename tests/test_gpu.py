"""The same promises on a CUDA device: reductions, random state, streams with LoRA in bf16."""

import pytest
import torch
import yaml
from peft import LoraConfig
from test_packing import some_rows
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, contains_answer, differ, make_model, make_trainer, parameters, trained

from trl_explore.cli import main
from trl_explore.packing.attention import _attend, masked_attention, num_compilations
from trl_explore.trainers import (
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)

pytestmark = pytest.mark.gpu
CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2, use_cpu=False)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
SAVING = dict(save_strategy="steps", save_steps=2)
SETTINGS = {
    "float32": {},
    "bf16": dict(bf16=True),
    "bf16, lora, beta, checkpointing": dict(bf16=True, peft_config=LORA, beta=0.1, gradient_checkpointing=True),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_weight_zero_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, use_cpu=False, **options)
    got, log = trained(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, aux_loss_weight=0.0, **CUTS, **options)
    assert_same(got, expected)
    assert log[0]["pivots/tried"] > 0
    learned, _ = trained(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **CUTS, **options)
    assert differ(learned, expected)


def test_sampling_leaves_the_devices_random_state_alone(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, use_cpu=False)
    trainer.model.train()
    before = torch.cuda.get_rng_state()
    state = trainer.exploration_generator.get_state()
    first = trainer.sample([[5, 6]] * 4, 4, 8)
    trainer.exploration_generator.set_state(state)
    torch.rand(5, device="cuda")
    assert trainer.sample([[5, 6]] * 4, 4, 8) == first
    torch.cuda.set_rng_state(before)
    torch.rand(5, device="cuda")
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(before)
    trainer.sample([[5, 6]], 2, 8)
    assert torch.equal(torch.cuda.get_rng_state(), before) and not torch.equal(after, before)


def test_a_run_resumed_off_a_boundary_is_exact(tmp_path):
    options = dict(**CUTS, steps_per_generation=4, max_steps=7, peft_config=LORA)
    whole = make_trainer(
        DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **{**options, "save_strategy": "steps", "save_steps": 2}
    )
    whole.train()
    again = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_tree_search_of_depth_one_is_grpo(tmp_path, options):
    def signed(completions, answer, **kwargs):
        return [2 * reward - 1 for reward in contains_answer(completions, answer)]

    flat = dict(expansion_width=4, max_tree_depth=1, node_length=8, epsilon_high=None)
    expected, _ = trained(
        GRPOTrainer, GRPOConfig, tmp_path, use_cpu=False, scale_rewards="none", reward_funcs=signed, **options
    )
    got, _ = trained(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, use_cpu=False, **flat, **options)
    assert_same(got, expected, tolerance=1e-6)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_tree_search_trains_and_resumes(tmp_path, options):
    options = dict(use_cpu=False, expansion_width=3, node_length=2, steps_per_generation=4, max_steps=7, **options)
    whole = make_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options, **SAVING)
    whole.train()
    assert whole.state.log_history[0]["tree/encoded_fraction"] < 0.5
    again = make_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


def test_tree_search_with_continuous_batching_knows_its_entropies(tmp_path):
    trainer = make_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path, use_cpu=False, use_transformers_continuous_batching=True,
        expansion_width=3, node_length=2, max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert all(node.entropy > 0 for tree in trainer.explorer.trees for node in tree.nodes[1:])


def test_continuous_batching_samples_within_budgets(tmp_path):
    trainer = make_trainer(
        ExplorationTrainer, ExplorationConfig, tmp_path, use_cpu=False, use_transformers_continuous_batching=True
    )
    trainer.model.train()
    groups = trainer.sample([[5, 15, 6], [5], [6, 7]], [3, 1, 2], [1, 8, 4])
    assert [len(g) for g in groups] == [3, 1, 2]
    assert all(1 <= len(c.token_ids) <= b for g, b in zip(groups, [1, 8, 4], strict=True) for c in g)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_shared_prefixes_end_in_the_same_parameters(tmp_path, options):
    """FlexAttention, compiled; its backward pass runs nowhere else."""
    options = dict(options, use_cpu=False, optim="sgd", learning_rate=0.1, max_steps=2)
    options["beta"] = 0.0  # the reference of a model that is not saved
    results = []
    for mode in ("off", "on"):
        model = make_model(hidden_size=64, intermediate_size=128, num_hidden_layers=2)  # heads of 32
        results.append(
            trained(
                ExplorationTrainer, ExplorationConfig, tmp_path, model=model, shared_prefix_training=mode, **options
            )
        )
    (expected, _), (got, log) = results
    assert_same(got, expected, tolerance=1e-2 if "bf16" in options else 1e-4)
    assert log[0]["packing/packed"] == 1.0 and log[0]["packing/compilations"] > 0


def test_new_lengths_compile_nothing():
    """Forward and backward, after a first length and a second."""
    torch.compiler.reset()
    module, counts = torch.nn.Identity(), []
    for rows in some_rows(5, device="cuda"):
        size = rows.input_ids.size(1)
        parts = [torch.randn(1, 4, size, 32, device="cuda", requires_grad=True) for _ in range(3)]
        out, _ = _attend(module, *parts, None, original="sdpa", packed_rows=rows, sliding_window=size // 2)
        out.sum().backward()
        counts.append(num_compilations())
        expected = masked_attention(*parts, rows.trie, scale=32**-0.5, window=size // 2)
        torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-2)
    assert counts[0] == counts[1] < counts[2] == counts[-1]  # the first two are of one length


def test_a_comparison_builds_teaches_and_trains_a_model_in_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    document = {
        "task": "doors",
        "model_size": {"hidden_size": 128, "num_layers": 2},
        "warm_start_steps": 3,
        "budget": {"tokens": 500},
        "evaluations": 1,
        "num_eval": 4,
        "metrics": ["greedy_accuracy"],
        "common": {"per_device_train_batch_size": 8, "num_generations": 4, "use_cpu": False, "bf16": True},
        "arms": [{"method": "grpo"}, {"method": "deep_grpo"}],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    out = tmp_path / "out"
    assert main(["compare", "--config", str(tmp_path / "run.yaml"), "--output_dir", str(out)]) == 0
    assert len(list(out.glob("*/run.json"))) == 2

"""AttnRL: reductions to GRPO, influence against attention maps, which steps are forked, resume, and its errors."""

import gc
import json
import math
import re
import weakref

import pytest
import torch
from commands import TINY_RUN, as_flags, run_example
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from world import (
    TINY,
    always,
    assert_same,
    contains_answer,
    differ,
    make_model,
    make_tokenizer,
    make_trainer,
    never,
    one_batch,
    parameters,
    saved_model,
    some_letter,
    trained,
)

from trl_explore.chains.influence import forward_influence, step_attention
from trl_explore.chains.reading import AttentionReader
from trl_explore.trainers import AttnRLConfig, AttnRLTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.2)
SETTINGS = {
    "plain": {},
    "two iterations": dict(num_iterations=2, max_steps=4),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora, beta": dict(peft_config=LORA, beta=0.1),
    "two rewards": dict(reward_funcs=[contains_answer, some_letter], reward_weights=[1.0, 0.5]),
}
TINY_STEPS = TINY["attn_rl"].options
SIZE = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=29)
HYBRID = Lfm2Config(**SIZE, layer_types=["conv", "full_attention"], num_hidden_layers=2)


def batch(folder, **options):
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, folder, **{**TINY_STEPS, **options})
    return trainer, one_batch(trainer)


def forks(trainer):
    """Where every chain of every tree was left."""
    return [
        [sorted({leaf.start for leaf in tree.leaves if leaf.parent == chain}) for chain in range(4)]
        for tree in trainer.branch_explorer.trees
    ]


def reader(folder, *, layers=None, distance=1, model=None):
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, folder, **TINY_STEPS, model=model)
    return AttentionReader(trainer, distance=distance, layers=layers), trainer


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_forks_it_is_grpo_bit_for_bit_and_forks_change_what_is_learned(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    neutral, log = trained(AttnRLTrainer, AttnRLConfig, tmp_path, num_forks=0, **options)
    assert_same(neutral, expected)
    assert not any(key.startswith(("branch", "steps")) for entry in log for key in entry)
    check_that_forks_act(tmp_path, expected, **options)


def test_forks_change_what_is_learned_with_shared_prefixes(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    check_that_forks_act(tmp_path, expected, shared_prefix_training="on")


def check_that_forks_act(folder, without, **options):
    got, log = trained(AttnRLTrainer, AttnRLConfig, folder, **TINY_STEPS, **options)
    assert differ(got, without) and all(value.isfinite().all() for value in got.values())
    assert log[0]["branch/sampled_tokens"] > 0 and log[0]["steps/influence"] > 0


def test_reading_and_forking_leave_the_next_batch_of_main_rows_as_it_is(tmp_path):
    batch(tmp_path, peft_config=LORA)
    after = torch.get_rng_state()
    one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, peft_config=LORA))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("layers", [None, [1, 3], [0, 1]], ids=str)
@pytest.mark.parametrize("lora", [False, True])
def test_influence_is_that_of_the_models_attention_maps(tmp_path, layers, lora):
    model = make_model(num_hidden_layers=3, num_key_value_heads=1)
    trainer = make_trainer(
        AttnRLTrainer, AttnRLConfig, tmp_path, **TINY_STEPS, model=model, peft_config=LORA if lora else None
    )
    ids, steps = [5, 6, 7, 8, 9, 10, 11, 12], [(2, 3), (3, 5), (5, 6), (6, 8)]
    trainer.model.train()
    found = AttentionReader(trainer, distance=2, layers=layers).influence([ids, ids[:4]], [steps, [(2, 3), (3, 4)]])
    assert trainer.model.training
    own = trainer.accelerator.unwrap_model(trainer.model)
    own = (own.get_base_model() if lora else own).eval()
    own.set_attn_implementation("eager")
    maps = own(torch.tensor([ids]), output_attentions=True).attentions
    maps = maps[slice(*layers)] if layers else maps
    expected = torch.stack([forward_influence(step_attention(m[0], steps), distance=2) for m in maps]).amax(dim=0)
    assert found[0] == pytest.approx(expected.tolist(), abs=1e-6) and found[0][0] > 0
    assert found[1] == [0.0, 0.0]  # too few steps


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_belong_to_no_step(tmp_path, adapter):
    options = dict(peft_config=adapter(task_type="CAUSAL_LM", num_virtual_tokens=3), gradient_checkpointing=False)
    model = make_model(num_hidden_layers=2)
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, **TINY_STEPS, model=model, **options)
    ids, steps = [5, 6, 7, 8, 9, 10, 11, 12], [(2, 3), (3, 5), (5, 6), (6, 8)]
    [found] = AttentionReader(trainer, distance=2, layers=None).influence([ids], [steps])
    own = trainer.accelerator.unwrap_model(trainer.model).eval()
    own.get_base_model().set_attn_implementation("eager")
    row = torch.tensor([ids])
    maps = own(input_ids=row, attention_mask=torch.ones_like(row), output_attentions=True).attentions
    assert maps[0].shape[-1] == len(ids) + 3
    maps = [m[0, :, -len(ids) :, -len(ids) :] for m in maps]
    expected = torch.stack([forward_influence(step_attention(m, steps), distance=2) for m in maps]).amax(dim=0)
    assert found == pytest.approx(expected.tolist(), abs=1e-6) and found[0] > 0


@pytest.mark.parametrize("options", [{}, dict(shared_prefix_training="on")], ids=["plain", "packed"])
def test_the_models_own_attention_comes_back(tmp_path, options):
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, **TINY_STEPS, **options)
    name = trainer.model.config._attn_implementation
    assert name == ("packed_sdpa" if options else "sdpa")
    before = trainer.model(torch.tensor([[5, 6, 7]])).logits
    one_batch(trainer)
    assert trainer.model.config._attn_implementation == name
    assert torch.equal(trainer.model(torch.tensor([[5, 6, 7]])).logits, before)


UNREADABLE = {
    "state space": (
        MambaForCausalLM,
        MambaConfig(vocab_size=29, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2),
    ),
    "another interface": (
        GPTNeoForCausalLM,
        GPTNeoConfig(vocab_size=29, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
    ),
    "layers without attention": (Lfm2ForCausalLM, HYBRID),
}


@pytest.mark.parametrize("model_class, config", UNREADABLE.values(), ids=UNREADABLE)
def test_models_whose_attention_cannot_be_read_are_refused_with_the_reason(tmp_path, model_class, config):
    reason = f"{model_class.__name__} shows no attention in the layers that are read"
    with pytest.raises(ValueError, match=f"{reason}.*use TreeRLTrainer"):
        make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, model=model_class(config), attention_layers=[0, 1])


def test_other_families_are_read(tmp_path):
    models = LlamaForCausalLM(LlamaConfig(**SIZE, num_hidden_layers=2)), Lfm2ForCausalLM(HYBRID)
    for model in models:
        found, _ = reader(tmp_path, model=model)
        assert found.influence([[5, 6, 7, 8]], [[(0, 1), (1, 2), (2, 3), (3, 4)]])[0][1] > 0


def test_a_finished_trainer_leaves_memory(tmp_path):
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, **TINY_STEPS, max_steps=1)
    trainer.train()
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None  # transformers' table of attention functions refers to no trainer


def test_all_chains_of_unsolved_prompts_are_forked_where_they_have_most_influence(tmp_path):
    trainer, _ = batch(tmp_path, reward_funcs=never, num_forks=1, influence_quantile=1.0)
    read, _ = reader(tmp_path)
    for tree, found in zip(trainer.branch_explorer.trees, forks(trainer), strict=True):
        for chain, own in enumerate(found):
            ids, first = tree.leaves[chain].token_ids, len(tree.prompt_ids)
            starts = trainer.branch_explorer.steps.cuts[tree.row // 4][chain].starts
            steps = [(first + a, first + b) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
            influence = read.influence([tree.prompt_ids + ids], [steps])[0]
            best = max(influence[1:], default=0)
            assert own == ([starts[influence.index(best, 1)]] if len(starts) > 1 else [])


def test_as_many_chains_are_forked_as_accuracy_says(tmp_path):
    def some(completion_ids, **columns):
        return [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0] if len(completion_ids) == 8 else [0.0] * len(completion_ids)

    trainer, _ = batch(tmp_path, reward_funcs=some)
    first, second = forks(trainer)
    assert len([own for own in first if own]) <= math.ceil(4 * math.exp(-0.25)) == 4
    assert len([own for own in second if own]) <= math.ceil(4 * math.exp(-0.75)) == 2
    assert second[2]  # the one failure
    assert trainer._metrics["train"]["steps/forked_fraction"] == [6 / 8]


def test_prompts_that_are_solved_are_forked_where_they_have_more_influence_than_usual(tmp_path):
    trainer, _ = batch(tmp_path, reward_funcs=always, per_device_train_batch_size=16)
    means = [
        sum(sum(cut.influence) for cut in own) / sum(len(cut.influence) for cut in own)
        for own in trainer.branch_explorer.steps.cuts
    ]
    usual = sum(means) / len(means)
    assert [any(own) for own in forks(trainer)] == [mean > usual for mean in means]
    assert trainer.branch_explorer.steps.number == 4 and trainer.branch_explorer.steps.sum == pytest.approx(sum(means))


def test_without_adaptive_sampling_all_chains_are_forked(tmp_path):
    trainer, _ = batch(tmp_path, reward_funcs=always, adaptive_sampling=False)
    assert trainer._metrics["train"]["steps/forked_fraction"] == [1.0] and trainer.branch_explorer.steps.number == 0


@pytest.mark.parametrize("selection", ["uncertain", "random"])
def test_controls_fork_as_many_steps_elsewhere(tmp_path, selection):
    trainer, _ = batch(tmp_path, reward_funcs=never)
    control, _ = batch(tmp_path, reward_funcs=never, fork_selection=selection)
    found, expected = ([[len(own) for own in tree] for tree in forks(t)] for t in (control, trainer))
    assert found == expected and forks(control) != forks(trainer)
    if selection == "uncertain":
        explorer = control.branch_explorer
        for tree, cuts, found in zip(explorer.trees, explorer.steps.cuts, forks(control), strict=True):
            for leaf, cut, own in zip(tree.leaves[:4], cuts, found, strict=True):
                assert own == sorted(sorted(cut.starts[1:], key=leaf.logprobs.__getitem__)[:2])


def test_steps_may_have_one_length(tmp_path):
    trainer, _ = batch(tmp_path, reward_funcs=never, step_length=3)
    assert {start for tree in forks(trainer) for own in tree for start in own} == {3, 6}


def test_completions_of_one_step_are_not_forked_and_a_warning_says_so(tmp_path):
    trainer = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path)
    with pytest.warns(UserWarning, match="All 8 completions of the first batch are without any of .*`step_length`"):
        output = one_batch(trainer)
    assert trainer.branching.results[0].scored is None and trainer._metrics["train"]["branch/forks"] == [0]
    rewards = torch.tensor([[leaf.reward for leaf in tree.leaves] for tree in trainer.branch_explorer.trees])
    assert output["advantages"][:, 0].tolist() == pytest.approx((2 * (rewards - rewards.mean(1, True))).flatten())


def test_no_step_is_forked_behind_the_end_of_thinking(tmp_path):
    trainer, _ = batch(tmp_path, reward_funcs=never, fork_until=[*"0123456789"], num_forks=8)
    for tree, found in zip(trainer.branch_explorer.trees, forks(trainer), strict=True):
        for leaf, own in zip(tree.leaves[:4], found, strict=True):
            said = make_tokenizer().convert_ids_to_tokens(leaf.token_ids)
            first = next((i for i, token in enumerate(said) if token.isdigit()), 8)
            assert all(0 < start <= first for start in own)


@pytest.mark.parametrize("selection", ["attention", "random"])
def test_it_resumes_bit_for_bit_in_the_middle_of_a_generation(tmp_path, selection):
    options = dict(TINY_STEPS, fork_selection=selection, num_iterations=2, steps_per_generation=2, max_steps=5)
    options |= dict(beta=0.1, reward_funcs=[always, contains_answer], success_reward="always")
    whole = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    again = make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))
    assert again.branch_explorer.steps.state() == whole.branch_explorer.steps.state()
    assert whole.branch_explorer.steps.number > 0


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path, monkeypatch):
    rows = [{"problem": f"{i}+{i}=", "solution": rf"It is \boxed{{{2 * i % 10}}}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {**TINY_RUN, "dataset_name": "data.jsonl", "model_name_or_path": saved_model(), "num_generations": None}
    fields |= {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_completion_length": 8}
    run_example("attn_rl.py", *as_flags({**fields, "max_steps": 1}), folder=tmp_path, monkeypatch=monkeypatch)
    logged = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert logged[0]["steps/per_completion"] >= 1


REFUSED = {
    "`num_forks=-1` must be at least 0; 0 is GRPO": dict(num_forks=-1),
    "`branches_per_fork=0` must be at least 1": dict(branches_per_fork=0),
    "`influence_distance=0` must be at least 1": dict(influence_distance=0),
    "`min_fork_distance=-1` must be at least 0 tokens, or None": dict(min_fork_distance=-1),
    "`fork_selection`: unknown value 'attn'": dict(fork_selection="attn"),
    "`influence_quantile=1.5` must be in [0, 1]": dict(influence_quantile=1.5),
    "`step_length=0` must be at least 1 token, or None": dict(step_length=0),
    "`step_delimiters=[]` must hold non-empty texts": dict(step_delimiters=[]),
    "`attention_layers=[3, 3]` must hold the first layer": dict(attention_layers=[3, 3]),
    "`attention_layers=[4]` must hold the first layer": dict(attention_layers=[4]),
    "`attention_layers=[1, 2]` begins after the 1 layers of Qwen2ForCausalLM": dict(attention_layers=[1, 2]),
    "`branches_per_fork=100000` can sample": dict(branches_per_fork=100_000),
    "`advantage='pkpo'` has no effect, because the values of a tree are the advantages": dict(advantage="pkpo"),
    "`budget='vip'` gives prompts unequally many rows": dict(budget="vip"),
}


@pytest.mark.parametrize("message, options", REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_trainer(AttnRLTrainer, AttnRLConfig, tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("length, distance", [(8192, 512), (256, 16), (None, 512)])
def test_forks_are_a_sixteenth_of_a_completion_apart_by_default(tmp_path, length, distance):
    assert AttnRLConfig(str(tmp_path), use_cpu=True, max_completion_length=length).fork_distance == distance
    assert AttnRLConfig(str(tmp_path), use_cpu=True, min_fork_distance=7).fork_distance == 7

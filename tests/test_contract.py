"""Every TRL and transformers private that the trainers touch, as `compat.py` says and as it behaves.

A failure here means that TRL moved: read the seam again before touching anything else.
"""

import inspect
from collections import defaultdict

import pytest
import test_doors
import torch
import trl
from packaging.version import Version
from test_doors import DOORS, FILES, attributes
from transformers import DynamicCache
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils
from trl.trainer.utils import RepeatSampler, split_tensor_dict
from world import make_model, make_trainer

from trl_explore.compat import SEAMS, check_trl_version, difference
from trl_explore.rows.streams import LOSS_NORMALISERS
from trl_explore.sampling.generation import cache_argument, given_cache
from trl_explore.trainers import DeepGRPOTrainer, ExplorationTrainer, TreeGRPOTrainer


def name_of(seam):
    return f"{seam.path} {seam.needed_by}".strip()


@pytest.mark.parametrize("seam", SEAMS, ids=name_of)
def test_a_seam_is_as_the_table_says(seam):
    if Version(trl.__version__) < Version(seam.since):
        assert difference(seam) == "is not there"
    else:
        assert difference(seam) is None


def test_every_private_that_a_door_names_is_in_the_table():
    names, derived = test_doors.privates(), test_doors.derived_classes()
    named = {name.split(".")[-1] for door in DOORS for _, name in attributes(FILES[door], names, derived)}
    known = {word for seam in SEAMS for word in f"{seam.path.split('.')[-1]} {seam.uses} {seam.order}".split()}
    assert len(named) > 40 and not named - known


def test_seams_name_files_that_there_are():
    assert {seam.door for seam in SEAMS} <= {file.removeprefix("trl_explore/") for file in FILES}
    assert {seam.needed_by for seam in SEAMS} == {"", "use_vllm", "shared_prefix_training"}


def test_the_loss_clips_by_the_trainers_own_bounds_and_reads_advantages_behind_log_probabilities():
    # KL-Cov swaps the bounds, and writes into the advantages once the log-probabilities are known.
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)" in source
    places = [source.index(line) for line in ("self._get_per_token_logps_and_entropies(", 'inputs["advantages"]')]
    assert places == sorted(places)


def test_the_order_of_prompts_is_the_samplers():
    sampler = RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=2, shuffle=True, seed=5)
    alone = RepeatSampler(range(7), mini_repeat_count=1, shuffle=True, seed=5)
    for _ in range(2):
        order = list(alone)
        batches = [[place for place in order[start : start + 3] for _ in range(2)] for start in (0, 3)]
        assert list(sampler) == batches[0] * 2 + batches[1] * 2


@pytest.mark.parametrize("trainer_class", [ExplorationTrainer, DeepGRPOTrainer, TreeGRPOTrainer])
def test_constructors_take_what_grpo_trainer_takes(trainer_class):
    ours = inspect.signature(trainer_class.__init__).parameters
    theirs = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(ours) == list(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_the_tool_loop_works_on_its_arguments_in_place():
    # `trl_explore/agents/turns.py` sees the turns of a batch through the lists that TRL's loop hands over.
    source = inspect.getsource(GRPOTrainer._tool_call_loop)
    for line in (
        "prompt_completion_tool = prompt_completion_tools[idx]",
        "prompt_completion_tool.append(tool_message)",
        "del prompts[idx_with_tool][prompts_len_before[idx] :]",
        "completion_ids[idx_with_tool] = pct[prompt_length:] + post_tool_ids[idx]",
    ):
        assert line in source
    assert "if ids else {}" in " ".join(source.split())  # an empty turn ends a trajectory
    assert "prompts = copy.deepcopy(prompts)" in inspect.getsource(GRPOTrainer._generate)


@pytest.fixture
def trainer(tmp_path):
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, beta=0.1, steps_per_generation=2, max_steps=2)
    trainer.model.train()
    return trainer


def test_attributes_that_are_swapped_or_read(trainer):
    assert set(trainer._metrics) == {"train", "eval"} and isinstance(trainer._metrics["train"], defaultdict)
    assert set(trainer._logs) == {"images", "prompt", "completion", "rewards", "advantages", "extra"}
    assert isinstance(trainer._logs["rewards"], defaultdict) and isinstance(trainer._logs["extra"], defaultdict)
    assert isinstance(trainer._pending_extra_logs, defaultdict) and isinstance(trainer._pending_metrics, defaultdict)
    assert trainer._entropy_bonus_enabled is False and trainer.aux_loss_enabled is False
    assert trainer.is_fsdp_enabled is False and trainer.is_deepspeed_enabled is False and trainer.ref_model is not None
    assert trainer._step == 0 and trainer._buffered_inputs is None
    assert trainer._is_vlm is False and trainer._tokenizer.pad_token_id == 0
    assert trainer.eos_token_ids == [1]
    assert trainer.rollout_func is None and trainer.num_generations == 4 and trainer.num_iterations == 1
    assert trainer.generation_config.max_new_tokens == trainer.max_completion_length == 8
    assert trainer.top_entropy_quantile == 1.0 and trainer.beta == 0.1 and trainer.loss_type == "dapo"
    assert trainer.reward_func_names == ["contains_answer"] and trainer.reward_weights.tolist() == [1.0]
    assert trainer.state.num_input_tokens_seen == 0
    assert trainer.temperature == 1.0 and trainer.use_transformers_continuous_batching is False
    trainer._log_completion_extra("column", [1, 2])
    trainer._log_metric("metric", 3.0)
    assert trainer._pending_extra_logs == {"column": [1, 2]} and trainer._pending_metrics == {"metric": [3.0]}
    assert trainer.accelerator.gradient_state.sync_gradients is True
    assert callable(trainer.accelerator.gradient_state._set_sync_gradients)


def test_a_generation_batch_is_a_dict_of_tensors_that_the_loss_takes(trainer):
    rows = next(iter(trainer.get_train_dataloader()))
    assert len(rows) == 16 and set(rows[0]) == {"prompt", "answer"}
    completion_ids, logprobs = trainer._generate_single_turn([[5, 6], [7]], None, {}, 1)
    assert len(completion_ids) == 2 and isinstance(completion_ids[0], list) and logprobs is None
    output = trainer._generate_and_score_completions(rows)
    names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"]
    assert set(output) == {*names, "old_per_token_logps", "ref_per_token_logps"}
    assert output["advantages"].shape == (16,) and output["num_items_in_batch"].dim() == 0
    assert output["completion_ids"].shape == output["ref_per_token_logps"].shape
    trainer.current_gradient_accumulation_steps = 1
    trainer._buffered_inputs = None
    batch = trainer._prepare_inputs(rows)
    assert len(trainer._buffered_inputs) == 2 and len(batch["advantages"]) == 8
    per_row = trainer._compute_loss(trainer.model, batch)
    wide = batch["advantages"].unsqueeze(1).expand(batch["completion_ids"].shape)
    torch.testing.assert_close(trainer._compute_loss(trainer.model, {**batch, "advantages": wide}), per_row)


def test_finished_rollouts_go_back_through_the_rollout_slot(trainer):
    rows = next(iter(trainer.get_train_dataloader()))[:4]
    seen, ids = [], [[7, 8, 1], [7, 9, 1], [7, 1], [7, 8, 8, 1]]
    mask = [[0, 1, 1], [0, 1, 1], [0, 1], [0, 1, 1, 1]]
    finished = {"prompt_ids": [[5, 6]] * 4, "completion_ids": ids, "logprobs": None, "env_mask": mask}
    trainer.rollout_func = lambda prompts, trainer: finished
    trainer.reward_funcs = [lambda completion_ids, **columns: seen.extend(completion_ids) or [0.0, 0.0, 1.0, 1.0]]
    output = trainer._generate_and_score_completions(rows)
    assert seen == [[7, 8, 1], [7, 9, 1], [7, 1], [7, 8, 8, 1]]
    assert output["tool_mask"].tolist() == [[0, 1, 1, 1]] * 4
    assert (output["tool_mask"] * output["completion_mask"]).sum() == output["num_items_in_batch"] == 8
    assert output["advantages"][0] == output["advantages"][1] == -output["advantages"][2]


def test_generation_gives_completions_fourth_and_the_loss_mask_third(trainer):
    prompts = [row["prompt"] for row in next(iter(trainer.get_train_dataloader()))[:4]]
    prompt_ids, completion_ids, mask, completions, *_ = trainer._generate(prompts)
    assert len(prompt_ids) == len(completion_ids) == len(completions) == 4 and mask is None
    assert completions[0] == trainer.processing_class.decode(completion_ids[0], skip_special_tokens=True)


def test_entropies_are_of_the_tempered_distribution(tmp_path):
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, temperature=0.5)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 2, batch_size=1, compute_entropy=True
        )
        logprobs = (trainer.model(ids).logits[:, 1:3] / 0.5).log_softmax(dim=-1)
    torch.testing.assert_close(entropies, -(logprobs.exp() * logprobs).sum(dim=-1), rtol=1e-4, atol=1e-5)


def test_where_a_batch_has_its_environments_and_tools():
    # `trl_explore/agents/turns.py` puts the environments and tools of branches in the place of the batch's.
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    for line in (
        "if self.environment_factories is not None:",
        "self._batch_environments = [",
        "pool = self._environment_pool[name]",
        "self._sync_tool_dicts.append(sync_tool_dict)",
        "self._async_tool_dicts.append(async_tool_dict)",
        'reset_kwargs = {k: v for k, v in x.items() if k != "environment"} if self._multi_environment else x',
    ):
        assert line in source
    source = inspect.getsource(GRPOTrainer._tool_call_loop)
    assert "sync_tool_dict = self._sync_tool_dicts[idx_with_tool]" in source
    assert "async_tool_dict = self._async_tool_dicts[idx_with_tool]" in source
    assert "iteration_num < self.max_tool_calling_iterations" in source and "self.async_loop" in source
    assert 'reward_kwargs["environments"] = self.environments' in inspect.getsource(GRPOTrainer._calculate_rewards)


def test_old_log_probabilities_are_the_first_pass_after_the_rollout():
    # `trl_explore/gradients/feature_pass.py` repeats this condition and watches that pass.
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    condition = """generate_every = self.args.steps_per_generation * self.num_iterations  # generation frequency
            if self.args.gradient_accumulation_steps % generate_every != 0 or (
                self.use_vllm and self.vllm_importance_sampling_correction
            ):
                old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies("""
    assert source.index("self._generate(") < source.index(condition)
    assert source.index("_get_per_token_logps_and_entropies(") > source.index(condition)
    assert source.index("self._calculate_rewards(") > source.index(condition)


@pytest.mark.skipif(Version(trl.__version__) < Version("1.15"), reason="that TRL keeps all logits")
def test_log_probabilities_come_from_a_fused_head_that_takes_shifted_labels():
    # `trl_explore/packing/forward.py` calls the fused head on one packed sequence, and picks the hidden states that
    # are scored.
    source = inspect.getsource(GRPOTrainer._get_per_token_logps_and_entropies)
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in source
    assert "return logps, entropies, aux_loss" in source
    source = inspect.getsource(utils.add_fused_lm_head)
    assert "backbone_outputs = getattr(self, backbone_attr)(*args, **kwargs)" in source
    assert "hidden_states = backbone_outputs.last_hidden_state\n            labels = shift_labels" in source


def test_micro_batches_are_split_off_in_order_and_kept_in_a_list(trainer):
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "generation_batch = shuffle_sequence_dict(generation_batch)" in source
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in source
    parts = split_tensor_dict({"a": torch.arange(4), "b": torch.tensor(7)}, 2)
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2, 3]] and parts[1]["b"] == 7


def test_the_backbone_gives_hidden_states_before_the_head():
    # A hook on `base_model` sees what the head multiplies, and `logits_to_keep` spares the head.
    model = make_trainer(GRPOTrainer, GRPOConfig).model
    seen = []
    handle = model.base_model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state))
    ids = torch.tensor([[5, 6, 7, 8]])
    logits = model(input_ids=ids, logits_to_keep=1).logits
    handle.remove()
    assert logits.shape[1] == 1 and seen[0].shape == (1, 4, 16)
    torch.testing.assert_close(model.get_output_embeddings()(seen[0])[:, -1], logits[:, 0])


def test_loss_types_are_those_whose_normaliser_is_known(tmp_path):
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert all(f'"{name}"' in source for name in LOSS_NORMALISERS)
    choices = next(f for f in GRPOConfig.__dataclass_fields__.values() if f.name == "loss_type").metadata["help"]
    named = {word.strip("'`\",.") for word in choices.split()} & set(LOSS_NORMALISERS)
    assert named == set(LOSS_NORMALISERS)


def test_the_installed_trl_is_supported_and_others_are_refused():
    check_trl_version(trl.__version__)
    for version in ("1.14.1", "2.0"):
        with pytest.raises(ImportError, match=f"trl {version} is installed"):
            check_trl_version(version)


def test_generate_gives_the_model_its_cache_under_a_known_name():
    # Under an unknown name, prompts and prefixes would be encoded again without a word.
    model, seen = make_model(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(given_cache(kwargs)), with_kwargs=True)
    model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2, pad_token_id=0)
    assert [name for name, _ in seen] == [cache_argument(model)] * 2
    assert all(isinstance(cache, DynamicCache) for _, cache in seen)


def test_an_epoch_draws_its_order_when_it_begins(tmp_path):
    # `trainers/saving.py` lets the sampler begin the epochs that are over and replaces the sampler of the resumed one.
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path)
    first, second = trainer._get_train_sampler(), trainer._get_train_sampler()
    orders = [list(first) for _ in range(3)]
    next(iter(second)), next(iter(second))
    assert list(second) == orders[2] != orders[0]
    source = inspect.getsource(GRPOTrainer._run_epoch)
    assert "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)" in source
    assert "if epoch == epochs_trained and resume_from_checkpoint is not None:" in source


def test_the_vllm_backend_is_made_under_a_name_that_can_be_replaced():
    # `trl_explore/serving/backend.py` replaces TRL's backend with its own and overrides these methods.
    source = inspect.getsource(GRPOTrainer.__init__)
    assert "self.vllm_generation = VLLMGeneration(" in source and "self._last_loaded_step = -1" in source
    source = inspect.getsource(VLLMGeneration)
    for line in (
        "self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())",
        "self.vllm_client.reset_prefix_cache()",
        "self._llm_weights_sleeping = True",
        "model.merge_adapter()",
    ):
        assert line in source
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "if self.state.global_step != self._last_loaded_step:" in source and "images=images" in source


def test_the_vllm_client_posts_and_sends_weights_as_ours_expects():
    names = list(inspect.signature(VLLMClient.generate).parameters)
    assert {"prompts", "n", "max_tokens", "logprobs", "generation_kwargs", "structured_outputs_regex"} <= set(names)
    assert "self.session.mount(" in inspect.getsource(VLLMClient.__init__)


def test_tokens_without_sampling_probability_are_not_corrected():
    # Rows that vLLM did not sample as they are trained hand in `None` for each token.
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'torch.tensor([float("nan") if x is None else x for x in logps])' in source
    assert "per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)" in source
    assert "delta = delta[mask & ~torch.isnan(delta)]" in source
    assert "kl_div = torch.nan_to_num(kl_div, nan=0.0)" in inspect.getsource(GRPOTrainer.get_off_policy_mask)

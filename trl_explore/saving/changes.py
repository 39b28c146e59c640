"""What may change between a run and the one that goes on from its checkpoint: the table, and what is said of it.

Fields that `transformers.TrainingArguments` has (learning rate, `max_steps`, logging, saving and the like) may change
without a word, but for those that are named here. All other fields of GRPO and of the methods may change with one
warning, but for those that are free.
"""

from collections.abc import Collection, Mapping
from typing import Any

from trl_explore.saving.plain_values import to_plain

# With other values prompts would be trained twice, or left out.
MOVES_DATA = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "shuffle_dataset",
    "seed",
    "train_dataset",
)
# With other values rollouts that are still in use would lack something, or be something else.
NEEDED_BY_ROLLOUTS = ("beta", "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
# Not what is trained, but where and how it is done, shown, kept or published.
FREE = (
    "generation_batch_size",  # says what others say
    "model_init_kwargs",
    "trust_remote_code",
    "num_generations_eval",
    "eval_interaction_limit",
    "ds3_gather_for_generation",
    "pad_to_multiple_of",
    "cache_implementation",
    "use_transformers_continuous_batching",
    "transformers_continuous_batching_config",
    "use_transformers_paged",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_weight_sync",
    "log_completions",
    "log_multimodal",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
    "sampling_batch_size",
    "path_cache_tokens",
    "shared_prefix_training",
    "packed_token_budget",
    "push_method_state",
    "push_dry_run",
    "hard_states_file",
    "dump_trees",
    "replay_file",
)


def compared_values(values: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Settings as a checkpoint keeps them: plain values by name, without those that are `free`."""
    named = {*MOVES_DATA, *NEEDED_BY_ROLLOUTS}
    kept = {name: value for name, value in values.items() if name in named or name not in {*free, *FREE}}
    if not kept["shuffle_dataset"]:
        kept.pop("seed")  # it moves nothing, and random states come from the checkpoint
    return {name: _plain(value) for name, value in kept.items()}


def check_changes(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    checkpoint: str,
    skips_data: bool,
    rollouts_in_use: bool,
    boundary: int,
) -> str | None:
    """A warning that lists what changed, `None` for nothing; a `ValueError` for what must not change."""
    changed = {name: (old, now[name]) for name, old in then.items() if name in now and old != now[name]}
    moved = _said(changed, MOVES_DATA)
    if moved and skips_data:
        raise ValueError(
            f"{moved} since {checkpoint} was written: prompts would be trained twice or left out. Set that back, or "
            "begin the data of this epoch anew with `ignore_data_skip=True`."
        )
    # Rollouts with reference log-probabilities can be trained without a KL term, not the other way round.
    strict = [name for name in NEEDED_BY_ROLLOUTS if name != "beta" or then.get("beta") == 0]
    needed = _said(changed, strict)
    if needed and skips_data and rollouts_in_use:
        raise ValueError(
            f"{needed} since {checkpoint} was written, but rollouts that were made before are still in use there. Set "
            f"that back, go on from a checkpoint between two generation batches (steps that {boundary} divides), or "
            "drop these rollouts with `ignore_data_skip=True`."
        )
    said = _said(changed, changed)
    return f"{said} since {checkpoint} was written; the new values hold from here on." if said else None


def _said(changed: Mapping[str, tuple[Any, Any]], names: Collection[str]) -> str:
    changes = [(name, *changed[name]) for name in names if name in changed]
    return ", ".join(f"`{name}` changed from {old!r} to {new!r}" for name, old, new in changes)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):  # which of them depends on who read the configuration
        return [_plain(item) for item in value]
    return to_plain(value, other=repr)

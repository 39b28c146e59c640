"""Settings that may change when a run resumes from a checkpoint, and the messages about changes.

- The fields in `MOVES_DATA` must not change, unless the run starts again at the first data of its epoch.
- The same holds for the fields in `NEEDED_BY_ROLLOUTS` if the checkpoint has rollouts that are still trained.
- Other fields of `transformers.TrainingArguments` (learning rate, `max_steps`, logging, saving and so on) may change
  without a message, and so may the fields in `FREE`.
- The remaining fields of GRPO and of the methods may change. One warning lists the changes.
"""

from collections.abc import Collection, Mapping
from typing import Any

from trl_explore.names import shown
from trl_explore.saving.plain_values import to_plain

# If one of these changed, prompts would be trained twice or left out.
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
# If one of these changed, the rollouts in a checkpoint would lack a tensor that the loss needs, or have a wrong one.
NEEDED_BY_ROLLOUTS = ("beta", "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
# These do not change the training: they choose hardware, speed, logs, files and publishing.
FREE = (
    "generation_batch_size",  # follows from other fields
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
    """
    Return the settings that a checkpoint keeps, to compare them when a run resumes.

    Args:
        values (`Mapping[str, Any]`):
            All settings of the run, by name.
        free (`Collection[str]`):
            Names of settings that may change without a message, in addition to `FREE`. Names in `MOVES_DATA` and
            `NEEDED_BY_ROLLOUTS` are ignored.

    Returns:
        `dict[str, Any]`: The other settings, as plain values.
    """
    # `free` contains some of the fields that must not change, such as `seed`. Compare these anyway.
    left_out = {*free, *FREE} - {*MOVES_DATA, *NEEDED_BY_ROLLOUTS}
    if not values["shuffle_dataset"]:
        left_out.add("seed")  # without shuffling, it has no effect: random states come from the checkpoint
    return {name: _plain(value) for name, value in values.items() if name not in left_out}


def check_changes(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    checkpoint: str,
    skips_data: bool,
    rollouts_in_use: bool,
    boundary: int,
) -> str | None:
    """
    Compare the settings of a checkpoint with the settings of the run that resumes from it.

    Args:
        then (`Mapping[str, Any]`):
            Settings in the checkpoint, from [`compared_values`].
        now (`Mapping[str, Any]`):
            Settings of this run, from [`compared_values`].
        checkpoint (`str`):
            Name of the checkpoint, for messages.
        skips_data (`bool`):
            True if the run skips the data that the checkpoint has already used in its epoch.
        rollouts_in_use (`bool`):
            True if the checkpoint has rollouts that are still trained.
        boundary (`int`):
            Number of steps per generation batch.

    Returns:
        `str` or `None`: A warning that lists the changes, or None if nothing changed.

    Raises:
        ValueError: If `skips_data`, and a field in `MOVES_DATA` changed. If `skips_data` and `rollouts_in_use`, and a
            field in `NEEDED_BY_ROLLOUTS` changed.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for name, old in then.items():
        if name in now and old != now[name]:
            changed[name] = (old, now[name])
    moved = _described(changed, MOVES_DATA)
    if moved and skips_data:
        raise ValueError(
            f"{moved} since {checkpoint} was written: prompts would be trained twice or left out. Set that back, or "
            "start again at the first data of this epoch with `ignore_data_skip=True`."
        )
    # Only a change of `beta` from 0 is an error: these rollouts lack the reference log-probabilities of the KL term.
    strict = [name for name in NEEDED_BY_ROLLOUTS if name != "beta" or then.get("beta") == 0]
    needed = _described(changed, strict)
    if needed and skips_data and rollouts_in_use:
        raise ValueError(
            f"{needed} since {checkpoint} was written, but rollouts that were made before are still in use there. Set "
            f"that back, resume from a checkpoint between two generation batches (steps that {boundary} divides), or "
            "drop these rollouts with `ignore_data_skip=True`."
        )
    if not changed:
        return None
    return f"{_described(changed, changed)} since {checkpoint} was written; the new values are used from now on."


def _described(changed: Mapping[str, tuple[Any, Any]], names: Collection[str]) -> str:
    """Return a list of the changes of `names`, for messages. It is empty if none of them changed."""
    changes = []
    for name in names:
        if name in changed:
            old, new = changed[name]
            changes.append(f"`{name}` changed from {old!r} to {new!r}")
    return ", ".join(changes)


def _plain(value: Any) -> Any:
    """Return a setting as a plain value; a tuple becomes a list, and a function its import path."""
    # The same setting is a list or a tuple, depending on the source of the configuration (Python, YAML, flags).
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return to_plain(shown(value), other=repr)

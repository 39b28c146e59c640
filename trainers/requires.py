"""Requirements of a method, and checks of a trainer's arguments against them."""

from dataclasses import dataclass, fields
from typing import Any

from datasets import Dataset, IterableDataset

from trl_explore.compat import check_seams
from trl_explore.credit.checks import check_text_only, check_updates
from trl_explore.names import prompt_change
from trl_explore.rows.columns import row_columns
from trl_explore.rows.streams import check_loss_type

from .config import ExplorationConfig


@dataclass(frozen=True)
class Requires:
    """Requirements of a method. By default, the method samples as GRPO does."""

    samples: bool = False  # it samples rows itself, at any time and on every process independently
    main_rows: bool = False  # it samples the main rows itself
    extra_rows: bool = False  # it trains rows in addition to the main rows
    own_limit: bool = False  # it needs `max_completion_length` as the limit of GRPO's rows and of its own
    whole_groups: bool = False  # all completions of a prompt must be on one process
    tools: bool = False  # it supports tools and environments although it samples rows itself
    vision: bool = True  # it supports vision-language models, unless it samples rows itself
    turns: bool = False  # it needs to follow TRL's tool loop turn by turn
    watched_tools: bool = False  # the trainer must count the calls of its tools
    features: bool = False  # it needs gradient features of the main rows

    def __or__(self, other: "Requires") -> "Requires":
        """Combine the requirements of two methods in one class."""
        both = {}
        for field in fields(self):
            both[field.name] = getattr(self, field.name) or getattr(other, field.name)
        both["vision"] = self.vision and other.vision
        return Requires(**both)


def check_arguments(
    name: str,
    requires: Requires,
    args: ExplorationConfig,
    *,
    samples_as_grpo: bool,
    train_dataset: Any,
    tools: Any,
    rollout_func: Any,
    environment_factory: Any,
) -> None:
    """Raise an error if a trainer cannot work with its arguments. Raise an ImportError if the installed TRL does not
    fit."""
    check_seams()
    if args.use_vllm:
        check_seams("use_vllm")
    check_loss_type(args.loss_type)
    check_updates(args)
    if rollout_func is not None and not samples_as_grpo:
        raise ValueError(
            f"`rollout_func` cannot be combined with {name}, which samples rollouts itself: remove it, or use "
            "GRPOTrainer."
        )
    if (tools or environment_factory is not None) and not (samples_as_grpo or requires.tools):
        field = "tools" if tools else "environment_factory"
        if args.explore is not None:  # then this field samples rows, and not the trainer's class
            name = f"`explore={args.explore!r}`"
        raise ValueError(f"{name} does not support `{field}` (multi-turn rollouts): remove it, or use GRPOTrainer.")
    if (tools or environment_factory is not None) and args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length=None`: the turns of an agent and what its tools answer need a limit together. Set "
            "a number."
        )
    if samples_as_grpo and args.explores_some:
        field = "explore_share_end" if args.explore_prompts == "all" else "explore_prompts"
        raise ValueError(
            f"`{field}={getattr(args, field)!r}` chooses prompts to search, sketch or branch, and {name} does none of "
            "it: leave it out, use another trainer, or set `explore='resample'`."
        )
    _check_order(name, args, train_dataset)
    if args.budget != "uniform" and args.explores_unsolved:
        raise ValueError(
            f"`budget={args.budget!r}` gives prompts unequally many rows, and `explore={args.explore!r}` compares "
            "groups of one size: leave one of the two out."
        )
    if args.budget != "uniform" and (requires.whole_groups or requires.features):
        raise ValueError(
            f"`budget={args.budget!r}` gives prompts unequally many rows, and {name} compares groups of one size: "
            "leave it out, or use ExplorationTrainer or DeepGRPOTrainer."
        )
    options = args.generation_kwargs or {}
    beams = options.get("num_beams") or 1
    copies = options.get("num_return_sequences") or 1
    if copies > 1:
        raise ValueError(
            f"`generation_kwargs={{'num_return_sequences': {copies}}}`: every row of a batch has one completion. "
            f"Leave it out, and raise `num_generations={args.num_generations}` for more completions per prompt."
        )
    if args.use_vllm and beams > 1:
        raise ValueError(
            f"`generation_kwargs={{'num_beams': {beams}}}`: vLLM samples without beams. Leave it out, or set "
            "`use_vllm=False`."
        )
    if requires.own_limit:
        _check_one_limit(name, args)
    if args.use_vllm and args.vllm_mode == "server" and args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length=None`: a vLLM server is told how long completions may be. Set a number, or "
            "`use_vllm=False`."
        )
    if args.use_vllm and requires.samples:
        _check_vllm(name, args)
    num_rows = args.per_device_train_batch_size * args.steps_per_generation  # of a generation batch, on one process
    who, needs_whole_groups = name, requires.whole_groups
    # These fields drop, replace or move rows by group, and all processes must end with the same number of rows. So
    # they need whole groups, whatever the method requires. The error names the first field in use.
    in_use = {
        "dynamic_sampling": args.dynamic_sampling == "refill",
        "explore_threshold": args.explore_threshold is not None,
        "budget": args.budget != "uniform",
        "trained_generations": args.trained_generations is not None,
    }
    for field, is_used in in_use.items():
        if is_used:
            who, needs_whole_groups = f"{name} with `{field}={getattr(args, field)!r}`", True
            break
    if needs_whole_groups and num_rows % args.num_generations:
        raise ValueError(
            f"{who} needs all completions of a prompt on one process, but its {args.num_generations} would span "
            f"several: `per_device_train_batch_size={args.per_device_train_batch_size}` times "
            f"`steps_per_generation={args.steps_per_generation}` must be a multiple of "
            f"`num_generations={args.num_generations}`. Change one of the three."
        )
    # Data need no prompts if an environment defines the task.
    if isinstance(train_dataset, Dataset | IterableDataset) and environment_factory is None:
        columns = row_columns(train_dataset)
        if columns is not None and "prompt" not in columns:
            raise ValueError(
                f"`train_dataset` has no `prompt` column, only {columns}: give it one, for example with "
                f"`dataset = dataset{prompt_change(columns)}`."
            )


def _check_one_limit(name: str, args: ExplorationConfig) -> None:
    """Raise a ValueError if GRPO's rows and the rows that a method samples would have different limits of tokens."""
    options, most = args.generation_kwargs or {}, args.max_completion_length
    if args.explore is not None:  # the explorer that this field names samples the rows
        name = f"`explore={args.explore!r}`"
    if args.use_vllm and "max_tokens" in options:
        # This limit replaces the limit of every request, so a branch could be as long as a whole completion.
        raise ValueError(
            f"`generation_kwargs={{'max_tokens': {options['max_tokens']}}}` replaces the token limits of all "
            f"requests to vLLM, also of those with which {name} samples: leave `max_tokens` out, and set "
            "`max_completion_length`."
        )
    limit = args.max_sampled_tokens
    # With `max_completion_length=None`, further rows end where the longest of GRPO's rows does.
    if most is not None and limit != most:
        raise ValueError(
            f"`generation_kwargs={{'max_new_tokens': {limit}}}` and `max_completion_length={most}` are two limits of "
            f"a completion, and {name} samples rows with `max_completion_length`: leave `max_new_tokens` out."
        )


def check_vision(name: str, args: ExplorationConfig, *, is_supported: bool) -> None:
    """Raise a ValueError if the trainer does not support vision-language models (`is_supported`), or if one of its
    fields does not."""
    if not is_supported:
        raise ValueError(f"{name} does not support vision-language models: pass a text model or use GRPOTrainer.")
    check_text_only(args)


def _check_order(name: str, args: ExplorationConfig, train_dataset: Any) -> None:
    """Raise a ValueError if a field chooses prompts and the data is a stream."""
    if not isinstance(train_dataset, IterableDataset):
        return
    if args.dynamic_sampling == "refill":
        raise ValueError(
            f"`dynamic_sampling='refill'` takes further prompts out of the order of the data, and `train_dataset` is "
            f"a stream: {name} cannot go ahead in it. Load it whole, or set `dynamic_sampling='filter'`."
        )
    for field in ("explore_threshold", "budget"):
        value = getattr(args, field)
        if value not in (None, "uniform"):
            raise ValueError(
                f"`{field}={value!r}` knows prompts by their place in the data, and `train_dataset` is a "
                "stream: load it whole, or leave the field out."
            )


def _check_vllm(name: str, args: ExplorationConfig) -> None:
    """Raise an error if vLLM's options do not work with a method that samples rows itself."""
    if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise NotImplementedError(
            f"{name} samples at its own pace on every process, but `vllm_tensor_parallel_size="
            f"{args.vllm_tensor_parallel_size}` in `vllm_mode='colocate'` makes them one: set it to 1, or use "
            "`vllm_mode='server'`, whose `vllm serve --tensor-parallel-size` may be any."
        )
    if args.vllm_structured_outputs_regex is not None:
        raise ValueError(
            f"`vllm_structured_outputs_regex` describes whole completions, but {name} also samples from inside "
            "them: leave it out, or use GRPOTrainer."
        )

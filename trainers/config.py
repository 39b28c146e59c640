"""What the configurations of all exploration trainers share."""

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import TypeVar

from trl import GRPOConfig

from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.publishing.hub import check_repo_id
from trl_explore.serving.agreement import WEIGHT_SYNCS

# Rows of one stage of sampling that no real run comes near: what asks for more is a slip that would run for ever.
MOST_STAGE_ROWS = 100_000
PACKING_MODES = ("off", "on", "auto")
C = TypeVar("C", bound="ExplorationConfig")


@explain_unknown_fields
@dataclass
class ExplorationConfig(GRPOConfig):
    r"""
    Base of the exploration configurations: every field of [`~trl.GRPOConfig`], and seven that all methods share.

    Args:
        drop_zero_advantage (`bool`, *optional*, defaults to `False`):
            Leave rows whose advantage is 0 out of the loss and out of what it is averaged over, in the main stream and
            in extra streams alike. Where all rewards of a group are equal it is 0, whatever rounding makes of it.
            `False` is TRL's convention.
        success_reward (`str`, *optional*):
            Name of the reward function that decides what success is, compared with the method's `success_threshold` as
            the function returns it, without its weight; a completion that it does not score is neither a success nor a
            failure. What a completion is worth stays the sum of all rewards. `None`: the sum decides.
        sampling_batch_size (`int`, *optional*):
            Rows per `generate` call when a method samples extra rows with the transformers backend. `None` samples a
            whole stage in a single call; lower it if that call runs out of memory.
        vllm_weight_sync (`str`, *optional*, defaults to `"auto"`):
            How weights travel to a vLLM server: `"nccl"` between GPUs (TRL's way), `"file"` through files in
            `output_dir`, for servers on CPUs or without a common GPU network. `"auto"` is `"nccl"` where the trainer
            has a GPU. The server's `--weight-transfer-config` must name the same.
        shared_prefix_training (`str`, *optional*, defaults to `"off"`):
            Whether tokens that rows of a micro-batch share at their starts are computed once: `"on"`, `"off"`, or
            `"auto"`, which looks at how many they are. Results are the same up to rounding. With `"on"` and `"auto"`,
            rows of one tree go into one micro-batch.
        packed_token_budget (`int`, *optional*):
            Most tokens of one sequence of packed rows; at least the longest prompt plus `max_completion_length`. A
            micro-batch that has more, each shared token counted once, becomes several sequences, each with a forward
            pass of its own. `None` makes one sequence of all rows.
        push_method_state (`bool`, *optional*, defaults to `False`):
            Publish, beside the model, what the method keeps: its state (`explore_state_<rank>.pt`) and the files that
            it writes into `output_dir`, such as dumped trees, which hold prompts and completions.
            [`~trl_explore.saving.checkpoints.load_state`] reads the state. Whole checkpoints, which
            `hub_strategy="checkpoint"` and `"all_checkpoints"` ask for, always hold it: they are sent to be resumed.
    """

    drop_zero_advantage: bool = field(
        default=False,
        metadata={
            "help": "Leave rows with advantage 0 out of the loss and its normaliser, in all streams alike. False is "
            "TRL's convention."
        },
    )
    success_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function that is compared with success_threshold, without its weight. None: "
            "the sum of all rewards."
        },
    )
    sampling_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows per `generate` call for extra samples (transformers backend). None: a whole stage in one "
            "call; lower it if that call runs out of memory."
        },
    )
    vllm_weight_sync: str = field(
        default="auto",
        metadata={
            "help": "How weights travel to a vLLM server: 'nccl', 'file' (in output_dir), or 'auto' (nccl on GPUs)."
        },
    )
    shared_prefix_training: str = field(
        default="off",
        metadata={
            "help": "Compute tokens that rows share at their starts once: 'on', 'off' or 'auto' (where many are)."
        },
    )
    packed_token_budget: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens of one sequence of packed rows (shared_prefix_training); at least the longest prompt "
            "plus max_completion_length. None: all rows of a micro-batch in one sequence."
        },
    )
    push_method_state: bool = field(
        default=False,
        metadata={
            "help": "Publish what the method keeps and writes (state, dumped trees, solutions) beside the model. "
            "Whole checkpoints always hold the state."
        },
    )

    def __post_init__(self) -> None:
        self.validate()
        super().__post_init__()

    def validate(self) -> None:
        """
        Check the method's own fields.

        Raises:
            ValueError: Naming the field, its value and the remedy.
        """
        check_training_values(self)
        if self.vllm_weight_sync not in WEIGHT_SYNCS:
            raise ValueError(f"`vllm_weight_sync`: {unknown_name('value', self.vllm_weight_sync, WEIGHT_SYNCS)}")
        if isinstance(self.shared_prefix_training, bool):  # what `on` and `off` are in YAML
            self.shared_prefix_training = "on" if self.shared_prefix_training else "off"
        if self.shared_prefix_training not in PACKING_MODES:
            problem = unknown_name("value", self.shared_prefix_training, PACKING_MODES)
            raise ValueError(f"`shared_prefix_training`: {problem}")
        self._check_token_budget()
        if self.sampling_batch_size is not None and self.sampling_batch_size < 1:
            raise ValueError(
                f"`sampling_batch_size={self.sampling_batch_size}` must be at least 1, or None for a single call."
            )
        if self.push_to_hub:
            check_repo_id(self.hub_model_id, self.output_dir or "trainer_output")

    @property
    def rows_per_generation(self) -> int:
        """Completions of a generation batch: of this process, or of all where `generation_batch_size` is set."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.generation_batch_size or self.per_device_train_batch_size * steps

    def check_stage(self, field: str, places: int) -> None:
        """
        Check how many rows a stage of sampling can have.

        Args:
            field (`str`):
                Name of the field that says how many are sampled from each place.
            places (`int`):
                Most places of a generation batch.

        Raises:
            ValueError: If they are absurdly many.
        """
        number = vars(self)[field]
        if number * places > MOST_STAGE_ROWS:
            raise ValueError(
                f"`{field}={number}` can sample {number:,} completions from each of {places:,} places of a generation "
                f"batch at once, more than {MOST_STAGE_ROWS:,} in all: lower it to at most "
                f"{MOST_STAGE_ROWS // places}, or make the batch smaller."
            )

    def _check_token_budget(self) -> None:
        budget, completion = self.packed_token_budget, self.max_completion_length or 0
        if budget is None:
            return
        field = f"`packed_token_budget={budget}`"
        if budget < 1:
            raise ValueError(f"{field} must be at least 1, or None for one sequence of any length.")
        if self.shared_prefix_training == "off":
            raise ValueError(
                f"{field} splits packed rows, but `shared_prefix_training='off'` packs none: set that to 'on' or "
                "'auto', or leave `packed_token_budget` out."
            )
        if budget <= completion:  # a prompt has a token; how long prompts are shows when they are tokenised
            raise ValueError(
                f"{field} cannot hold a prompt and `max_completion_length={completion}` tokens: set it to at least "
                f"{completion} plus the longest prompt, or lower `max_completion_length`."
            )


def check_training_values(args: GRPOConfig) -> None:
    """
    Check values that TRL accepts and that end a run later, in another library's words.

    Args:
        args ([`~trl.GRPOConfig`]):
            Any GRPO configuration.

    Raises:
        ValueError: Naming the field, its value and the remedy.
    """
    if not 0 <= float(args.learning_rate) < math.inf:
        raise ValueError(f"`learning_rate={args.learning_rate}` must be a finite number, at least 0.")
    if not 0 < args.temperature < math.inf:
        raise ValueError(
            f"`temperature={args.temperature}` must be positive: completions of a group must be able to differ. For "
            "samples that are nearly greedy set 0.1."
        )
    if args.max_completion_length is not None and args.max_completion_length < 1:
        raise ValueError(f"`max_completion_length={args.max_completion_length}` must be at least 1 token.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p={args.top_p}` must be in (0, 1]; 1 samples from all tokens.")
    if args.min_p is not None and not 0 <= args.min_p <= 1:
        raise ValueError(f"`min_p={args.min_p}` must be in [0, 1]; 0 samples from all tokens.")


def upgrade_config(args: GRPOConfig, config_class: type[C]) -> C:
    """
    Turn a plain `GRPOConfig` into a method's configuration with the method's defaults.

    Args:
        args ([`~trl.GRPOConfig`]):
            Any GRPO configuration.
        config_class (`type`):
            The method's configuration class.

    Returns:
        `config_class`: `args` itself where it is one already; else a configuration with the same values. Its
        `__post_init__` does not run again: the values it derives (batch sizes, devices) are already there.
    """
    if isinstance(args, config_class):
        return args
    upgraded = object.__new__(config_class)
    for f in fields(config_class):
        if f.default is not MISSING:
            vars(upgraded)[f.name] = f.default
        elif f.default_factory is not MISSING:
            vars(upgraded)[f.name] = f.default_factory()
    vars(upgraded).update(vars(args))
    upgraded.validate()
    return upgraded

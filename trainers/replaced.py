"""Detect data, arguments and attributes of a trainer that a user replaces after the trainer is made."""

from typing import Any

from trl_explore.rewards.success import check_success_reward

from .config import ExplorationConfig
from .explorer_options import own_options
from .requires import check_arguments

# TRL copies these fields of the arguments to attributes of the trainer, and reads only the attributes later.
COPIED = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "loss_type",
    "scale_rewards",
    "multi_objective_aggregation",
    "mask_truncated_completions",
    "num_iterations",
)
# Fields that choose prompts and define success. If one of them changes, the trainer's `PARTS` must be made again.
SELECTION = (
    "dynamic_sampling",
    "explore_threshold",
    "budget",
    "explore_prompts",
    "explore_into",
    "explore_share_end",
    "success_reward",
    "success_threshold",
)
# Cached properties of the trainer that depend on the fields in `SELECTION`.
PARTS = ("rounds", "choice", "exploration", "branching", "stream_training", "threshold_watch")


class Replaced:
    """
    Detects replacements by a user. Updates the trainer's parts, or raises an error if that is impossible.

    Args:
        trainer ([`~trl_explore.trainers.ExplorationTrainer`]):
            The trainer.
        given (`dict`):
            Keyword arguments for [`~trl_explore.trainers.requires.check_arguments`], which the constructor has already
            called once. `begin_run` updates them and calls it again.
    """

    def __init__(self, trainer: Any, given: dict[str, Any]) -> None:
        self.trainer, self.given = trainer, given
        self.args: ExplorationConfig = trainer.args
        self.data, self.model = trainer.train_dataset, trainer.model
        self.explore = self.args.explore
        self.copied = {name: getattr(trainer, name) for name in COPIED}
        self.selection = self._selection()
        self.limits = self._limits()

    def begin_run(self) -> None:
        """Check everything that was replaced since the last run, and update the parts. Called at the start of
        `train`."""
        trainer = self.trainer
        if trainer.args is not self.args:
            raise ValueError(
                "`trainer.args` was replaced after the trainer was made, but parts of the trainer still use the "
                "first arguments: set the fields of `trainer.args` instead, or make a new trainer with "
                "`model=trainer.model`."
            )
        if self.args.explore != self.explore:
            raise ValueError(
                f"`explore` was changed from {self.explore!r} to {self.args.explore!r} after the trainer was made, "
                "but its explorers are those of the first value: make a new trainer."
            )
        if trainer.model is not self.model:
            raise ValueError(
                "`trainer.model` was replaced after the trainer was made, but TRL trains, samples and prepares the "
                "loss of the first one: make a new trainer with the other model."
            )
        self.follow()
        if self._selection() != self.selection:
            self.args.validate()
            self.selection = self._selection()
            for part in PARTS:
                trainer.__dict__.pop(part, None)  # a cached property: it is made again when it is used
        new_data = trainer.train_dataset is not self.data
        self.given["train_dataset"] = trainer.train_dataset if new_data else None  # None: do not check it again
        self.given["rollout_func"] = trainer.rollout_func
        check_arguments(type(trainer).__name__, trainer.requirements(self.args), self.args, **self.given)
        check_success_reward(self.args.success_reward, trainer.reward_func_names)
        if new_data:
            if self.args.explores_unsolved:
                # Only for its errors: the explorer `"hints"` needs a column of the new data.
                own_options(self.args, is_agent=trainer.is_agent, train_dataset=trainer.train_dataset)
            self.data = trainer.train_dataset
            self._check_longest_prompt()
            trainer.forget_data()

    def end_run(self) -> None:
        """Record the current model. transformers itself may replace `trainer.model` during a run, for example by a
        sharded model, and the next run must not report that as a replacement by the user."""
        self.model = self.trainer.model

    def follow(self) -> None:
        """
        Copy attributes of the trainer that a user changed, for example in a callback, into the arguments.

        TRL reads the attributes, and this package reads the arguments, so the two must agree. Called at the start of a
        run and for every generation batch.
        """
        trainer, args = self.trainer, self.args
        for name, before in self.copied.items():
            attribute, argument = getattr(trainer, name), getattr(args, name)
            if attribute == before and argument == before:
                continue
            if attribute == before:  # only the argument changed, and TRL does not read it again
                self._refuse_argument(name, argument)
            if name == "num_generations" and not self.given["samples_as_grpo"]:
                raise ValueError(
                    f"`trainer.num_generations` changed from {before} to {attribute}, but {type(trainer).__name__} is "
                    "made for groups of one size: make a new trainer with `model=trainer.model`."
                )
            self.copied[name] = attribute
            setattr(args, name, attribute)
        limits = self._limits()
        # `generation_kwargs` may make the two limits different from the start, so compare them only after a change.
        if limits != self.limits and len(set(limits)) > 1 and not self.given["samples_as_grpo"]:
            raise ValueError(
                f"`trainer.max_completion_length={limits[0]}` and the most tokens that TRL samples, {limits[1]}, are "
                f"no longer the same, and {type(trainer).__name__} samples further rows up to one limit: set both, "
                f"the second as `{self._limit_name}`."
            )
        self.limits = limits

    def _refuse_argument(self, name: str, value: Any) -> None:
        """Raise a ValueError for a field of the arguments that was changed too late."""
        # TRL copies these two fields twice. The second copy is the one with which it samples.
        also = {
            "max_completion_length": f" and `trainer.{self._limit_name}`",
            "temperature": " and `trainer.generation_config.temperature`",
        }
        raise ValueError(
            f"`args.{name}` changed from {self.copied[name]!r} to {value!r} after the trainer was made. TRL copies "
            f"this field when the trainer is made, and does not read it again: set `trainer.{name}`"
            f"{also.get(name, '')} instead, or make a new trainer with "
            "`model=trainer.model`."
        )

    def _selection(self) -> list[Any]:
        return [getattr(self.args, name, None) for name in SELECTION]

    def _limits(self) -> tuple[int | None, int | None]:
        """Return the two limits of a completion's tokens: the trainer's attribute, and the limit with which TRL
        samples."""
        trainer = self.trainer
        if trainer.use_vllm:
            return trainer.max_completion_length, trainer.vllm_generation.max_completion_length
        return trainer.max_completion_length, trainer.generation_config.max_new_tokens

    @property
    def _limit_name(self) -> str:
        if self.trainer.use_vllm:
            return "vllm_generation.max_completion_length"
        return "generation_config.max_new_tokens"

    def _check_longest_prompt(self) -> None:
        """Check that the longest prompt of new data is within the limits of vLLM and of packing."""
        trainer = self.trainer
        if trainer.serving is not None:
            trainer.serving.check_longest(trainer.longest_prompt())
        if trainer.packing.token_budget is not None:
            trainer.packing.check_longest(trainer.longest_prompt())

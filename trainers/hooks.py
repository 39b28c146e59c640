"""The hooks of a trainer: all that the author of a method reads.

The defaults are plain GRPO. Hooks run in training only; evaluation is GRPO's. Dimension letters: B rows on this
process, N rows over all processes, T completion tokens, F reward functions.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trl_explore.agents.forks import Forks
from trl_explore.agents.turns import Turns
from trl_explore.credit.part import Credit
from trl_explore.explorers.exploration import Exploration
from trl_explore.explorers.explorer import Explorer, PlainSampling
from trl_explore.gradients.feature_pass import FeaturePass
from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import ScoredRows, Scorer
from trl_explore.rows.streams import RowDict
from trl_explore.rows.table import CompletionsTable
from trl_explore.rows.training import StreamTraining
from trl_explore.sampling.sampler import Sampler
from trl_explore.selection.choice import PromptChoice
from trl_explore.selection.rounds import Rounds
from trl_explore.serving.session import Serving

from .config import ExplorationConfig
from .requires import Requires


class Hooks:
    """Base class of trainers with the methods that a method may override, and the parts that it may use."""

    config_class: type[ExplorationConfig] = ExplorationConfig
    requires = Requires()
    method = "exploration"  # name of a row of `METHODS`

    args: Any  # the configuration
    explorer: Explorer | None = None  # made by `make_explorer`
    # The generation batch on this process:
    main_examples: list[dict[str, Any]] = []  # copies of the data-set rows, `[B]`
    main_completion_ids: list[list[int]] = []  # tokens of the main rows, `[B][T_i]`
    given_examples: list[dict[str, Any]] = []  # the rows that TRL has, `[B]`; environments and rewards change them
    shaped_rewards: torch.Tensor  # rewards that the advantages of the main rows come from, `(N, F)`

    num_generations: Any  # rows of a prompt; TRL sets it
    log_completions = False
    turns: Turns | None = None  # an agent's turns; None unless `Requires(turns=True)`
    forks: Forks | None = None  # continues an agent's trajectories from one of their turns
    features: FeaturePass | None = None  # gradient features; None unless `Requires(features=True)`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for parent in cls.__bases__:
            if issubclass(parent, Hooks):
                cls.requires |= parent.requires

    # ---------------------------------------------------------------------------------------------------- construction

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        """
        Check what the trainer is given, before any model is loaded.

        Raises:
            ValueError: If the method cannot work with it. The message names the field, the value and the remedy.
        """

    def requirements(self, args: Any) -> Requires:
        """Return what the method needs with a configuration."""
        own_explorer = type(self).make_explorer != Hooks.make_explorer
        if args.explore is not None and (own_explorer or self.requires.samples):
            raise ValueError(
                f"`explore={args.explore!r}` is a way of exploring, and {type(self).__name__} has its own: leave the "
                "field out, or use ExplorationTrainer."
            )
        if own_explorer or args.explore is not None:
            return replace(self.requires, samples=True, main_rows=True, whole_groups=True)
        return self.requires

    def make_explorer(self) -> Explorer | None:
        """Return the explorer that samples main rows in its own way, or None if GRPO samples them."""
        return None

    def setup(self) -> None:
        """Make the method's own state. It runs at the end of construction, after `make_explorer`."""

    # ---------------------------------------------------------------------------- a generation batch, in calling order

    def rollout(self, prompt_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """
        Sample the main rows. An explorer is the simpler way.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`; the rows of a group are consecutive.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: one completion for each list of tokens.

        Returns:
            [`Rollout`]: Exactly one completion per row.
        """
        if self.exploration is None:
            return plain(prompt_ids)
        return self.exploration.rollout(prompt_ids, self.main_examples, plain)

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        Return the rewards that GRPO's advantages are computed from. The logged `reward` stays the raw one.

        Args:
            rewards_per_func (`torch.Tensor`):
                Raw rewards over all processes, shape `(N, F)`, groups consecutive; NaN if a row was not scored.

        Returns:
            `torch.Tensor`: Rewards of shape `(N, F)`.
        """
        return rewards_per_func

    def search(self, output: RowDict) -> None:
        """
        Sample further rows ([`sample`], `forks`), after the main rows are scored and before they are credited.

        Every process calls the sampler equally often.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.
        """

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        """
        Return the advantages of the main rows, or of their tokens. It samples nothing.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        return output["advantages"] if self.exploration is None else self.exploration.credit(output)

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        """
        Return further rows that are trained, and their weight. It scores them ([`Scorer.score`]) and samples nothing.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.
            examples (`list[dict]`):
                Their data-set rows, `[B]`.
            rewards (`torch.Tensor`):
                Total raw reward of each main row over all processes, shape `(N,)`; NaN if a row has none.

        Returns:
            `dict[str, tuple[ScoredRows, float]]`: Streams by name with their weight. Each is averaged over its own
            rows or tokens.
        """
        return {}

    def completion_columns(self) -> dict[str, list[Any]]:
        """
        Return further columns of the completions table. It is called with `log_completions=True` only.

        Returns:
            `dict[str, list]`: Values by column for the main rows of this process, `[B]`; the same columns on every
            process. A missing number is NaN and a missing text is empty, so that a column has one type in all files.
        """
        return {} if self.exploration is None else self.exploration.columns(len(self.main_completion_ids))

    # ------------------------------------------------------------------------------------------------- state and files

    def exploration_state(self) -> dict[str, Any]:
        """Return the method's own state for the checkpoint: tensors, numbers, strings and containers of them."""
        return {} if self.explorer is None else self.explorer.state_dict()

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        """Restore what `exploration_state` returned."""
        if self.explorer is not None:
            self.explorer.load_state_dict(state)

    def forget_data(self) -> None:
        """Drop everything that belongs to prompts of the data, because `train_dataset` was replaced."""
        if self.rounds is not None:
            self.rounds.forget_data()

    def method_files(self) -> list[str]:
        """Return files and folders inside `output_dir` that the method writes beside the model."""
        return [] if self.explorer is None else self.explorer.files()

    def run_files(self) -> list[Path]:
        """Return the existing files that a run adds to: those of the method, and the completions tables."""
        names = self.method_files()
        if self.args.log_completions:
            names = [*names, "completions"]
        files = []
        for name in names:
            path = Path(self.args.output_dir) / name
            files += [file for file in [path, *sorted(path.rglob("*"))] if file.is_file()]
        return files

    # ----------------------------------------------------- parts; ExplorationTrainer makes each when it is first used

    @property
    def sample(self) -> Sampler:
        """Sampler of continuations of any token prefixes."""
        raise NotImplementedError

    @property
    def scorer(self) -> Scorer:
        """Scorer of further rows; it also judges completions while they are sampled."""
        raise NotImplementedError

    @property
    def ranks(self) -> Ranks:
        """The processes of the run: sums and gathers."""
        raise NotImplementedError

    @property
    def choice(self) -> PromptChoice | None:
        """Chooser of the prompts that are explored. None if all are."""
        raise NotImplementedError

    @property
    def exploration(self) -> Exploration | None:
        """The part that lets the explorer sample main rows. None without an explorer."""
        raise NotImplementedError

    @property
    def rounds(self) -> Rounds | None:
        """Dynamic sampling and the choice of prompts. None if the data loader chooses and all groups are trained."""
        raise NotImplementedError

    @property
    def credit(self) -> Credit:
        """Advantages of main rows that are not GRPO's, for all methods."""
        raise NotImplementedError

    @property
    def streams(self) -> StreamTraining:
        """Training of further rows."""
        raise NotImplementedError

    @property
    def table(self) -> CompletionsTable:
        """The completions table."""
        raise NotImplementedError

    @property
    def serving(self) -> Serving | None:
        """The vLLM backend. None if transformers samples."""
        raise NotImplementedError

    def log_metric(self, name: str, value: float) -> None:
        """Log a training metric, `noun/stat`, averaged over the logging interval; equal on all processes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ what a class overrides

    def samples_as_grpo(self, args: Any) -> bool:
        """Return whether GRPO samples all rows. TRL then handles tools, environments, `rollout_func` and images."""
        own = type(self)
        if own.make_explorer != Hooks.make_explorer or args.explore is not None:
            return False
        return (own.rollout, own.search, own.extra_streams) == (Hooks.rollout, Hooks.search, Hooks.extra_streams)

    @property
    def trains_further_rows(self) -> bool:
        """Return whether rows beside the main ones are trained."""
        return self.requires.extra_rows or (self.exploration is not None and self.exploration.joins)

    @property
    def changed_hooks(self) -> list[str]:
        """Return the names of the hooks that differ from GRPO: those that the class overrides, and those in which an
        explorer works."""
        own, explores = type(self), self.explorer is not None
        hooks = {
            "rollout": explores or own.rollout != Hooks.rollout,
            "shape_rewards": own.shape_rewards != Hooks.shape_rewards,
            "search": own.search != Hooks.search,
            "assign_advantages": explores or own.assign_advantages != Hooks.assign_advantages,
            "extra_streams": own.extra_streams != Hooks.extra_streams,
        }
        return [name for name, changed in hooks.items() if changed]

"""The hooks of a trainer. To write a method, you need to read only this file.

The defaults are plain GRPO. The hooks run in training only. In evaluation, TRL samples as in plain GRPO.

Words: the *main rows* are the rows of GRPO, `num_generations` consecutive rows for each prompt. A *stream* is another
set of rows of the same generation batch, for example branches. It has a name and a weight. Its loss is a mean over its
own rows, multiplied by the weight, and is added to the loss of the main rows. With the weight None, the loss is one
mean over the stream and the main rows.

Dimension letters: B main rows on this process, N main rows over all processes, T completion tokens, F reward
functions.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trl_explore.agents.forks import AgentForks
from trl_explore.agents.turns import Turns
from trl_explore.credit.part import Credit
from trl_explore.explorers.branch_explorer import BranchExplorer
from trl_explore.explorers.branching import Branching
from trl_explore.explorers.exploration import Exploration
from trl_explore.explorers.explorer import Explorer, PlainSampling
from trl_explore.forks.engine import Forks
from trl_explore.gradients.feature_pass import FeaturePass
from trl_explore.rows.ranks import Ranks
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import Scorer, Streams
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
    """Base class of trainers: the hooks that a method may override, and the parts that it may use."""

    config_class: type[ExplorationConfig] = ExplorationConfig
    requires = Requires()
    splits_groups = False  # True: the branch explorer works if the rows of a prompt are on several processes
    method = "exploration"  # key of the method's row in `METHODS`

    args: ExplorationConfig  # the configuration; a subclass may narrow the type
    state: Any  # `TrainerState` of transformers
    explorer: Explorer | None = None  # made by `make_explorer`
    branch_explorer: BranchExplorer | None = None  # made by `make_branch_explorer`
    # The generation batch on this process:
    main_examples: list[dict[str, Any]] = []  # copies of the data-set rows, `[B]`
    main_completion_ids: list[list[int]] = []  # tokens of the main rows, `[B][T_i]`
    main_rollout: Rollout | None = None  # result of the last call of `rollout`; None in evaluation
    # The data-set rows that TRL passed, `[B]`. Environments and reward functions may change them.
    given_examples: list[dict[str, Any]] = []
    shaped_rewards: torch.Tensor  # rewards from which TRL computes the advantages of the main rows, `(N, F)`

    num_generations: Any  # number of rows per prompt; TRL sets it
    log_completions = False
    turns: Turns | None = None  # follows an agent's turns; None unless `Requires(turns=True)`
    forks: AgentForks | None = None  # samples branches of an agent's trajectories; None without an agent
    features: FeaturePass | None = None  # gradient features; None unless `Requires(features=True)`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass requires what any of its parents requires.
        for parent in cls.__bases__:
            if issubclass(parent, Hooks):
                cls.requires |= parent.requires

    # ---------------------------------------------------------------------------------------------------- construction

    def check(self, args: ExplorationConfig, *, tools: Any, environment_factory: Any) -> None:
        """
        Check the arguments of the trainer before any model is loaded. `args` is an instance of `config_class`.

        Raises:
            ValueError: If the method cannot work with the arguments. The message names the field, the value and the
                remedy.
        """

    def requirements(self, args: ExplorationConfig) -> Requires:
        """Return the requirements of the method under this configuration."""
        own_explorer = type(self).make_explorer != Hooks.make_explorer
        branches = type(self).make_branch_explorer != Hooks.make_branch_explorer
        if args.explore is not None and (own_explorer or branches or self.requires.samples):
            raise ValueError(
                f"`explore={args.explore!r}` is a way of exploring, and {type(self).__name__} has its own: leave the "
                "field out, or use ExplorationTrainer."
            )
        requires = self.requires
        if own_explorer or args.explore == "resample":
            requires = replace(requires, samples=True, main_rows=True, whole_groups=True)
        if args.explores_unsolved:
            # The explorers that `explore` names add rows for unsolved prompts, and some of them explore agents.
            requires = replace(
                requires,
                samples=True,
                extra_rows=True,
                whole_groups=True,
                tools=True,
                turns=True,
                watched_tools=True,
            )
        if branches:
            whole_groups = requires.whole_groups or not self.splits_groups
            requires = replace(requires, samples=True, extra_rows=True, whole_groups=whole_groups)
        # If only some prompts are explored, `Exploration` itself samples rows with the limit `max_completion_length`.
        gets_some = args.explores_some and (own_explorer or args.explore == "resample")
        samples_more = args.explores and (requires.own_limit or requires.extra_rows)
        return replace(requires, own_limit=gets_some or samples_more)

    def make_explorer(self) -> Explorer | None:
        """Return the explorer that samples main rows, or None if GRPO samples all of them."""
        return None

    def make_branch_explorer(self) -> BranchExplorer | None:
        """Return the explorer that continues GRPO's completions after these are scored, or None."""
        return None

    def make_forks(self) -> Forks:
        """Return the engine that samples branches of completions of one turn, or of an agent's trajectories."""
        raise NotImplementedError

    def make_agent_forks(self, **options: Any) -> AgentForks:
        """Return the engine that samples branches of trajectories. It follows the main rows from now on. For the
        options, see [`~trl_explore.agents.forks.AgentForks`]."""
        raise NotImplementedError

    def setup(self) -> None:
        """Create the method's own state. Called at the end of construction, after the explorers are made."""

    # ---------------------------------------------------------------------------- a generation batch, in calling order

    def rollout(self, prompt_ids: list[list[int]], plain: PlainSampling) -> Rollout:
        """
        Sample the main rows. Override it only if no explorer fits: an explorer is simpler.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`. The rows of a group are consecutive. For an agent,
                this hook is called once per turn. It then gets only the rows that have this turn, with their prompt
                and all their earlier tokens.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: one completion for each list of tokens.

        Returns:
            [`Rollout`]: Exactly one completion per row.
        """
        if self.branch_explorer is not None and self.branch_explorer.samples_with_main:
            return self.branch_explorer.rollout(prompt_ids, plain)
        if self.exploration is not None:
            return self.exploration.rollout(prompt_ids, self.main_examples, plain)
        return plain(prompt_ids)

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        Return the rewards from which GRPO's advantages are computed. The logged `reward` stays the raw reward.

        Args:
            rewards_per_func (`torch.Tensor`):
                Raw rewards of all processes, shape `(N, F)`. The rows of a group are consecutive. NaN if a row was not
                scored.

        Returns:
            `torch.Tensor`: Rewards of shape `(N, F)`.
        """
        return rewards_per_func

    def search(self, output: RowDict) -> None:
        """
        Sample further completions with `sample`. Called after the main rows are scored and before
        `assign_advantages`. Override it only if no [`BranchExplorer`] fits: a branch explorer is simpler.

        Every process must call the sampler the same number of times.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.
        """
        if self.branching is not None:
            self.branching.search(
                output,
                examples=self.main_examples,
                completion_ids=self.main_completion_ids,
                rollout=self.main_rollout,
            )

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        """
        Return the advantages of the main rows, or of their tokens. Do not sample here.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        advantages = output["advantages"]
        if self.exploration is not None:
            advantages = self.exploration.credit(output, self.main_completion_ids)
        if self.branching is not None:
            advantages = self.branching.credit(advantages, num_tokens=output["completion_ids"].shape[1])
        return advantages

    def extra_streams(self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor) -> Streams:
        """
        Return further rows to train, with their weights. Score the rows with [`Scorer.score`]; do not sample here.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.
            examples (`list[dict]`):
                Data-set rows of the main rows, `[B]`.
            rewards (`torch.Tensor`):
                Total raw reward of each main row of all processes, shape `(N,)`. NaN if a row has no reward.

        Returns:
            `dict[str, tuple[ScoredRows, float | None]]`: Rows and weight of each stream, by name. The loss of a stream
            is a mean over its own rows or tokens, multiplied by its weight. With the weight None, the loss is one mean
            over the stream and the main rows.
        """
        return {} if self.branching is None else self.branching.streams()

    def completion_columns(self) -> dict[str, list[Any]]:
        """
        Return further columns of the completions table. Called only with `log_completions=True`.

        Returns:
            `dict[str, list]`: Values by column for the main rows of this process, `[B]`. Every process must return the
            same columns. Use NaN for a missing number and `""` for a missing text, so that a column has one type in
            all files.
        """
        columns: dict[str, list[Any]] = {}
        if self.exploration is not None:
            columns |= self.exploration.columns(len(self.main_completion_ids))
        if self.branch_explorer is not None:
            columns |= self.branch_explorer.columns(len(self.main_completion_ids))
        return columns

    # ------------------------------------------------------------------------------------------------- state and files

    def exploration_state(self) -> dict[str, Any]:
        """Return the method's own state for the checkpoint: tensors, numbers, strings, and containers of these."""
        state: dict[str, Any] = {}
        for explorer in (self.explorer, self.branch_explorer):
            if explorer is not None:
                state |= explorer.state_dict()
        return state

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        """Restore what `exploration_state` returned."""
        for explorer in (self.explorer, self.branch_explorer):
            if explorer is not None:
                explorer.load_state_dict(state)

    def forget_data(self) -> None:
        """Drop all state about prompts of the data set. Called after a user replaced `train_dataset`."""
        if self.rounds is not None:
            self.rounds.forget_data()
        for explorer in (self.explorer, self.branch_explorer):
            if explorer is not None:
                explorer.forget_data()

    def method_files(self) -> list[str]:
        """Return the names of the files and folders in `output_dir` that the method writes, without the model."""
        return []

    def run_files(self) -> list[Path]:
        """Return the existing files to which a run appends: the files of the method, and the completions tables."""
        names = self.method_files()
        if self.args.log_completions:
            names = [*names, "completions"]
        files = []
        for name in names:
            path = Path(self.args.output_dir) / name
            for file in [path, *sorted(path.rglob("*"))]:
                if file.is_file():
                    files.append(file)
        return files

    # ------------------------------------------------- parts; `ExplorationTrainer` creates each when it is first used

    @property
    def sample(self) -> Sampler:
        """Sampler of continuations of token prefixes."""
        raise NotImplementedError

    @property
    def scorer(self) -> Scorer:
        """Scorer of further rows, and of completions while a method still samples (`judge`)."""
        raise NotImplementedError

    @property
    def ranks(self) -> Ranks:
        """The processes of the run: sums and gathers over them."""
        raise NotImplementedError

    @property
    def choice(self) -> PromptChoice | None:
        """Chooser of the prompts to explore. None if all prompts are explored."""
        raise NotImplementedError

    @property
    def exploration(self) -> Exploration | None:
        """Link between the explorer and the main rows. None without an explorer."""
        raise NotImplementedError

    @property
    def branching(self) -> Branching | None:
        """Link between the branch explorer and the training rows. None without a branch explorer."""
        raise NotImplementedError

    @property
    def rounds(self) -> Rounds | None:
        """Dynamic sampling, and the choice of the prompts of a batch. None if the data loader chooses the prompts and
        all groups are trained."""
        raise NotImplementedError

    @property
    def credit(self) -> Credit:
        """Advantages that replace GRPO's in the main rows if the configuration says so, for example `advantage`."""
        raise NotImplementedError

    @property
    def stream_training(self) -> StreamTraining:
        """Training of the rows of streams."""
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
        """Log a training metric, named `noun/stat`. Pass the same value on all processes. The logs have the mean over
        the logging interval."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- which hooks are overridden

    def samples_as_grpo(self, args: ExplorationConfig) -> bool:
        """Return whether GRPO samples all rows. If so, TRL handles tools, environments, `rollout_func` and images."""
        cls = type(self)
        if cls.make_explorer != Hooks.make_explorer or args.explore is not None:
            return False
        if cls.make_branch_explorer != Hooks.make_branch_explorer:
            return False
        return (cls.rollout, cls.search, cls.extra_streams) == (Hooks.rollout, Hooks.search, Hooks.extra_streams)

    @property
    def trains_further_rows(self) -> bool:
        """Return whether further rows are trained in addition to the main rows."""
        if self.requires.extra_rows or self.branch_explorer is not None:
            return True
        return self.exploration is not None and self.exploration.adds

    @property
    def changed_hooks(self) -> list[str]:
        """Return the names of the hooks that differ from GRPO: the hooks that the class overrides, and the hooks that
        an explorer uses."""
        cls = type(self)
        explores = self.explorer is not None or cls.make_explorer != Hooks.make_explorer
        branches = self.branch_explorer is not None or cls.make_branch_explorer != Hooks.make_branch_explorer
        samples_more = credits_main_rows = False
        if self.branch_explorer is not None:
            samples_more = type(self.branch_explorer).rollout != BranchExplorer.rollout
            credits_main_rows = self.branch_explorer.credits_main_rows
        hooks = {
            "rollout": explores or samples_more or cls.rollout != Hooks.rollout,
            "shape_rewards": cls.shape_rewards != Hooks.shape_rewards,
            "search": branches or cls.search != Hooks.search,
            "assign_advantages": explores or credits_main_rows or cls.assign_advantages != Hooks.assign_advantages,
            "extra_streams": branches or cls.extra_streams != Hooks.extra_streams,
        }
        return [name for name, changed in hooks.items() if changed]

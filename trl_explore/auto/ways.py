"""The explorers between which `explore="auto"` chooses, with the configuration of each."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from trl_explore.agent_trees.explorer import TurnTreeExplorer
from trl_explore.auto.added import AddedExplorer, RestartExplorer
from trl_explore.auto.hints import HintExplorer
from trl_explore.auto.replay import ReplayExplorer
from trl_explore.branches.explorer import TailBranchExplorer
from trl_explore.explorers.branch_explorer import BranchExplorer
from trl_explore.forks.engine import Forks
from trl_explore.names import unknown_name
from trl_explore.pivots.explorer import PivotExplorer
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.sketches.two_stage import TwoStage
from trl_explore.trees.explorer import TreeExplorer

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

# Makes an explorer that adds rows. The last argument is the explorer's own configuration.
Make = Callable[[Policy, Forks, Scorer, Any], BranchExplorer]


@dataclass(frozen=True)
class Way:
    """A way to explore."""

    config: str  # module and class in `trl_explore.trainers` with the explorer's fields
    make: Make
    single_turn: bool = True  # it can explore completions of a single turn
    agents: bool = False  # it can explore trajectories of agents
    own_credit: bool = True  # False: it credits rows by the trainer's `advantage`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values other than the defaults of the class
    # Fields that belong to a trainer with this explorer alone, and cannot be set here.
    refused: Sequence[str] = ()

    @property
    def config_class(self) -> Any:
        """Return the class of the explorer's configuration."""
        return resolve_name(f"trl_explore.trainers.{self.config}")


def _tree(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return AddedExplorer(policy, forks, scorer, explorer=TreeExplorer(policy, forks.sample, scorer, args=args))


def _pivots(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return PivotExplorer(policy, forks, scorer, args=args)


def _sketches(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    explorer = TwoStage(
        policy,
        forks.sample,
        scorer,
        num_sketches=args.sketches_per_prompt,
        group_size=args.num_generations,
        num_explored=args.explored_rows,
        context_length=args.context_length or sys.maxsize,
        args=args,
    )
    return AddedExplorer(policy, forks, scorer, explorer=explorer)


def _resample(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return RestartExplorer(policy, forks, scorer, args=args)


def _hints(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return HintExplorer(policy, forks, scorer, args=args)


def _replay(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return ReplayExplorer(policy, forks, scorer, args=args)


def _tail_branches(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return TailBranchExplorer(policy, forks, scorer, args=args)


def _turn_trees(policy: Policy, forks: Forks, scorer: Scorer, args: Any) -> BranchExplorer:
    return TurnTreeExplorer(policy, forks, scorer, args=args)


WAYS: dict[str, Way] = {
    "tree": Way(
        "tree_grpo_config:TreeGRPOConfig",
        _tree,
        defaults={"expansion_width": 4, "depth_weight": 4.0},
        refused=("replay_file", "dump_trees"),
    ),
    "pivots": Way(
        "deep_grpo_config:DeepGRPOConfig",
        _pivots,
        agents=True,
        refused=("deferred_branching", "hard_states_file", "aux_loss_weight"),
    ),
    "sketches": Way("sesa_config:SESAConfig", _sketches, refused=("mode",)),
    "resample": Way("config:ExplorationConfig", _resample, agents=True, own_credit=False),
    "hints": Way("explorer_configs:HintConfig", _hints, own_credit=False),
    "replay": Way("explorer_configs:ReplayConfig", _replay, own_credit=False),
    "tail_branches": Way("branpo_config:BranPOConfig", _tail_branches, single_turn=False, agents=True),
    "turn_trees": Way("agent_tree_grpo_config:AgentTreeGRPOConfig", _turn_trees, single_turn=False, agents=True),
}
DEFAULT = {False: ("tree", "pivots", "resample"), True: ("tail_branches", "turn_trees", "resample")}  # by `is_agent`


def explorer_names(args: "ExplorationConfig", *, is_agent: bool) -> tuple[str, ...]:
    """
    Return the names of the explorers that a run chooses between.

    Raises:
        ValueError: If `explorers` or `explorer_options` has an unknown name, or an explorer that does not suit the
            task.
    """
    names = DEFAULT[is_agent] if args.explorers is None else tuple(args.explorers)
    if args.explore != "auto":
        names = (args.explore or "",)
    for name in names:
        if name not in WAYS:
            raise ValueError(f"`explorers`: {unknown_name('explorer', str(name), WAYS)}")
        way = WAYS[name]
        if is_agent and not way.agents:
            suited = [other for other, way in WAYS.items() if way.agents]
            raise ValueError(
                f"`explorers`: {name!r} explores completions of a single turn, but this run has tools or an "
                f"environment: choose from {', '.join(suited)}."
            )
        if not is_agent and not way.single_turn:
            suited = [other for other, way in WAYS.items() if way.single_turn]
            raise ValueError(
                f"`explorers`: {name!r} explores the turns of an agent, and this run has neither tools nor "
                f"environments: choose from {', '.join(suited)}."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"`explorers={list(names)}` names an explorer twice: name each once.")
    for name in args.options_by_explorer:
        if name not in WAYS:
            raise ValueError(f"`explorer_options`: {unknown_name('explorer', str(name), WAYS)}")
    return names


class OwnOptions:
    """
    Configuration of one explorer: the trainer's shared fields, and the explorer's own fields.

    Args:
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The trainer's configuration.
        name (`str`):
            Name of the explorer.

    Raises:
        ValueError: If `explorer_options` has a wrong field or value for this explorer.
    """

    def __init__(self, args: "ExplorationConfig", name: str) -> None:
        from trl_explore.trainers.config import ExplorationConfig, upgrade_config

        way = WAYS[name]
        shared = {spec.name for spec in fields(ExplorationConfig)}
        own = {spec.name for spec in fields(way.config_class)} - shared
        given = dict(args.options_by_explorer.get(name, {}))
        start = f"`explorer_options[{name!r}]`"
        for option in given:
            if option in way.refused or option in shared:
                raise ValueError(
                    f"{start}: `{option}` cannot be set for one explorer of several: leave it out."
                    if option in way.refused
                    else f"{start}: `{option}` is a field of the trainer: set it there."
                )
            if option not in own:
                raise ValueError(f"{start}: {unknown_name('field', str(option), sorted(own))}")
        self.shared = sorted(shared - {"explore", "success_threshold", "advantage", "count_bonus"})
        self.args: Any = object.__new__(ExplorationConfig)
        vars(self.args).update(vars(args))
        # `count_bonus` is about GRPO's rows, and so is `advantage` if an explorer has its own credit.
        self.args.explore, self.args.count_bonus = None, 0.0
        if way.own_credit:
            self.args.advantage = "grpo"
        self.args.success_threshold = args.success_bar
        self.args.explorers, self.args.explorer_options = None, None
        vars(self.args).update(way.defaults)
        vars(self.args).update(given)
        try:
            self.args = upgrade_config(self.args, way.config_class)
            self.args.validate()
        except ValueError as error:
            raise ValueError(f"{start}: {error}") from None

    def follow(self, args: "ExplorationConfig") -> None:
        """Copy the shared fields from the trainer's configuration, because a callback may have changed them."""
        for name in self.shared:
            setattr(self.args, name, getattr(args, name))

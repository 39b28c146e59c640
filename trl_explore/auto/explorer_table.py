"""The explorers of `explore="auto"`, with the configuration class of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from trl_explore.agent_trees.explorer import TurnTreeExplorer
from trl_explore.auto.added import AddedExplorer, ResampleBranches
from trl_explore.auto.hints import HintExplorer
from trl_explore.auto.replay import ReplayExplorer
from trl_explore.branches.explorer import TailBranchExplorer
from trl_explore.explorers.branch_explorer import BranchExplorer
from trl_explore.forks.engine import Forks
from trl_explore.pivots.explorer import PivotExplorer
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.sketches.mode import context_length
from trl_explore.sketches.two_stage import TwoStage
from trl_explore.trees.explorer import TreeExplorer

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig
    from trl_explore.trainers.sesa_config import SESAConfig
    from trl_explore.trainers.tree_grpo_config import TreeGRPOConfig

# Class of an explorer, or a function that makes one. It gets the trainer, the engine of branches and the scorer. The
# argument `args` is the configuration of the explorer.
Make = Callable[..., BranchExplorer]


@dataclass(frozen=True)
class ExplorerEntry:
    """Entry of [`EXPLORER_TABLE`]: how to make an explorer, and which tasks and options it allows."""

    config: str  # configuration class with the explorer's options, as `module:class` in `trl_explore.trainers`
    make: Make
    single_turn: bool = True  # it can explore completions of a single turn
    agents: bool = False  # it can explore trajectories of agents
    # True: it computes advantages by its own rule. False: by the trainer's `advantage`.
    has_own_advantages: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults that differ from those in `config`
    # Fields of `config` that `explorer_options` refuses, because they only work in the trainer of this method.
    refused_options: Sequence[str] = ()

    @property
    def config_class(self) -> "type[ExplorationConfig]":
        """Return the class that `config` names. It is imported late, because `trl_explore.trainers` imports
        this module."""
        return resolve_name(f"trl_explore.trainers.{self.config}")


def _tree(policy: Policy, forks: Forks, scorer: Scorer, *, args: "TreeGRPOConfig") -> BranchExplorer:
    return AddedExplorer(policy, forks, scorer, explorer=TreeExplorer(policy, forks.sample, scorer, args=args))


def _sketches(policy: Policy, forks: Forks, scorer: Scorer, *, args: "SESAConfig") -> BranchExplorer:
    explorer = TwoStage(
        policy,
        forks.sample,
        scorer,
        num_sketches=args.sketches_per_prompt,
        group_size=args.num_generations,
        num_explored=args.explored_rows,
        context_length=context_length(policy, args, longest_sketch=args.max_sketch_length),
        args=args,
    )
    return AddedExplorer(policy, forks, scorer, explorer=explorer)


# The explorers that `explorers` may name, by name.
EXPLORER_TABLE: dict[str, ExplorerEntry] = {
    "tree": ExplorerEntry(
        "tree_grpo_config:TreeGRPOConfig",
        _tree,
        defaults={"expansion_width": 4, "depth_weight": 4.0},
        refused_options=("replay_buffer", "replay_file", "dump_trees"),
    ),
    "pivots": ExplorerEntry(
        "deep_grpo_config:DeepGRPOConfig",
        PivotExplorer,
        agents=True,
        refused_options=("deferred_branching", "hard_states_file", "aux_loss_weight"),
    ),
    "sketches": ExplorerEntry("sesa_config:SESAConfig", _sketches, refused_options=("mode",)),
    "resample": ExplorerEntry("config:ExplorationConfig", ResampleBranches, agents=True, has_own_advantages=False),
    "hints": ExplorerEntry("explorer_configs:HintConfig", HintExplorer, has_own_advantages=False),
    "replay": ExplorerEntry("explorer_configs:ReplayConfig", ReplayExplorer, has_own_advantages=False),
    "tail_branches": ExplorerEntry(
        "branpo_config:BranPOConfig",
        TailBranchExplorer,
        single_turn=False,
        agents=True,
        # All explorers of a run share one `AgentForks`, so one explorer cannot choose how it limits turns.
        refused_options=("interaction_limits", "interaction_limit_steps", "eval_interaction_limit"),
    ),
    "turn_trees": ExplorerEntry(
        "agent_tree_grpo_config:AgentTreeGRPOConfig",
        TurnTreeExplorer,
        single_turn=False,
        agents=True,
    ),
}
# Default of the field `explorers`. The key is True for agents.
DEFAULT_EXPLORERS = {False: ("tree", "pivots"), True: ("tail_branches", "turn_trees")}

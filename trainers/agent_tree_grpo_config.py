"""The knobs of Tree-GRPO for agents."""

from dataclasses import dataclass

from trl_explore.agents.snapshots import STATES
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    one_of("environment_state", STATES),
    at_least(0, "num_expansions", words="; 0 expands nothing and gives GRPO"),
    at_least(1, "num_rounds"),
    at_least(2, "leaves_per_tree", optional=True, words=", the main row and one more, or None for all"),
    within("intra_weight", low=0, words="be at least 0 (leaves are compared in the prompt only) and finite"),
    within("success_threshold"),
)


@explain_fields
@dataclass
class AgentTreeGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`AgentTreeGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of Tree-GRPO.

    Fields of GRPO keep TRL's defaults; `num_generations` is the number of trees of a prompt (M in the paper). A *turn*
    is one response of the model with what the tools answer to it.

    Args:
        num_expansions (`int`, *optional*, defaults to `2`):
            Nodes drawn in each tree per round (N), at least 0. Each is continued to one more trajectory; 0 is GRPO.
            Nodes are drawn with replacement from the root and every turn but the last ones of trajectories.
        num_rounds (`int`, *optional*, defaults to `1`):
            Rounds of expansion (L), at least 1. A later round may also expand branches. Each round is one more
            sampling call, and with several rounds the environments' states are kept for branches too.
        leaves_per_tree (`int`, *optional*):
            Leaves of a tree that are trained, at least 2; `None` trains all. One is the main row; the others are drawn
            at random.
        intra_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a leaf's advantage inside its tree, at least 0. Its advantage in the prompt has weight 1. With 0,
            the control for a comparison, the same rows are compared in the prompt only.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            How environments return to a turn: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. `"snapshot"` uses the
            environment's own `snapshot()` and `restore(state)`, `"copy"` calls `copy.deepcopy` after every turn,
            `"replay"` makes the calls of the prefix again, which must be answered as before. `"auto"` takes the first
            that is possible, and changes to replays where copies turn out not to be separate.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a success: the total, or that of `success_reward`. Used with
            `explore_prompts="unsolved"` alone.
    """

    num_expansions: int = 2
    num_rounds: int = 1
    leaves_per_tree: int | None = None
    intra_weight: float = 1.0
    environment_state: str = "auto"
    success_threshold: float = 1.0

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        self.check_stage("num_expansions", self.rows_per_generation)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` is not supported by Tree-GRPO, "
                "which compares total rewards: use 'sum_then_normalize'."
            )

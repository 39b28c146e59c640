"""Configuration of Tree-GRPO for agents."""

from dataclasses import dataclass

from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, run_checks, within

CHECKS = (
    at_least(0, "num_expansions", words="; 0 expands nothing and gives GRPO"),
    at_least(1, "num_rounds"),
    at_least(2, "leaves_per_tree", optional=True, words=", the main row and one more, or None for all"),
    within("intra_weight", low=0, words="be at least 0 (0 compares leaves only in the prompt) and finite"),
    within("success_threshold"),
)


@explain_fields
@dataclass
class AgentTreeGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`AgentTreeGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of Tree-GRPO.

    Fields of GRPO keep TRL's defaults. `num_generations` is the number of trees of a prompt (M in the paper). A *turn*
    is one response of the model together with the answers of the tools.

    Args:
        num_expansions (`int`, *optional*, defaults to `2`):
            Number of nodes per tree and round (N) from which another trajectory is sampled, at least 0. 0 is GRPO.
            Nodes are chosen at random, with replacement, from the root and all turns except the last turn of each
            trajectory.
        num_rounds (`int`, *optional*, defaults to `1`):
            Number of rounds of expansion (L), at least 1. A later round may also expand branches. Each round is one
            more sampling call. With more than one round, the states of the branches' environments are kept, too.
        leaves_per_tree (`int`, *optional*):
            Number of leaves per tree that are trained, at least 2. None: all leaves are trained. The main row is
            always one of them. The others are chosen at random.
        intra_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a leaf's advantage inside its tree, at least 0. Its advantage among all leaves of the prompt has
            weight 1. With 0, the same rows are only compared in the prompt. Use 0 as the control in a comparison.
        environment_state (`str`, *optional*, defaults to `"auto"`):
            Way to restore environments: `"auto"`, `"snapshot"`, `"copy"` or `"replay"`. A branch needs the state of an
            earlier turn. `"snapshot"` calls the environment's own `snapshot()` and `restore(state)`. `"copy"` calls
            `copy.deepcopy` after every turn. `"replay"` repeats the tool calls of the earlier turns, and the tools
            must answer them as before. `"auto"` uses the first of these three that is possible. It changes to
            `"replay"` if copies turn out not to be separate.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward that counts as a success. The reward is the total reward, or the reward of `success_reward`
            if that is set. Only `explore_prompts="unsolved"` uses it.
    """

    num_expansions: int = 2
    num_rounds: int = 1
    leaves_per_tree: int | None = None
    intra_weight: float = 1.0
    environment_state: str = "auto"
    success_threshold: float = 1.0

    @property
    def explores(self) -> bool:
        return self.num_expansions > 0

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        self.check_stage("num_expansions", self.rows_per_generation)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation={self.multi_objective_aggregation!r}` is not supported by Tree-GRPO, "
                "which compares total rewards: use 'sum_then_normalize'."
            )

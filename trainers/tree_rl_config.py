"""The knobs of TreeRL."""

from dataclasses import dataclass, field

from trl_explore.chains.uncertain import SELECTIONS
from trl_explore.credit.checks import refuse
from trl_explore.names import explain_fields

from .config import ExplorationConfig, at_least, one_of, run_checks, within

CHECKS = (
    at_least(0, "num_rounds", words="; 0 is GRPO"),
    at_least(1, "num_forks", "branches_per_fork"),
    at_least(1, "trained_leaves", optional=True, words=", or None for all"),
    one_of("fork_selection", SELECTIONS),
    within("success_threshold"),
)


@explain_fields
@dataclass
class TreeRLConfig(ExplorationConfig):
    r"""
    Configuration of [`TreeRLTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of TreeRL.

    Fields of GRPO keep TRL's defaults; `num_generations` is the paper's M, the number of chains of a prompt.

    Args:
        num_rounds (`int`, *optional*, defaults to `1`):
            Rounds of forks (L), at least 0; 0 is GRPO. A later round may also fork branches, and each is one more
            sampling call.
        num_forks (`int`, *optional*, defaults to `2`):
            Tokens (N) at which a chain is forked in a round, at least 1. A chain counts with all branches that grow on
            it, and is forked at fewer where it has fewer. The cost grows in proportion.
        branches_per_fork (`int`, *optional*, defaults to `2`):
            Continuations (T) per fork, at least 1. More give a steadier value at each fork; the cost grows in
            proportion.
        fork_selection (`str`, *optional*, defaults to `"uncertain"`):
            Which tokens are forked: `"uncertain"` or `"random"`. `"uncertain"` takes the sampled tokens with the
            highest `-log p`. `"random"`, the control for a comparison, draws as many of any tokens.
        fork_until (`list[str]`, *optional*, defaults to `["answer", "conclusion"]`):
            Texts, in any case, after which a completion is not forked any more. What follows is the answer. `[]` forks
            anywhere.
        trained_leaves (`int`, *optional*):
            Leaves of a prompt that are trained, at least `num_generations`. All chains are, and branches drawn at
            random up to this number; where no chain succeeded, a successful branch is among them. `None` trains all.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a success: the total, or that of `success_reward`. It decides which prompts
            `explore_prompts="unsolved"` forks (more, with a higher value), and which branch is trained first.
    """

    num_rounds: int = 1
    num_forks: int = 2
    branches_per_fork: int = 2
    fork_selection: str = "uncertain"
    fork_until: list[str] = field(default_factory=lambda: ["answer", "conclusion"])
    trained_leaves: int | None = None
    success_threshold: float = 1.0

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        check_tree(self, self.fork_until)
        self.check_stage("branches_per_fork", self.rows_per_generation * self.num_forks)
        if self.trained_leaves is not None and self.trained_leaves < (self.num_generations or 1):
            raise ValueError(
                f"`trained_leaves={self.trained_leaves}` is less than the `num_generations={self.num_generations}` "
                "chains of a prompt, which are always trained: raise it, or lower `num_generations`."
            )


def check_tree(args: ExplorationConfig, until: list[str]) -> None:
    """Refuse what does not go together with a tree of chains, and texts `until` that nothing can begin with."""
    own = {
        "advantage": args.advantage != "grpo",
        "count_bonus": args.count_bonus > 0,
        "trained_generations": args.trained_generations is not None,
    }
    names = (name for name, used in own.items() if used)
    refuse(args, names, "does nothing here, where a tree's values are the credit")
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree, whose "
            "values are means of total rewards: use 'sum_then_normalize'."
        )
    if not all(until):
        raise ValueError(f"`fork_until={until!r}` must hold no empty text, which everything would begin with.")

"""Configuration of TreeRL."""

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

    Fields of GRPO keep TRL's defaults. `num_generations` is the number of chains of a prompt (M in the paper).

    Args:
        num_rounds (`int`, *optional*, defaults to `1`):
            Number of rounds of forks (L), at least 0. 0 is GRPO. A later round may also fork branches. Each round is
            one more sampling call.
        num_forks (`int`, *optional*, defaults to `2`):
            Number of tokens (N) at which a chain, together with all its branches, is forked in a round, at least 1.
            Chains with fewer tokens have fewer forks. The cost is proportional to it.
        branches_per_fork (`int`, *optional*, defaults to `2`):
            Number of continuations per fork (T), at least 1. A larger number gives a more precise value at each fork.
            The cost is proportional to it.
        fork_selection (`str`, *optional*, defaults to `"uncertain"`):
            Tokens that are forked: `"uncertain"` or `"random"`. `"uncertain"` forks the sampled tokens with the
            highest `-log p`. `"random"` is the control for a comparison: it forks the same number of random tokens.
        fork_until (`list[str]`, *optional*, defaults to `["answer", "conclusion"]`):
            Texts after which a completion is not forked any more, because the answer follows. Upper and lower case do
            not matter. With `[]`, every token may be forked.
        trained_leaves (`int`, *optional*):
            Number of leaves of a prompt that are trained, at least `num_generations`. All chains are trained, and
            random branches up to this number. If no chain succeeded but a branch did, one successful branch is among
            them. None: all leaves are trained. Leaves that `mask_truncated_completions` removes are not trained, and
            do not count.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward that counts as a success. The reward is the total reward, or the reward of `success_reward`
            if that is set. It decides which prompts `explore_prompts="unsolved"` forks, and which branches
            `trained_leaves` prefers. With a higher threshold, more prompts are forked.
    """

    num_rounds: int = 1
    num_forks: int = 2
    branches_per_fork: int = 2
    fork_selection: str = "uncertain"
    fork_until: list[str] = field(default_factory=lambda: ["answer", "conclusion"])
    trained_leaves: int | None = None
    success_threshold: float = 1.0

    @property
    def explores(self) -> bool:
        return self.num_rounds > 0

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


def check_credit_of_tree(args: ExplorationConfig) -> None:
    """Raise a ValueError if a field changes the advantages of main rows. A tree computes its own advantages."""
    refused = []
    if args.advantage != "grpo":
        refused.append("advantage")
    if args.count_bonus > 0:
        refused.append("count_bonus")
    if args.trained_generations is not None:
        refused.append("trained_generations")
    refuse(args, refused, "has no effect, because the values of a tree are the advantages")


def check_tree(args: ExplorationConfig, until: list[str]) -> None:
    """Raise a ValueError for fields that have no meaning for a tree of chains, and for an empty text in `until`."""
    check_credit_of_tree(args)
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` has no meaning for a tree, whose "
            "values are means of total rewards: use 'sum_then_normalize'."
        )
    if not all(until):
        raise ValueError(f"`fork_until={until!r}` must hold no empty text, because every completion contains it.")

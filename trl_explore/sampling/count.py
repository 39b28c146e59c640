"""Number of tokens that a trainer's policy has sampled in training."""

from collections.abc import Sequence

from trl_explore.rows.ranks import Ranks


class TokenCount:
    """
    Number of tokens that the policy has sampled in training since the run began.

    The number includes tokens that are never trained. It excludes prompts, answers of tools and completions of
    evaluations.

    Attributes:
        own (`int`):
            Number on this process.
        total (`int`):
            Number on all processes at the end of the last generation batch.
    """

    def __init__(self) -> None:
        self.own = self.total = 0

    def begin(self, own: int = 0, total: int = 0) -> None:
        """Start from `own` and `total` of a checkpoint, or from 0."""
        self.own, self.total = own, total

    def add(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Count the tokens of continuations `[R][T_i]` that were sampled on this process."""
        self.own += sum(map(len, token_ids))

    def add_returned(self, token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]] | None) -> None:
        """Count the tokens of completions `[R][T_i]` that TRL or a rollout function sampled. A 0 in `loss_mask`
        `[R][T_i]` marks a token of an environment, which is not counted."""
        if loss_mask is None:
            self.add(token_ids)
        else:
            self.own += sum(map(sum, loss_mask))

    def sum_up(self, ranks: Ranks) -> int:
        """Set `total` to the sum of `own` over all processes, and return it. Every process must call this."""
        self.total = int(ranks.gathered(self.own).sum())
        return self.total

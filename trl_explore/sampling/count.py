"""Number of tokens that a trainer's policy has sampled in training."""

from collections.abc import Sequence

from trl_explore.rows.ranks import Ranks


class TokenCount:
    """
    Tokens that the policy has sampled in training since the run began, trained or not.

    `own` is the number on this process. `total` is the number on all processes, as of the last generation batch.
    Prompts, answers of tools and completions of evaluations are not counted.
    """

    def __init__(self) -> None:
        self.own = self.total = 0

    def begin(self, own: int = 0, total: int = 0) -> None:
        """Start from the numbers of a checkpoint, or from 0."""
        self.own, self.total = own, total

    def add(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Count continuations `[R][T_i]` that were sampled on this process."""
        self.own += sum(len(ids) for ids in token_ids)

    def add_returned(self, token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]] | None) -> None:
        """Count completions `[R][T_i]` that were sampled elsewhere; 0 in `loss_mask` marks an environment's tokens."""
        self.own += sum(map(len, token_ids)) if loss_mask is None else sum(map(sum, loss_mask))

    def sum_up(self, ranks: Ranks) -> int:
        """Return `total`, added up over all processes; every process calls it."""
        self.total = int(ranks.gathered(self.own).sum())
        return self.total

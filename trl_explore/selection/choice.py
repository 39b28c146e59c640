"""Which prompts of a generation batch are explored: all, the unsolved ones, or a random share of either."""

import torch

from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy


def share_at(progress: float, end: float) -> float:
    """Return the share of prompts that may be explored: 1 at `progress` 0, `end` at `progress` 1."""
    return 1.0 + (end - 1.0) * min(max(progress, 0.0), 1.0)


class PromptChoice:
    """Chooses the prompts of a generation batch that are explored, by `explore_prompts` and `explore_share_end`."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.args = policy, policy.args

    @property
    def needs_rewards(self) -> bool:
        """Return whether the choice depends on the rewards of GRPO's samples."""
        return self.args.explore_prompts == "unsolved"

    def explored(self, deciding: torch.Tensor) -> torch.Tensor:
        """
        Return the mask of the rows whose prompts are explored. Every process calls it once per generation batch.

        Args:
            deciding (`torch.Tensor`):
                The reward that decides about success, of the main rows of all processes, `(N,)`; groups are
                consecutive. NaN where it is not known.

        Returns:
            `torch.Tensor`: Boolean mask of shape `(N,)`.
        """
        args = self.args
        groups = deciding.view(-1, args.num_generations)
        mask = torch.ones_like(groups[:, 0], dtype=torch.bool)
        if self.needs_rewards:
            solved = succeeded(groups, threshold=args.success_bar).any(dim=1)
            unscored = groups.isnan().all(dim=1)  # not a failure: nothing is known about these prompts
            mask = ~solved & ~unscored
        if args.explore_share_end < 1:
            # One number per row of this process, so that each process draws equally many numbers.
            own = torch.rand(len(deciding) // self.policy.ranks.number, generator=self.policy.exploration_generator)
            drawn = self.policy.ranks.gather(own.to(deciding.device)).view(-1, args.num_generations)[:, 0]
            mask &= drawn < share_at(self.policy.training_progress, args.explore_share_end)
        self.policy.log_metric("explore_share", mask.float().mean().item())
        return mask.repeat_interleave(args.num_generations)

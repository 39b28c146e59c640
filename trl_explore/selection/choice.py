"""Choice of the prompts of a generation batch that a method explores: unsolved prompts, a random share, or both."""

import torch

from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy


def share_at(progress: float, end: float) -> float:
    """Return the share of prompts that a method may explore. It falls linearly from 1 at `progress=0` to `end` at
    `progress=1`."""
    return 1.0 + (end - 1.0) * min(max(progress, 0.0), 1.0)


class PromptChoice:
    """Chooses the prompts of a generation batch that a method explores, by `explore_prompts` and
    `explore_share_end`."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.args = policy, policy.args

    @property
    def needs_rewards(self) -> bool:
        """Return whether the choice depends on the rewards of GRPO's samples."""
        return self.args.explore_prompts == "unsolved"

    def mask(self, deciding: torch.Tensor) -> torch.Tensor:
        """
        Return the mask of the rows whose prompts a method explores. Every process calls it once per generation batch.

        Args:
            deciding (`torch.Tensor`):
                Rewards that decide about success, for the main rows of all processes, `(N,)`. The rows of a group are
                consecutive. NaN if a row has no reward. Only the shape matters unless `needs_rewards` is True.

        Returns:
            `torch.Tensor`: Boolean mask of shape `(N,)`.
        """
        args = self.args
        groups = deciding.view(-1, args.num_generations)
        mask = torch.ones_like(groups[:, 0], dtype=torch.bool)
        if self.needs_rewards:
            solved = succeeded(groups, threshold=args.resolved_success_threshold).any(dim=1)
            # Do not explore a prompt without any reward: nobody knows whether its completions are right.
            unscored = groups.isnan().all(dim=1)
            mask = ~solved & ~unscored
        if args.explore_share_end < 1:
            # Every process samples one number per row. The number of the first row decides about the group.
            own = torch.rand(len(deciding) // self.policy.ranks.number, generator=self.policy.exploration_generator)
            of_rows = self.policy.ranks.gather(own.to(deciding.device))
            of_groups = of_rows.view(-1, args.num_generations)[:, 0]
            mask &= of_groups < share_at(self.policy.training_progress, args.explore_share_end)
        self.policy.log_metric("explore_share", mask.float().mean().item())
        return mask.repeat_interleave(args.num_generations)

"""Unlikeliness (https://huggingface.co/papers/2506.02355): reduce the rewards of the more likely rows of a group."""

import torch


def discounted(rewards: torch.Tensor, logprobs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """
    Return rewards `(P, G)` with positive rewards multiplied by `1 - beta * rank / G`.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape `(P, G)`.
        logprobs (`torch.Tensor`):
            Mean log-probability of the tokens of each row, `(P, G)`. The row with the smallest one in a group has rank
            0. Rows with equal log-probabilities get the mean of their ranks. A row whose reward or log-probability is
            NaN has no rank, and G does not count it.
        beta (`float`):
            Strength of the reduction.
    """
    known = ~(rewards.isnan() | logprobs.isnan())
    # Compare each row with all known rows of its group, (P, G, G).
    own, others = logprobs.unsqueeze(2), logprobs.masked_fill(~known, torch.nan).unsqueeze(1)
    num_less = (others < own).sum(dim=2)
    num_equal = (others == own).sum(dim=2)  # the row itself included
    ranks = num_less + (num_equal - 1) / 2
    shares = ranks / known.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(known & (rewards > 0), rewards * (1 - beta * shares), rewards)

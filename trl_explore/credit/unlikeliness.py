"""Unlikeliness (https://huggingface.co/papers/2506.02355): rewards of a group's likelier rows are worth less."""

import torch


def discounted(rewards: torch.Tensor, logprobs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Rewards `(P, G)` times `1 - beta * rank / G` where they are positive; rank 0 has the least of `logprobs`, a mean
    over its own tokens, and rows with equal ones share the mean of their ranks. Rows where either is NaN have no rank,
    and are not counted."""
    known = ~(rewards.isnan() | logprobs.isnan())
    ours, theirs = logprobs.unsqueeze(2), logprobs.masked_fill(~known, torch.nan).unsqueeze(1)
    ranks = (theirs < ours).sum(dim=2) + ((theirs == ours).sum(dim=2) - 1) / 2
    shares = ranks / known.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(known & (rewards > 0), rewards * (1 - beta * shares), rewards)

"""REINFORCE with weights (https://huggingface.co/papers/2506.01347): failures count more than successes."""

import torch


def reinforce(successes: torch.Tensor, *, success_weight: float) -> torch.Tensor:
    """
    Return the advantages `(P, G)`: `success_weight` for a success, -1 for a failure, 0 if it is not known.

    There is no baseline, so groups whose rows all fail train, too.

    Args:
        successes (`torch.Tensor`):
            1 for rows that succeeded, 0 for rows that failed, NaN if unknown, `(P, G)`.
        success_weight (`float`):
            Advantage of a success, at least 0.
    """
    advantages = torch.where(successes > 0, success_weight, -1.0).to(successes.dtype)
    return advantages.masked_fill(successes.isnan(), 0.0)

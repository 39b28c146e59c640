"""Rows that were sampled behind other contexts than they are trained under: the weights that make up for it."""

from dataclasses import dataclass

import torch

from trl_explore.sampling.sampler import Sampler


@dataclass
class Drawn:
    """Tokens of a row that were drawn behind another context."""

    start: int  # place of the first of them in the row's completion
    context: list[int]  # what the sampler saw before
    token_ids: list[int]


def likelihood_ratios(
    sample: Sampler,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    drawn: list[list[Drawn]],
    *,
    max_drawn: int,
) -> torch.Tensor:
    """`pi(token | own context) / pi(token | context it was drawn behind)` under the current policy, `(B, T)`; 1 where
    both are the same, and on padding. Beyond SESA's paper, whose reviewers asked for it. Every process calls it with
    as many rows and the same `max_drawn`, the most parts of a row; it costs `1 + max_drawn` forward passes."""
    own = sample.token_logprobs(prompt_ids, completion_ids)
    ratios = torch.ones(len(own), max(map(len, own)))
    for part in range(max_drawn):
        found = [parts[part] if part < len(parts) else None for parts in drawn]
        # Rows without such a part still fill the batch, so that every process has as many rows.
        contexts = [prompt if d is None else d.context for d, prompt in zip(found, prompt_ids, strict=True)]
        tokens = [ids[:1] if d is None else d.token_ids for d, ids in zip(found, completion_ids, strict=True)]
        there = sample.token_logprobs(contexts, tokens)
        for row, d in enumerate(found):
            if d is not None:
                here = own[row][d.start : d.start + len(d.token_ids)]  # TRL cuts what is too long
                log_ratio = torch.tensor(here) - torch.tensor(there[row][: len(here)])
                ratios[row, d.start : d.start + len(here)] = log_ratio.exp()
    return ratios

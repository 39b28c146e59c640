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
    rows: list[int],
) -> torch.Tensor:
    """`pi(token | own context) / pi(token | context it was drawn behind)` under the current policy, `(B, T)`; 1 where
    both are the same, and on padding. Beyond SESA's paper, whose reviewers asked for it. Every process calls it with
    the `rows` that may have such parts and the same `max_drawn`, the most parts of a row; it costs `1 + max_drawn`
    forward passes over them."""
    ends = sample.policy.eos_token_ids[:1]
    filler = [ends] * (sample.policy.ranks.most(len(rows)) - len(rows))
    own = sample.token_logprobs(
        [prompt_ids[row] for row in rows] + filler, [completion_ids[row] for row in rows] + filler
    )
    ratios = torch.ones(len(completion_ids), max(map(len, completion_ids), default=0))
    for part in range(max_drawn):
        found = [drawn[row][part] if part < len(drawn[row]) else None for row in rows]
        # Rows without such a part still fill the batch, so that every process has as many rows.
        contexts = [prompt_ids[row] if d is None else d.context for d, row in zip(found, rows, strict=True)]
        tokens = [completion_ids[row][:1] if d is None else d.token_ids for d, row in zip(found, rows, strict=True)]
        there = sample.token_logprobs(contexts + filler, tokens + filler)
        for row, d, before, behind in zip(rows, found, own, there, strict=False):
            if d is not None:
                here = before[d.start : d.start + len(d.token_ids)]  # TRL cuts what is too long
                log_ratio = torch.tensor(here) - torch.tensor(behind[: len(here)])
                ratios[row, d.start : d.start + len(here)] = log_ratio.exp()
    return ratios

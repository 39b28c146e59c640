"""Likelihood ratios for rows that were sampled from another context than the one they are trained with."""

from dataclasses import dataclass

import torch

from trl_explore.sampling.sampler import Sampler


@dataclass
class Drawn:
    """Tokens of a row that were sampled from another context."""

    start: int  # position of the first of these tokens in the completion
    context: list[int]  # tokens from which they were sampled
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
    """
    Return `pi(token | own context) / pi(token | context it was sampled from)` under the current policy.

    SESA's paper has no such correction; its reviewers asked for one. Every process must call this function. It costs
    `1 + max_drawn` forward passes over `rows`.

    Args:
        sample ([`~trl_explore.sampling.sampler.Sampler`]):
            Computes log-probabilities.
        prompt_ids (`list[list[int]]`):
            Tokens of the prompts with which rows are trained, `[B][P_i]`.
        completion_ids (`list[list[int]]`):
            Tokens of the completions, `[B][T_i]`.
        drawn (`list[list[Drawn]]`):
            Parts of each row that were sampled from another context, `[B]`.
        max_drawn (`int`):
            Largest number of parts in `drawn` for one row, the same on all processes.
        rows (`list[int]`):
            Numbers of the rows that may have parts in `drawn`. The other rows get ratios of 1.

    Returns:
        `torch.Tensor`: Ratios `(B, T)`. They are 1 for tokens outside the parts in `drawn`, and for padding.
    """
    # Every process must pass the same number of rows. A filler row has an end token as prompt and as completion.
    filler = [sample.policy.eos_token_ids[:1]] * (sample.policy.ranks.most(len(rows)) - len(rows))
    own_prompts, own_completions = [], []
    for row in rows:
        own_prompts.append(prompt_ids[row])
        own_completions.append(completion_ids[row])
    own = sample.token_logprobs(own_prompts + filler, own_completions + filler)
    ratios = torch.ones(len(completion_ids), max(map(len, completion_ids), default=0))
    for part in range(max_drawn):
        contexts, tokens = [], []
        for row in rows:
            if part < len(drawn[row]):
                contexts.append(drawn[row][part].context)
                tokens.append(drawn[row][part].token_ids)
            else:  # also a filler, so that all calls have the same number of rows; its result is not used
                contexts.append(prompt_ids[row])
                tokens.append(completion_ids[row][:1])
        sampled = sample.token_logprobs(contexts + filler, tokens + filler)
        for row, own_logprobs, sampled_logprobs in zip(rows, own, sampled, strict=False):  # without filler rows
            if part >= len(drawn[row]):
                continue
            start, length = drawn[row][part].start, len(drawn[row][part].token_ids)
            trained = own_logprobs[start : start + length]  # shorter if TRL truncated the completion
            log_ratio = torch.tensor(trained) - torch.tensor(sampled_logprobs[: len(trained)])
            ratios[row, start : start + len(trained)] = log_ratio.exp()
    return ratios

"""Rows that were sampled behind other contexts than they are trained under: the weights that make up for it."""

from dataclasses import dataclass
from typing import Any

import torch

from .agents import AgentTrainer


@dataclass
class Drawn:
    """
    Tokens of a row that were drawn behind another context.

    Args:
        start (`int`):
            Place of the first of them in the row's completion.
        context (`list[int]`):
            Tokens that the sampler saw before.
        token_ids (`list[int]`):
            The tokens.
    """

    start: int
    context: list[int]
    token_ids: list[int]


class BehaviourTrainer(AgentTrainer):
    """
    [`AgentTrainer`] that can weight tokens by their likelihood where they are trained over where they were drawn.

    Beyond the paper of SESA, whose reviewers asked for it. A subclass notes in `drawn`, per row, what was not drawn
    behind the row's own context, at most `max_drawn` parts.
    """

    drawn: list[list[Drawn]] = []
    max_drawn = 1

    def likelihood_ratios(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> torch.Tensor:
        """
        `pi(token | own context) / pi(token | context it was drawn behind)` under the current policy.

        Every process calls it with as many rows; it costs `1 + max_drawn` forward passes without gradients.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompts that the rows are trained under, `[B][P_i]`.
            completion_ids (`list[list[int]]`):
                Completions, `[B][T_i]`.

        Returns:
            `torch.Tensor`: Shape `(B, T)`; 1 where both contexts are the same, and on padding.
        """
        own = self.token_logprobs(prompt_ids, completion_ids)
        ratios = torch.ones(len(own), max(map(len, own)))
        for part in range(self.max_drawn):
            found = [drawn[part] if part < len(drawn) else None for drawn in self.drawn]
            # Rows without such a part still fill the batch, so that every process has as many rows.
            contexts = [prompt if d is None else d.context for d, prompt in zip(found, prompt_ids, strict=True)]
            tokens = [ids[:1] if d is None else d.token_ids for d, ids in zip(found, completion_ids, strict=True)]
            there = self.token_logprobs(contexts, tokens)
            for row, d in enumerate(found):
                if d is not None:
                    here = own[row][d.start : d.start + len(d.token_ids)]  # TRL cuts what is too long
                    log_ratio = torch.tensor(here) - torch.tensor(there[row][: len(here)])
                    ratios[row, d.start : d.start + len(here)] = log_ratio.exp()
        return ratios

    def weigh(self, advantages: torch.Tensor, output: dict[str, Any]) -> torch.Tensor:
        """
        Advantages per token, weighted by the likelihood ratios up to `off_policy_cap`, as `off_policy_scope` says.

        Args:
            advantages (`torch.Tensor`):
                Advantages of shape `(B,)`.
            output (`dict`):
                The main rows as TRL scored them.

        Returns:
            `torch.Tensor`: Shape `(B, T)`.
        """
        cap = self.args.off_policy_cap
        ratios = self.likelihood_ratios(self.prompt_token_ids(output), self.main_completion_ids)
        ratios = ratios.to(advantages.device)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        wide = torch.ones_like(output["completion_mask"], dtype=ratios.dtype)  # (B, T)
        wide[:, : ratios.shape[1]] = ratios
        real = wide[mask.bool()]
        counts = self.summed({"sum": real.sum().item(), "capped": (real > cap).sum().item(), "n": len(real)})
        self.log_metric("sketch/ratio_mean", counts["sum"] / max(counts["n"], 1))
        self.log_metric("sketch/ratio_capped_fraction", counts["capped"] / max(counts["n"], 1))
        wide = wide.clamp(max=cap)
        if self.args.off_policy_scope == "negative":
            wide = torch.where(advantages.unsqueeze(1) < 0, wide, 1.0)
        return advantages.unsqueeze(1) * wide

"""The parts that the modes of SESA share: sizes, metrics, and the credit of rows sampled behind other contexts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.explorers.explorer import Explored, Explorer, PromptGroup
from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict, row_tokens
from trl_explore.sampling.sampler import Sampler
from trl_explore.sketches.metrics import group_metrics, read_targets
from trl_explore.sketches.weights import Drawn, likelihood_ratios

if TYPE_CHECKING:
    from trl_explore.trainers.sesa_config import SESAConfig


class Mode(Explorer):
    """
    Samples the rows of a prompt one after another; `num_explored` of its `group_size` rows explore.

    `metrics`, `columns` and `drawn` belong to the last batch: sums over the prompts of this process, columns of the
    completions table, and for each row the tokens that were not sampled behind the row's own context. A prompt with
    its completion has at most `context_length` tokens.
    """

    args: "SESAConfig"
    max_drawn = 1  # most parts of a row that were sampled behind another context

    def __init__(
        self,
        policy: Policy,
        sample: Sampler,
        scorer: Scorer,
        *,
        group_size: int,
        num_explored: int,
        context_length: float,
    ) -> None:
        super().__init__(policy, sample, scorer)
        self.size, self.num_explored, self.context_length = group_size, num_explored, context_length
        self.metrics: dict[str, float] = {}
        self.columns: dict[str, list[Any]] = {}
        self.drawn: list[list[Drawn]] = []
        self._examples: list[dict[str, Any]] = []  # one per prompt

    def credit(self, explored: Sequence[Explored], rows: RowDict) -> torch.Tensor:
        completion_ids: list[list[int]] = []
        rewards: list[list[float]] = []
        for one in explored:
            completion_ids += one.completion_ids
            rewards += one.rewards or []
        found = torch.tensor(rewards, dtype=torch.float32, device=self.policy.ranks.device)
        self.log_groups(self._examples, completion_ids, found.view(len(rewards), len(self.scorer.names)))
        return self.weighted(rows, completion_ids)

    def weighted(self, rows: RowDict, completion_ids: list[list[int]]) -> torch.Tensor:
        """Return advantages `(B,)`; with `off_policy_correction` `(B, T)`, weighted by likelihood ratios up to
        `off_policy_cap`, as `off_policy_scope` says."""
        advantages, args = rows["advantages"], self.args
        if not args.off_policy_correction:
            return advantages
        ratios = likelihood_ratios(
            self.sample,
            row_tokens(rows)[0],
            completion_ids,
            self.drawn,
            max_drawn=self.max_drawn,
            rows=self.apart(len(completion_ids)),
        )
        ratios = ratios.to(advantages.device)
        mask = rows["completion_mask"] * rows.get("tool_mask", 1)
        wide = torch.ones_like(rows["completion_mask"], dtype=ratios.dtype)  # (B, T)
        wide[:, : ratios.shape[1]] = ratios
        real = wide[mask.bool()]
        counts = {"sum": real.sum().item(), "capped": (real > args.off_policy_cap).sum().item(), "n": len(real)}
        total = self.policy.ranks.summed(counts)
        self.policy.log_metric("sketch/ratio_mean", total["sum"] / max(total["n"], 1))
        self.policy.log_metric("sketch/ratio_capped_fraction", total["capped"] / max(total["n"], 1))
        wide = wide.clamp(max=args.off_policy_cap)
        if args.off_policy_scope == "negative":
            wide = torch.where(advantages.unsqueeze(1) < 0, wide, 1.0)
        return advantages.unsqueeze(1) * wide

    def log_groups(
        self, examples: Sequence[dict[str, Any]], completion_ids: list[list[int]], rewards: torch.Tensor
    ) -> None:
        """
        Log what the rows of this process's prompts achieved.

        Args:
            examples (`Sequence[dict]`):
                Data-set row of each prompt, `[P]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[P * group_size][T_i]`.
            rewards (`torch.Tensor`):
                Raw rewards of shape `(P * group_size, F)`.
        """
        size = self.size
        deciding = self.scorer.success(rewards).view(len(examples), size)
        successes: list[list[bool]] = succeeded(deciding, threshold=self.args.success_threshold).tolist()
        counts = dict(self.metrics)
        counts |= self.group_counts(completion_ids, successes)
        counts |= self._coverage(examples, completion_ids)
        counts["groups"] = len(successes)
        counts["correct"] = sum(sum(group) for group in successes)
        counts["solved"] = sum(any(group) for group in successes)
        for name, value in group_metrics(self.policy.ranks.summed(counts), size=size).items():
            self.policy.log_metric(name, value)
        self.policy.log_metric("sketch/drafting_seconds", self.metrics["drafting_seconds"])
        self.policy.log_metric("sketch/solving_seconds", self.metrics["solving_seconds"])

    def group_counts(self, completion_ids: list[list[int]], successes: list[list[bool]]) -> dict[str, float]:
        """Return further counts of a batch: tokens of the rows, and for each prompt which rows succeeded."""
        return {}

    def _coverage(self, examples: Sequence[dict[str, Any]], completion_ids: list[list[int]]) -> dict[str, float]:
        """Return the sum of the coverage of right answers, and the number of prompts that list these."""
        covered, column = [], self.args.coverage_column
        for g, example in enumerate(examples):
            targets = [] if column is None else read_targets(example.get(column), column)
            if targets:
                texts = [self.text(ids) for ids in completion_ids[g * self.size : (g + 1) * self.size]]
                covered.append(coverage_at_k(texts, targets, self.size))
        return {"covered": sum(covered), "with_targets": len(covered)}

    def columns_of(self, group: int) -> dict[str, list[Any]]:
        """Return the columns of one prompt's rows."""
        rows = slice(group * self.size, (group + 1) * self.size)
        return {name: values[rows] for name, values in self.columns.items()}

    def begin(self, groups: Sequence[PromptGroup]) -> None:
        """Keep the data-set rows of a batch for its metrics."""
        self._examples = [group.example for group in groups]

    def apart(self, num_rows: int) -> list[int]:
        """Return the rows that may have been sampled behind another context, equally many on every process."""
        return list(range(num_rows))

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.policy.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a piece of a completion."""
        return self.policy.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

"""Base class of SESA's modes: sizes, metrics, and the credit of rows that were sampled from another prompt."""

import math
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
    from transformers import PreTrainedConfig

    from trl_explore.trainers.config import ExplorationConfig
    from trl_explore.trainers.sesa_config import SESAConfig


def context_length(policy: Policy, args: "SESAConfig", *, longest_sketch: int) -> float:
    """
    Return the largest number of tokens of a prompt with its completion. This is the field `context_length`, or else
    the model's limit. If vLLM has a lower limit, it is vLLM's.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        args ([`~trl_explore.trainers.SESAConfig`]):
            The configuration.
        longest_sketch (`int`):
            Largest number of tokens of a sketch; 0 if no sketches are sampled.

    Raises:
        ValueError: If a sketch or a completion leaves no room for a prompt.
    """
    config: PreTrainedConfig = policy.accelerator.unwrap_model(policy.model).config
    model_length = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = args.context_length or model_length or math.inf
    if policy.serving is not None:
        length = min(length, policy.serving.backend.max_served_length or math.inf)
    most = args.max_sampled_tokens
    name = f"max_completion_length={most}"
    if "max_new_tokens" in (args.generation_kwargs or {}):
        name = f"generation_kwargs={{'max_new_tokens': {most}}}"
    if length - max(longest_sketch, most or 0) < 1:
        raise ValueError(
            f"`max_sketch_length={args.max_sketch_length}` and `{name}` leave no room for a prompt in a context of "
            f"{length} tokens: lower them, or set `context_length` if the model has more."
        )
    return length


class Mode(Explorer):
    """
    Explorer that samples the completions of a prompt so that they differ from each other.

    Of the `group_size` rows of a prompt, `num_explored` explore, and the others are sampled as in GRPO. A prompt with
    its completion has at most `context_length` tokens.

    Three attributes describe the newest batch. `metrics` are sums over the prompts of this process. `columns` are
    columns of the completions table. `drawn` holds, for each row, the tokens that were sampled from another context
    than the row is trained with. An example is a prompt with a sketch.
    """

    args: "SESAConfig"
    max_drawn = 1  # largest number of entries of `drawn` for one row, the same on all processes

    def __init__(
        self,
        policy: Policy,
        sample: Sampler,
        scorer: Scorer,
        *,
        group_size: int,
        num_explored: int,
        context_length: float,
        args: "ExplorationConfig | None" = None,
    ) -> None:
        super().__init__(policy, sample, scorer, args=args)
        self.size, self.num_explored, self.context_length = group_size, num_explored, context_length
        self.metrics: dict[str, float] = {}
        self.columns: dict[str, list[Any]] = {}
        self.drawn: list[list[Drawn]] = []
        self._examples: list[dict[str, Any]] = []  # data-set row of each prompt of the newest batch

    def credit(self, explored: Sequence[Explored], rows: RowDict) -> torch.Tensor:
        completion_ids: list[list[int]] = []
        rewards: list[list[float]] = []
        for of_prompt in explored:
            completion_ids += of_prompt.completion_ids
            rewards += of_prompt.rewards or []
        found = torch.tensor(rewards, dtype=torch.float32, device=self.policy.ranks.device)
        found = found.view(len(rewards), len(self.scorer.names))  # without rows, it has one dimension
        self.log_groups(self._examples, completion_ids, found)
        return self.weighted(rows, completion_ids)

    def weighted(self, rows: RowDict, completion_ids: list[list[int]]) -> torch.Tensor:
        """
        Return the advantages of rows, weighted by likelihood ratios if `off_policy_correction` is True.

        The likelihood ratio of a token is its probability in the context that the row is trained with, divided by its
        probability in the context that it was sampled from. A ratio above `off_policy_cap` is replaced by this cap.
        With `off_policy_scope="negative"`, ratios weight negative advantages only.

        Args:
            rows (`dict`):
                Rows as TRL scored them, B rows.
            completion_ids (`list[list[int]]`):
                Tokens of their completions, `[B][T_i]`.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)`; with `off_policy_correction`, of shape `(B, T)`.
        """
        advantages, args = rows["advantages"], self.args
        if not args.off_policy_correction:
            return advantages
        ratios = likelihood_ratios(
            self.sample,
            row_tokens(rows)[0],
            completion_ids,
            self.drawn,
            max_drawn=self.max_drawn,
            rows=self.rows_with_other_context(len(completion_ids)),
        )
        ratios = ratios.to(advantages.device)
        mask = rows["completion_mask"] * rows.get("tool_mask", 1)
        weights = torch.ones_like(rows["completion_mask"], dtype=ratios.dtype)  # (B, T)
        weights[:, : ratios.shape[1]] = ratios
        trained = weights[mask.bool()]
        counts = {
            "sum": trained.sum().item(),
            "capped": (trained > args.off_policy_cap).sum().item(),
            "tokens": len(trained),
        }
        total = self.policy.ranks.summed(counts)
        num_tokens = max(total["tokens"], 1)
        self.policy.log_metric("sketch/ratio_mean", total["sum"] / num_tokens)
        self.policy.log_metric("sketch/ratio_capped_fraction", total["capped"] / num_tokens)
        weights = weights.clamp(max=args.off_policy_cap)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        if args.off_policy_scope == "negative":
            weights = torch.where(advantages < 0, weights, 1.0)
        return advantages * weights

    def log_groups(
        self, examples: Sequence[dict[str, Any]], completion_ids: list[list[int]], rewards: torch.Tensor
    ) -> None:
        """
        Log the success, coverage and diversity of the newest batch. Every process calls it.

        Args:
            examples (`Sequence[dict]`):
                Data-set row of each prompt of this process, `[P]`.
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
        counts["correct"] = sum(map(sum, successes))
        counts["solved"] = sum(map(any, successes))
        for name, value in group_metrics(self.policy.ranks.summed(counts), size=size).items():
            self.policy.log_metric(name, value)
        self.policy.log_metric("sketch/drafting_seconds", self.metrics["drafting_seconds"])
        self.policy.log_metric("sketch/solving_seconds", self.metrics["solving_seconds"])

    def group_counts(self, completion_ids: list[list[int]], successes: list[list[bool]]) -> dict[str, float]:
        """
        Return further counts of a mode, for the metrics. The base class has none.

        Args:
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[P * group_size][T_i]`.
            successes (`list[list[bool]]`):
                True for each row that succeeded, `[P][group_size]`.
        """
        return {}

    def _coverage(self, examples: Sequence[dict[str, Any]], completion_ids: list[list[int]]) -> dict[str, float]:
        """Return two sums over the prompts with right answers in `coverage_column`: `covered`, the share of these
        answers that the group found, and `with_targets`, the number of these prompts."""
        covered, column = [], self.args.coverage_column
        for g, example in enumerate(examples):
            if column is None:
                continue
            targets = read_targets(example.get(column), column)
            if targets:
                texts = [self.text(ids) for ids in completion_ids[g * self.size : (g + 1) * self.size]]
                covered.append(coverage_at_k(texts, targets, self.size))
        return {"covered": sum(covered), "with_targets": len(covered)}

    def columns_of(self, group: int) -> dict[str, list[Any]]:
        """Return the columns of the completions table for the rows of one prompt. `group` is the prompt's number."""
        rows = slice(group * self.size, (group + 1) * self.size)
        return {name: values[rows] for name, values in self.columns.items()}

    def begin(self, groups: Sequence[PromptGroup]) -> None:
        """Store the data-set rows of a new batch, because its metrics need them."""
        self._examples = [group.example for group in groups]

    def rows_with_other_context(self, num_rows: int) -> list[int]:
        """Return the rows, out of `num_rows`, that may have been sampled from another context than they are trained
        with."""
        return list(range(num_rows))

    def text(self, token_ids: list[int]) -> str:
        """Decode tokens, without special tokens and outer spaces."""
        return self.policy.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def encode(self, text: str) -> list[int]:
        """Encode a part of a completion, without special tokens."""
        if not text:
            return []
        return self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]

"""What the modes of SESA share: each samples the rows of a batch, and tells what it drew behind which context."""

from collections.abc import Callable
from typing import Any

from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout
from trl_explore.sampling.sampler import Sampler
from trl_explore.sketches.weights import Drawn

Chooser = Callable[[list[list[int]]], Rollout]


class Mode:
    """
    A way to sample the rows of a batch one after another; `num_explored` of a prompt's `group_size` explore.

    `metrics`, `columns` and `drawn` are of the last batch: sums over the prompts of this process, columns of the
    completions table, and per row what was not drawn behind the row's own context. A prompt with what follows it has
    at most `context_length` tokens.
    """

    max_drawn = 1  # parts of a row that were drawn behind another context

    def __init__(
        self, policy: Policy, sample: Sampler, *, group_size: int, num_explored: int, context_length: float
    ) -> None:
        self.policy, self.sample, self.args = policy, sample, policy.args
        self.size, self.num_explored, self.context_length = group_size, num_explored, context_length
        self.metrics: dict[str, float] = {}
        self.columns: dict[str, list[Any]] = {}
        self.drawn: list[list[Drawn]] = []

    def rollout(self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: Chooser) -> Rollout:
        """One completion, or turn, per row; `plain` is GRPO's own sampling."""
        raise NotImplementedError

    def apart(self, num_rows: int) -> list[int]:
        """Rows that may have been drawn behind another context, as many on every process."""
        return list(range(num_rows))

    def text(self, token_ids: list[int]) -> str:
        """What tokens say, without special ones."""
        return self.policy.tokenizer.decode(token_ids, skip_special_tokens=True).strip()

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of a completion."""
        return self.policy.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

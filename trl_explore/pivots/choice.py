"""Where to branch: segments of a failed completion, and the pivot distribution over them.

Follows DEEP-GRPO (https://huggingface.co/papers/2602.14169), sections 4.1 and 4.2.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from trl_explore.rewards.success import failed, succeeded
from trl_explore.rows.rollouts import Continuation

BROKEN = "\ufffd"  # what a decoder shows of a character that is not whole


class Decoder(Protocol):
    """The part of a tokenizer that segmentation needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        """Text of some tokens."""
        ...


@dataclass(frozen=True)
class Pivot:
    """
    A state of a main-chain completion from which to branch.

    Args:
        row (`int`):
            Index of the completion in this process's batch.
        start (`int`):
            Tokens of the completion that stay: the branch begins at this position.
        depth (`float`):
            Relative depth `r_t = t / T` in (0, 1].
    """

    row: int
    start: int
    depth: float


@dataclass
class Branching:
    """
    One pivot of the batch and what was sampled from it.

    Args:
        example (`dict`):
            The data-set example.
        prompt_ids (`list[int]`):
            Prompt tokens.
        prefix_ids (`list[int]`):
            Completion tokens before the pivot.
        depth (`float`):
            Relative depth in (0, 1].
        branches (`list[Continuation]`):
            The K continuations.
        row (`int`, *optional*):
            Index of the completion in this process's batch; `None` once that batch is over.
    """

    example: dict[str, Any]
    prompt_ids: list[int]
    prefix_ids: list[int]
    depth: float
    branches: list[Continuation] = field(default_factory=list)
    row: int | None = None


def segment_fixed(num_tokens: int, *, length: int) -> list[int]:
    """
    Cut a completion into chunks of equal length (section 4.1).

    Args:
        num_tokens (`int`):
            Number of completion tokens.
        length (`int`):
            Tokens per chunk; the last one may be shorter.

    Returns:
        `list[int]`: Start index of each chunk, the first 0.

    Raises:
        ValueError: If `length` is smaller than 1.

    Example:

    ```python
    >>> segment_fixed(7, length=3)
    [0, 3, 6]
    ```
    """
    if length < 1:
        raise ValueError(f"`length` must be at least 1 token, got {length}.")
    return list(range(0, num_tokens, length))


def segment_delimiters(
    ids: Sequence[int], tokenizer: Decoder, *, delimiters: Sequence[str], cache: dict[int, str] | None = None
) -> list[int]:
    """
    Cut a completion after every token in which a delimiter ends (section 4.1). Delimiters are looked for in the text,
    so that they may begin in a token before.

    Args:
        ids (`Sequence[int]`):
            Completion tokens.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer that decodes them. Special tokens never delimit.
        delimiters (`Sequence[str]`):
            Texts that end a segment, for example `(".", "\\n")`.
        cache (`dict[int, str]`, *optional*):
            Filled with the text of each token; pass the same dictionary again (with the same tokenizer) to decode
            every token of the vocabulary at most once.

    Returns:
        `list[int]`: Start index of each segment, the first 0.

    Raises:
        ValueError: If there is no delimiter or one is empty.
    """
    if not delimiters or any(not delimiter for delimiter in delimiters):
        raise ValueError(f"`delimiters` must hold at least one text and no empty one, got {list(delimiters)!r}.")
    texts = token_texts(ids, tokenizer, cache={} if cache is None else cache)
    text, ends = "".join(texts), list(accumulate(map(len, texts)))
    found = {m.end() for delimiter in delimiters for m in re.finditer(re.escape(delimiter), text)}
    starts = {bisect_left(ends, end) + 1 for end in found}
    return sorted({0} | {start for start in starts if start < len(ids)}) if ids else []


def token_texts(ids: Sequence[int], tokenizer: Decoder, *, cache: dict[int, str]) -> list[str]:
    """
    What each token adds to the text; a character that several tokens make up comes with the last of them.

    Args:
        ids (`Sequence[int]`):
            Tokens.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer that decodes them. Special tokens add nothing.
        cache (`dict[int, str]`):
            Text of each token by itself; filled with those that are missing.

    Returns:
        `list[str]`: `[T]`.
    """

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    for token in set(ids) - cache.keys():
        # Behind a token: some tokenizers take the space away that a text begins with.
        cache[token] = text([token, token])[len(text([token])) :]
    texts, begin = [cache[token] for token in ids], 0
    for i in range(len(ids)):
        if begin < i or BROKEN in texts[i]:
            texts[i] = text(ids[begin : i + 1])
            # A character has at most four bytes.
            if texts[i].endswith(BROKEN) and i - begin < 3 and i + 1 < len(ids):
                texts[i] = ""
                continue
        begin = i + 1
    return texts


def drop_empty_end(
    starts: Sequence[int], ids: Sequence[int], tokenizer: Decoder, *, end_ids: Sequence[int]
) -> list[int]:
    """
    Leave out segments at the end of a completion that say nothing: where only the end token is left, or white space
    before it, there is nothing to continue.

    Args:
        starts (`Sequence[int]`):
            Start index of each segment.
        ids (`Sequence[int]`):
            Completion tokens.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer that decodes them.
        end_ids (`Sequence[int]`):
            Tokens that end a completion.

    Returns:
        `list[int]`: Start indices; the first one always stays.
    """
    kept = list(starts)
    while len(kept) > 1:
        text = tokenizer.decode([token for token in ids[kept[-1] :] if token not in end_ids], skip_special_tokens=True)
        if text.strip():
            break
        kept.pop()
    return kept


def pivot_distribution(
    success_prob: torch.Tensor, *, gamma: float, possible: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Sampling distribution over the branching points of one completion, `Q(t) ∝ P(success | r_t) r_t^gamma` (Eq. 1).

    Args:
        success_prob (`torch.Tensor`):
            Estimated probability of recovering from each point, shape `(T,)`, values in (0, 1].
        gamma (`float`):
            Depth bias: 0 prefers no depth, larger values prefer later points, negative ones earlier points.
        possible (`torch.Tensor`, *optional*):
            Boolean mask of shape `(T,)`, at least one `True`: the points that may be drawn; all by default.

    Returns:
        `torch.Tensor`: Probabilities of shape `(T,)` in float64 that sum to 1.

    Raises:
        ValueError: If `success_prob` is not a non-empty vector or `gamma` is not finite.
    """
    prob = torch.as_tensor(success_prob, dtype=torch.float64)
    if prob.dim() != 1 or not len(prob):
        raise ValueError(f"`success_prob` must have shape (T,) with T >= 1, got {tuple(prob.shape)}.")
    if not torch.isfinite(torch.tensor(float(gamma))):
        raise ValueError(f"`gamma` must be finite, got {gamma}.")
    depths = relative_depths(len(prob))
    # In log space: r^50 underflows and r^-20 overflows long before the ratio of two utilities does.
    utility = prob.clamp(min=1e-300).log() + gamma * depths.log()
    return torch.softmax(utility if possible is None else utility.masked_fill(~possible, -torch.inf), dim=0)


def relative_depths(num_points: int) -> torch.Tensor:
    """
    Relative depth `r_t = t / T` of each branching point.

    Args:
        num_points (`int`):
            Number of branching points T.

    Returns:
        `torch.Tensor`: Shape `(T,)`, float64, from `1 / T` to 1.
    """
    return torch.arange(1, num_points + 1, dtype=torch.float64) / num_points


def draw_pivots(probs: torch.Tensor, num_pivots: int, *, generator: torch.Generator) -> list[int]:
    """
    Draw branching points without replacement.

    Args:
        probs (`torch.Tensor`):
            Probabilities of shape `(T,)`.
        num_pivots (`int`):
            Points wanted; fewer are returned where there are fewer with a positive probability.
        generator (`torch.Generator`):
            Source of randomness.

    Returns:
        `list[int]`: Indices in `0..T-1`, in the order drawn.
    """
    available = min(num_pivots, int((probs > 0).sum()))
    return torch.multinomial(probs, available, replacement=False, generator=generator).tolist()


def failed_rows(rewards: torch.Tensor, *, threshold: float, group_size: int, branch_from: str) -> torch.Tensor:
    """
    Rows of the main stream to branch from.

    Args:
        rewards (`torch.Tensor`):
            Reward that decides about each row, over all processes, shape `(N,)`, groups contiguous; NaN for unscorable
            rows.
        threshold (`float`):
            A row with a smaller reward has failed.
        group_size (`int`):
            Rows per prompt G.
        branch_from (`str`):
            `"failures"`: every failed row. `"failed_groups"`: those of groups in which no row succeeded. `"all"`:
            every scorable row.

    Returns:
        `torch.Tensor`: Boolean mask of shape `(N,)`. Unscorable rows are never chosen.
    """
    failures = failed(rewards, threshold=threshold)
    if branch_from == "failures":
        return failures
    if branch_from == "all":
        return ~rewards.isnan()
    solved = succeeded(rewards, threshold=threshold).view(-1, group_size).any(dim=1)
    return failures & ~solved.repeat_interleave(group_size)

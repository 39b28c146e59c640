"""Choice of pivots: segments of a failed completion, and the pivot distribution over them. Follows DEEP-GRPO
(https://huggingface.co/papers/2602.14169), sections 4.1 and 4.2."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from trl_explore.forks.trajectories import Branch, Fork, Trajectory
from trl_explore.rewards.success import failed, succeeded

BROKEN = "\ufffd"  # a decoder returns this for an incomplete character


class Decoder(Protocol):
    """The part of a tokenizer that segmentation needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        """Return the text of some tokens."""
        ...


@dataclass(frozen=True)
class Pivot:
    """A place in a main row from which branches are sampled."""

    row: int  # index of the main row on this process
    start: int  # number of tokens that the branches keep
    depth: float  # relative depth `r_t = t / T`, in (0, 1]


@dataclass
class BranchPoint:
    """A pivot, and the branches that were sampled from it."""

    origin: Trajectory  # the failed completion; its `row` is None if it is from an earlier batch
    start: int  # number of tokens that the branches keep
    depth: float  # relative depth, in (0, 1]
    branches: list[Branch] = field(default_factory=list)  # K branches

    @property
    def prefix_ids(self) -> list[int]:
        """Return the tokens of the completion that the branches keep."""
        return self.origin.completion_ids[: self.start]

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled for the branches."""
        return sum(branch.num_sampled for branch in self.branches)

    def fork(self, number: int) -> Fork:
        """Return the fork from which `number` branches are sampled."""
        return Fork(self.origin, self.origin.turn_at(self.start), number, self.start)

    def record(self, step: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return the pivot as a record of the hard-states file."""
        return {
            "step": step,
            "prompt": self.origin.example["prompt"],
            "prefix": decode(self.prefix_ids),
            "prompt_ids": self.origin.prompt_ids,
            "prefix_ids": self.prefix_ids,
            "depth": self.depth,
        }


def segment_fixed(num_tokens: int, *, length: int) -> list[int]:
    """Return the first token of each segment of `length` tokens (section 4.1). The last segment may be shorter.
    ValueError if `length` is below 1."""
    if length < 1:
        raise ValueError(f"`length` must be at least 1 token, got {length}.")
    return list(range(0, num_tokens, length))


def segment_delimiters(
    ids: Sequence[int], tokenizer: Decoder, *, delimiters: Sequence[str], cache: dict[int, str] | None = None
) -> list[int]:
    """
    Return the first token of each segment (section 4.1). A segment ends with the token in which a delimiter ends.

    A delimiter may extend over several tokens. Special tokens have no text, so they contain no delimiter.

    Args:
        ids (`Sequence[int]`):
            Tokens to divide, `[T]`.
        tokenizer (`Decoder`):
            Decodes the tokens.
        delimiters (`Sequence[str]`):
            Texts that end a segment. ValueError if there are none, or if one is empty.
        cache (`dict[int, str]`, *optional*):
            Texts of tokens that were decoded before; new ones are added.
    """
    if not delimiters or any(not delimiter for delimiter in delimiters):
        raise ValueError(f"`delimiters` must hold at least one text and no empty one, got {list(delimiters)!r}.")
    texts = token_texts(ids, tokenizer, cache={} if cache is None else cache)
    if not ids:
        return []
    text = "".join(texts)
    token_ends = list(accumulate(map(len, texts)))  # in characters
    starts = {0}
    for delimiter in delimiters:
        for match in re.finditer(re.escape(delimiter), text):
            last_token = bisect_left(token_ends, match.end())  # the token in which the delimiter ends
            if last_token + 1 < len(ids):
                starts.add(last_token + 1)
    return sorted(starts)


def token_texts(ids: Sequence[int], tokenizer: Decoder, *, cache: dict[int, str]) -> list[str]:
    """
    Return the text that each token adds, `[T]`. A special token adds nothing.

    If several tokens form one character, the last of them adds it. `cache` holds texts of single tokens; new ones are
    added.
    """

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    for token in set(ids) - cache.keys():
        # Decode the token after itself, because some tokenizers remove the space at the beginning of a text.
        cache[token] = decode([token, token])[len(decode([token])) :]
    # A token with a part of a character decodes to BROKEN. Decode it together with the next tokens, until the text no
    # longer ends with BROKEN.
    texts = [cache[token] for token in ids]
    begin = 0  # first token of the current character
    for i in range(len(ids)):
        if begin < i or BROKEN in texts[i]:
            texts[i] = decode(ids[begin : i + 1])
            # A character has at most four bytes, so four tokens that still do not form one never will.
            if texts[i].endswith(BROKEN) and i - begin < 3 and i + 1 < len(ids):
                texts[i] = ""
                continue
        begin = i + 1
    return texts


def turn_starts(turns: Sequence[tuple[int, int]], inside_last: Sequence[int]) -> list[int]:
    """
    Return the first token of each segment of an agent's completion. All turns but the last are one segment each.

    Args:
        turns (`Sequence[tuple[int, int]]`):
            First token and end of each turn.
        inside_last (`Sequence[int]`):
            First tokens of the segments of the last turn, counted from the first token of that turn.
    """
    earlier = [start for start, _ in turns[:-1]]
    last_turn_start = turns[-1][0]
    return earlier + [last_turn_start + start for start in inside_last]


def drop_empty_end(
    starts: Sequence[int], ids: Sequence[int], tokenizer: Decoder, *, end_ids: Sequence[int]
) -> list[int]:
    """Return `starts` without the last segments, if these hold only white space and end tokens: a branch from there
    would be empty. The first segment is always kept."""
    kept = list(starts)
    while len(kept) > 1:
        last_ids = [token for token in ids[kept[-1] :] if token not in end_ids]
        if tokenizer.decode(last_ids, skip_special_tokens=True).strip():
            break
        kept.pop()
    return kept


def pivot_distribution(
    success_prob: torch.Tensor, *, gamma: float, possible: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return `Q(t)`, proportional to `P(success | r_t) r_t^gamma` (Eq. 1), `(T,)` in float64.

    Args:
        success_prob (`torch.Tensor`):
            Probability that a branch from each point succeeds, in (0, 1], `(T,)`. ValueError for another shape.
        gamma (`float`):
            Depth bias: a larger value prefers later points. ValueError if it is not finite.
        possible (`torch.Tensor`, *optional*):
            Mask `(T,)` of the points that may be drawn. The others get 0. None: all.
    """
    prob = torch.as_tensor(success_prob, dtype=torch.float64)
    if prob.dim() != 1 or not len(prob):
        raise ValueError(f"`success_prob` must have shape (T,) with T >= 1, got {tuple(prob.shape)}.")
    if not torch.isfinite(torch.tensor(float(gamma))):
        raise ValueError(f"`gamma` must be finite, got {gamma}.")
    depths = relative_depths(len(prob))
    # Compute in log space, because r^50 underflows and r^-20 overflows although the ratio of two utilities does not.
    utility = prob.clamp(min=1e-300).log() + gamma * depths.log()
    if possible is not None:
        utility = utility.masked_fill(~possible, -torch.inf)
    return torch.softmax(utility, dim=0)


def relative_depths(num_points: int) -> torch.Tensor:
    """Return the relative depths `r_t = t / T` of T points, from `1 / T` to 1, `(T,)` in float64."""
    return torch.arange(1, num_points + 1, dtype=torch.float64) / num_points


def draw_pivots(probs: torch.Tensor, num_pivots: int, *, generator: torch.Generator) -> list[int]:
    """Draw indices without replacement, in the order of the draws. Their number is `num_pivots`, or the number of
    positive probabilities if that is smaller."""
    available = min(num_pivots, int((probs > 0).sum()))
    return torch.multinomial(probs, available, replacement=False, generator=generator).tolist()


def rows_to_branch_from(rewards: torch.Tensor, *, threshold: float, group_size: int, branch_from: str) -> torch.Tensor:
    """
    Return the mask `(N,)` of the rows to branch from. Rows without a reward (NaN) are never in it.

    Args:
        rewards (`torch.Tensor`):
            Rewards that decide about success, of the rows of all processes, `(N,)`.
        threshold (`float`):
            A reward below it is a failure.
        group_size (`int`):
            Number of rows per prompt.
        branch_from (`str`):
            `"failures"`: failed rows. `"failed_groups"`: failed rows of prompts without a success. `"all"`: all rows.
    """
    failures = failed(rewards, threshold=threshold)
    if branch_from == "failures":
        return failures
    if branch_from == "all":
        return ~rewards.isnan()
    solved = succeeded(rewards, threshold=threshold).view(-1, group_size).any(dim=1)
    return failures & ~solved.repeat_interleave(group_size)

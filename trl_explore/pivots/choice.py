"""Where to branch: segments of a failed completion, and the pivot distribution over them. Follows DEEP-GRPO
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

BROKEN = "\ufffd"  # what a decoder shows of a character that is not whole


class Decoder(Protocol):
    """The part of a tokenizer that segmentation needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> Any:
        """Text of some tokens."""
        ...


@dataclass(frozen=True)
class Pivot:
    """A state of a main-chain completion from which to branch."""

    row: int  # of this process's batch
    start: int  # tokens of the completion that stay
    depth: float  # relative, `r_t = t / T` in (0, 1]


@dataclass
class BranchPoint:
    """A pivot of the batch, and the branches that were sampled from it."""

    origin: Trajectory  # the failed completion; `origin.row` is None if it is of an earlier batch
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
        """Return the pivot as a row of the file of hard states."""
        return {
            "step": step,
            "prompt": self.origin.example["prompt"],
            "prefix": decode(self.prefix_ids),
            "prompt_ids": self.origin.prompt_ids,
            "prefix_ids": self.prefix_ids,
            "depth": self.depth,
        }


def segment_fixed(num_tokens: int, *, length: int) -> list[int]:
    """Start of each chunk of `length` tokens, the last may be shorter (section 4.1); ValueError below 1."""
    if length < 1:
        raise ValueError(f"`length` must be at least 1 token, got {length}.")
    return list(range(0, num_tokens, length))


def segment_delimiters(
    ids: Sequence[int], tokenizer: Decoder, *, delimiters: Sequence[str], cache: dict[int, str] | None = None
) -> list[int]:
    """Starts of segments, which end with a token in which a delimiter ends (section 4.1); it may begin in one before,
    special tokens never delimit. `cache` keeps tokens' texts. ValueError for no or an empty delimiter."""
    if not delimiters or any(not delimiter for delimiter in delimiters):
        raise ValueError(f"`delimiters` must hold at least one text and no empty one, got {list(delimiters)!r}.")
    texts = token_texts(ids, tokenizer, cache={} if cache is None else cache)
    text, ends = "".join(texts), list(accumulate(map(len, texts)))
    found = {m.end() for delimiter in delimiters for m in re.finditer(re.escape(delimiter), text)}
    starts = {bisect_left(ends, end) + 1 for end in found}
    return sorted({0} | {start for start in starts if start < len(ids)}) if ids else []


def token_texts(ids: Sequence[int], tokenizer: Decoder, *, cache: dict[int, str]) -> list[str]:
    """What each token adds to the text, special ones nothing; a character that several make up comes with the last of
    them. `cache` is filled with the texts of tokens by themselves."""

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


def turn_starts(turns: Sequence[tuple[int, int]], inside_last: Sequence[int]) -> list[int]:
    """Starts of an agent's segments: its turns, start and end of each, and the segments of the last one, whose starts
    `inside_last` count from its own."""
    return [start for start, _ in turns[:-1]] + [turns[-1][0] + start for start in inside_last]


def drop_empty_end(
    starts: Sequence[int], ids: Sequence[int], tokenizer: Decoder, *, end_ids: Sequence[int]
) -> list[int]:
    """Starts without segments at the end that say nothing (the end token, white space before it): there is nothing to
    continue. The first start always stays."""
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
    """`Q(t) ∝ P(success | r_t) r_t^gamma` (Eq. 1) over the `possible` points, `(T,)` in float64; larger `gamma`
    prefers later ones. ValueError if `success_prob`, in (0, 1], is no non-empty vector or `gamma` not finite."""
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
    """Relative depths `r_t = t / T` of T branching points, from `1 / T` to 1, float64."""
    return torch.arange(1, num_points + 1, dtype=torch.float64) / num_points


def draw_pivots(probs: torch.Tensor, num_pivots: int, *, generator: torch.Generator) -> list[int]:
    """Indices drawn without replacement, in that order; fewer where fewer have a positive probability."""
    available = min(num_pivots, int((probs > 0).sum()))
    return torch.multinomial(probs, available, replacement=False, generator=generator).tolist()


def failed_rows(rewards: torch.Tensor, *, threshold: float, group_size: int, branch_from: str) -> torch.Tensor:
    """Mask `(N,)` of rows to branch from, over all processes: `"failures"` are those below `threshold`,
    `"failed_groups"` those of groups without a success, `"all"` every scorable one; never the unscorable (NaN)."""
    failures = failed(rewards, threshold=threshold)
    if branch_from == "failures":
        return failures
    if branch_from == "all":
        return ~rewards.isnan()
    solved = succeeded(rewards, threshold=threshold).view(-1, group_size).any(dim=1)
    return failures & ~solved.repeat_interleave(group_size)

"""Rows that share prefixes, as one sequence in which every shared token stands once.

The rows of a micro-batch are a trie: completions of one prompt share the prompt, branches of one pivot share what
precedes it. Its segments (runs of tokens without a branching) stand one after the other in depth-first order, so that
the descendants of a segment follow it without a gap. A token then sees an earlier one exactly if it stands before the
end of that one's descendants; `packing/attention.py` computes attention from this alone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

MIN_SAVED = 16  # tokens; a shared segment that saves fewer costs more by the attention calls that it adds


@dataclass(frozen=True)
class Segment:
    """A run of tokens of the trie without a branching, at the packed positions `start` to `stop`."""

    start: int
    stop: int  # after its last token
    end: int  # after the last of its descendants, which stand between `stop` and here
    depth: int  # place of its first token in the rows that hold it
    parent: int  # segment that it continues; -1 at the start of a row


@dataclass(frozen=True)
class Trie:
    """Rows without their repetitions."""

    segments: list[Segment]  # in depth-first order; parents come first
    tokens: list[int]  # `[S]`
    leaves: list[int]  # the segment in which each row ends, `[B]`; -1 for empty rows

    def chain(self, index: int) -> list[Segment]:
        """All segments from the start of the row to this one, which is the last."""
        chain = []
        while index >= 0:
            chain.append(self.segments[index])
            index = chain[-1].parent
        return chain[::-1]

    def positions(self, row: int) -> torch.Tensor:
        """Packed positions `(L,)` of the tokens of a row that is not empty."""
        return torch.cat([torch.arange(segment.start, segment.stop) for segment in self.chain(self.leaves[row])])


@dataclass
class PackedRows:
    """Rows as one sequence of S tokens, and where to read off what the model says about their completions."""

    trie: Trie
    input_ids: torch.Tensor  # `(1, S)`
    position_ids: torch.Tensor  # place of each token in the rows that hold it, `(1, S)`
    scored: torch.Tensor  # packed positions that predict a completion's token, `(N,)`; the first stands for padding
    labels: torch.Tensor  # what they predict, `(1, N)`; the first is -100
    index: torch.Tensor  # place of each completion token in `scored`, `(B, T)`; 0 on padding
    num_tokens: int  # of all rows, without padding
    num_unique: int  # of the sequence, without padding
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # of FlexAttention, by window

    @property
    def token_ratio(self) -> float:
        """How many times more tokens the rows have than are computed; 0 without a row."""
        return self.num_tokens / max(self.num_unique, 1)

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Values `(1, N)` of scored positions as those of the rows, `(B, T)`."""
        return values[0][self.index]


def computed_tokens(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_ids: torch.Tensor, completion_mask: torch.Tensor
) -> list[list[int]]:
    """Tokens of rows that a model has to see, `[B][L_i]`: all but padding and last ones, which predict nothing that is
    asked; none for rows without a token in `completion_mask`. Prompts are padded left, completions right."""
    ids = torch.cat([prompt_ids, completion_ids], dim=1).cpu()
    mask = torch.cat([prompt_mask, completion_mask], dim=1).bool().cpu()
    asked = completion_mask.any(dim=1).tolist()
    return [row[real].tolist()[:-1] if any_ else [] for row, real, any_ in zip(ids, mask, asked, strict=True)]


def build_trie(rows: list[list[int]], *, min_saved: int = MIN_SAVED) -> Trie:
    """Share what rows `[B][L_i]` have in common at their starts; rows may be empty, repeat, or be the start of
    another. A segment that would save fewer than `min_saved` tokens is repeated instead."""
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    order = sorted((i for i, row in enumerate(rows) if row), key=rows.__getitem__)
    starts: list[tuple[int, int, int, int]] = []  # start, stop, depth, parent
    tokens: list[int] = []
    leaves = [-1] * len(rows)
    todo = [(order, 0, 0, -1)] if order else []  # rows in order, first token not yet placed, tokens in common, parent
    while todo:
        group, placed, common, parent = todo.pop()
        first, last = arrays[group[0]], arrays[group[-1]]
        common = _common_length(first, last, start=common)
        same = common == len(last)
        if same or (len(group) - 1) * (common - placed) >= min_saved:
            starts.append((len(tokens), len(tokens) + common - placed, placed, parent))
            tokens.extend(first[placed:common].tolist())
            parent, placed = len(starts) - 1, common
        ended = [i for i in group if len(rows[i]) == common]
        if placed == common:
            for i in ended:
                leaves[i] = parent
        groups = [list(g) for _, g in groupby(group[len(ended) :], key=lambda i: rows[i][common])]
        if ended and placed < common:
            groups.insert(0, ended)
        todo.extend((g, placed, common, parent) for g in reversed(groups))
    ends = [stop for _, stop, _, _ in starts]
    for i in range(len(starts) - 1, -1, -1):
        parent = starts[i][3]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[i])
    segments = [Segment(a, b, end, depth, up) for (a, b, depth, up), end in zip(starts, ends, strict=True)]
    return Trie(segments, tokens, leaves)


def _common_length(first: np.ndarray, last: np.ndarray, *, start: int) -> int:
    length = min(len(first), len(last))
    different = np.flatnonzero(first[start:length] != last[start:length])
    return start + int(different[0]) if len(different) else length


def pack_rows(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    min_saved: int = MIN_SAVED,
    block: int | None = None,
) -> PackedRows:
    """Lay the [`computed_tokens`] of rows out, what they share once; `block` pads S to a [`bucket`] with tokens that
    no row sees. Without a row, the sequence is padding."""
    rows = computed_tokens(prompt_ids, prompt_mask, completion_ids, completion_mask)
    lengths = completion_mask.sum(dim=1).tolist()
    trie = build_trie(rows, min_saved=min_saved)
    num_unique = len(trie.tokens)
    trie = _padded(trie, bucket(num_unique, block) if block else max(num_unique, 1))

    # A position and the token that it predicts, as one number; equal pairs are scored once.
    vocab = int(completion_ids.max()) + 1 if len(rows) else 1
    pairs = torch.full(completion_ids.shape, -1)  # (B, T)
    for i, length in enumerate(lengths):
        if length:
            columns = completion_mask[i].cpu().bool()
            pairs[i, columns] = trie.positions(i)[-length:] * vocab + completion_ids[i].cpu()[columns]
    nothing = pairs.new_tensor([-1])
    scored, places = torch.cat([nothing, pairs.flatten()]).unique(return_inverse=True)
    depths = torch.cat([torch.arange(s.stop - s.start) + s.depth for s in trie.segments])

    device = prompt_ids.device
    return PackedRows(
        trie=trie,
        input_ids=torch.tensor([trie.tokens], device=device),
        position_ids=depths.unsqueeze(0).to(device),
        scored=(scored.clamp(min=0) // vocab).to(device),
        labels=torch.where(scored < 0, -100, scored % vocab).unsqueeze(0).to(device),
        index=places[1:].view_as(pairs).to(device),
        num_tokens=int(prompt_mask.sum() + completion_mask.sum()),
        num_unique=num_unique,
    )


def bucket(length: int, block: int) -> int:
    """The next of few lengths, in whole blocks: up to 16 any number of them, then eight steps to every doubling, which
    add less than an eighth. Two at least: torch compiles a dimension of size 1 by itself."""
    blocks = max(math.ceil(length / block), 2)
    step = max(2 ** (blocks.bit_length() - 1) // 8, 1)
    return math.ceil(blocks / step) * step * block


def _padded(trie: Trie, size: int) -> Trie:
    """With a segment more that belongs to no row, where there are fewer tokens than `size`."""
    start = len(trie.tokens)
    if start == size:
        return trie
    padding = Segment(start, size, size, depth=0, parent=-1)
    return Trie([*trie.segments, padding], trie.tokens + [0] * (size - start), trie.leaves)


def group_rows(prompts: list[list[int]], completions: list[list[int]], *, num_batches: int) -> list[int]:
    """Order of rows so that `num_batches` equal micro-batches (a divisor of B) share much and cost about the same.
    Rows of a prompt go to one while there is room; micro-batches keep the order of their first rows."""
    capacity = len(prompts) // num_batches
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: (prompts[i], completions[i]))
    trees = [list(tree) for _, tree in groupby(order, key=prompts.__getitem__)]
    trees.sort(key=lambda tree: _num_unique(rows, tree), reverse=True)
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    costs = [0] * num_batches
    for tree in trees:
        while tree:
            room = [capacity - len(batch) for batch in batches]
            takes = [b for b in range(num_batches) if room[b] >= len(tree)]
            b = min(takes, key=costs.__getitem__) if takes else max(range(num_batches), key=room.__getitem__)
            part, tree = tree[: room[b]], tree[room[b] :]
            batches[b].extend(part)
            costs[b] += _num_unique(rows, part)
    return [i for batch in sorted(batches, key=min) for i in batch]


def split_rows(rows: list[list[int]], *, budget: int, min_saved: int = MIN_SAVED) -> list[list[int]]:
    """Rows `[B][L_i]`, some empty, as packs whose tries have at most `budget` tokens: all are one if that fits, else
    sorted rows fill one after the other. ValueError if a row does not fit by itself."""
    check_fits(max(map(len, rows), default=0), budget)
    if _num_unique(rows, range(len(rows)), min_saved) <= budget:
        return [list(range(len(rows)))]
    packs: list[list[int]] = [[]]
    for i in sorted(range(len(rows)), key=rows.__getitem__):
        if _num_unique(rows, [*packs[-1], i], min_saved) > budget:
            packs.append([])
        packs[-1].append(i)
    return packs


def check_fits(longest: int, budget: int) -> None:
    """ValueError if a row alone exceeds the budget."""
    if longest > budget:
        raise ValueError(
            f"`packed_token_budget={budget}` cannot hold a row of {longest} tokens (prompt and completion): set it to "
            "at least the longest prompt plus `max_completion_length`, or to None for one sequence of any length."
        )


def _num_unique(rows: list[list[int]], part: Iterable[int], min_saved: int = MIN_SAVED) -> int:
    return len(build_trie([rows[i] for i in part], min_saved=min_saved).tokens)

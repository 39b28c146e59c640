"""Pack rows that share prefixes into one sequence that contains every shared token once.

The rows of a micro-batch form a trie: completions of one prompt share the prompt, and branches of one pivot share all
tokens before the pivot. A segment is a run of tokens of the trie without a branching. The sequence contains the
segments in depth-first order, so all descendants of a segment follow it directly. A token attends to an earlier token
if and only if it is in the segment of the earlier token or in a descendant of that segment. `packing/attention.py`
computes attention from this order alone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

MIN_SAVED = 16  # tokens; sharing fewer tokens saves less time than the additional attention call costs


@dataclass(frozen=True)
class Segment:
    """A run of tokens of the trie without a branching, at packed positions `start` to `stop`."""

    start: int
    stop: int  # position after the last token of this segment
    end: int  # position after the last token of its descendants, which are at positions `stop` to `end`
    depth: int  # position of its first token in the rows that contain it
    parent: int  # index of the segment that it continues; -1 at the start of a row


@dataclass(frozen=True)
class Trie:
    """Rows as segments, each shared segment once."""

    segments: list[Segment]  # in depth-first order; parents come first
    tokens: list[int]  # `[S]`
    leaves: list[int]  # index of the segment in which each row ends, `[B]`; -1 for empty rows

    def chain(self, index: int) -> list[Segment]:
        """Return all segments from the start of a row to the segment `index`."""
        chain = []
        while index >= 0:
            chain.append(self.segments[index])
            index = chain[-1].parent
        return chain[::-1]

    def positions(self, row: int) -> torch.Tensor:
        """Return the packed positions `(L,)` of the tokens of a row. The row must not be empty."""
        return torch.cat([torch.arange(segment.start, segment.stop) for segment in self.chain(self.leaves[row])])


@dataclass
class PackedRows:
    """Rows as one sequence of S tokens, with the positions whose outputs predict completion tokens."""

    trie: Trie
    input_ids: torch.Tensor  # `(1, S)`
    position_ids: torch.Tensor  # position of each token in the rows that contain it, `(1, S)`
    scored: torch.Tensor  # packed positions that predict a completion token, `(N,)`; the first is for padding
    labels: torch.Tensor  # tokens that these positions predict, `(1, N)`; the first is -100
    index: torch.Tensor  # index of each completion token in `scored`, `(B, T)`; 0 on padding
    num_tokens: int  # number of tokens of all rows, including their last tokens, without padding
    num_unique: int  # number of tokens of the sequence, without padding
    block_masks: dict[int | None, Any] = field(default_factory=dict)  # FlexAttention's masks, by window

    @property
    def token_ratio(self) -> float:
        """Return `num_tokens / num_unique`, which measures how much the rows share. 0 without rows."""
        return self.num_tokens / max(self.num_unique, 1)

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Return values `(1, N)` of scored positions per completion token, `(B, T)`."""
        return values[0][self.index]


def computed_tokens(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_ids: torch.Tensor, completion_mask: torch.Tensor
) -> list[list[int]]:
    """Return the tokens of each row that the model must process, `[B][L_i]`: all except padding and the last token,
    after which no token is predicted. Rows without completion tokens are empty. Prompts are padded on the left,
    completions on the right."""
    ids = torch.cat([prompt_ids, completion_ids], dim=1).cpu()
    mask = torch.cat([prompt_mask, completion_mask], dim=1).bool().cpu()
    has_completion = completion_mask.any(dim=1).tolist()
    rows = []
    for row, real, is_scored in zip(ids, mask, has_completion, strict=True):
        rows.append(row[real].tolist()[:-1] if is_scored else [])
    return rows


def build_trie(rows: list[list[int]], *, min_saved: int = MIN_SAVED) -> Trie:
    """
    Build the trie of rows, in which rows share their common prefixes.

    Args:
        rows (`list[list[int]]`):
            Tokens of the rows, `[B][L_i]`. Rows may be empty, equal, or a prefix of another row.
        min_saved (`int`, *optional*):
            Least number of tokens that a shared segment saves. Shorter common prefixes are repeated.

    Returns:
        [`Trie`]: The trie.
    """
    arrays = [np.array(row, dtype=np.int64) for row in rows]
    in_order = sorted((i for i, row in enumerate(rows) if row), key=rows.__getitem__)
    found: list[tuple[int, int, int, int]] = []  # start, stop, depth and parent of each segment
    tokens: list[int] = []
    leaves = [-1] * len(rows)
    # Each entry is a group of sorted rows with a common prefix: the row numbers; `placed`, the number of their first
    # tokens that are already in segments; `common`, the number of their first tokens that are known to be equal; and
    # `parent`, the last of these segments.
    todo = [(in_order, 0, 0, -1)] if in_order else []
    while todo:
        group, placed, common, parent = todo.pop()
        first, last = arrays[group[0]], arrays[group[-1]]  # in sorted rows, these two differ earliest
        common = _common_length(first, last, start=common)
        all_equal = common == len(last)
        num_saved = (len(group) - 1) * (common - placed)
        if all_equal or num_saved >= min_saved:
            found.append((len(tokens), len(tokens) + common - placed, placed, parent))
            tokens.extend(first[placed:common].tolist())
            parent, placed = len(found) - 1, common
        ended = [i for i in group if len(rows[i]) == common]  # shorter rows come first
        groups = [list(g) for _, g in groupby(group[len(ended) :], key=lambda i: rows[i][common])]
        if placed == common:
            for i in ended:
                leaves[i] = parent
        elif ended:
            groups.insert(0, ended)  # the common tokens are too few, so every group repeats them
        todo.extend((g, placed, common, parent) for g in reversed(groups))
    # A segment ends where its last descendant ends. Children come after their parents, so go backwards.
    ends = [stop for _, stop, _, _ in found]
    for i in range(len(found) - 1, -1, -1):
        parent = found[i][3]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[i])
    segments = []
    for (start, stop, depth, parent), end in zip(found, ends, strict=True):
        segments.append(Segment(start, stop, end, depth, parent))
    return Trie(segments, tokens, leaves)


def _common_length(first: np.ndarray, last: np.ndarray, *, start: int) -> int:
    """Return the length of the common prefix of two rows, of which `start` tokens are known to be equal."""
    length = min(len(first), len(last))
    different = np.flatnonzero(first[start:length] != last[start:length])
    if len(different):
        return start + int(different[0])
    return length


def pack_rows(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    *,
    min_saved: int = MIN_SAVED,
    block: int | None = None,
) -> PackedRows:
    """
    Pack the [`computed_tokens`] of rows into one sequence that contains shared prefixes once.

    Args:
        prompt_ids (`torch.Tensor`):
            Prompts, padded on the left, `(B, P)`.
        prompt_mask (`torch.Tensor`):
            1 on the tokens of the prompts, `(B, P)`.
        completion_ids (`torch.Tensor`):
            Completions, padded on the right, `(B, T)`.
        completion_mask (`torch.Tensor`):
            1 on the tokens of the completions, `(B, T)`.
        min_saved (`int`, *optional*):
            Least number of tokens that a shared segment saves.
        block (`int`, *optional*):
            Pad the sequence to a [`bucket`] of this block size. No row sees the padding.

    Returns:
        [`PackedRows`]: The sequence. Without rows, it contains one token of padding (with `block`, a bucket).
    """
    rows = computed_tokens(prompt_ids, prompt_mask, completion_ids, completion_mask)
    lengths = completion_mask.sum(dim=1).tolist()
    trie = build_trie(rows, min_saved=min_saved)
    num_unique = len(trie.tokens)
    size = bucket(num_unique, block) if block else max(num_unique, 1)
    trie = _padded(trie, size)

    # A position and the token that it predicts, as one number. Equal pairs are scored once.
    vocab = int(completion_ids.max()) + 1 if len(rows) else 1
    pairs = torch.full(completion_ids.shape, -1)  # (B, T)
    for i, length in enumerate(lengths):
        if length:
            # The trie lacks the last token of a row, so its last `length` positions predict the completion.
            columns = completion_mask[i].cpu().bool()
            pairs[i, columns] = trie.positions(i)[-length:] * vocab + completion_ids[i].cpu()[columns]
    # Put a -1 in front, so that the first scored position is always the one for padding.
    padding = pairs.new_tensor([-1])
    scored, places = torch.cat([padding, pairs.flatten()]).unique(return_inverse=True)
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
    """
    Round a length up to one of a few lengths, so that torch compiles for few shapes.

    The result is a multiple of `block`. Up to 16 blocks, it is the next multiple. Above 16 blocks, only eight lengths
    exist between a length and its double, so padding adds less than an eighth. The result is at least two blocks,
    because torch compiles a dimension of size 1 separately.
    """
    blocks = max(math.ceil(length / block), 2)
    step = max(2 ** (blocks.bit_length() - 1) // 8, 1)
    return math.ceil(blocks / step) * step * block


def _padded(trie: Trie, size: int) -> Trie:
    """Return the trie padded to `size` tokens by a segment that belongs to no row."""
    start = len(trie.tokens)
    if start == size:
        return trie
    padding = Segment(start, size, size, depth=0, parent=-1)
    return Trie([*trie.segments, padding], trie.tokens + [0] * (size - start), trie.leaves)


def group_rows(prompts: list[list[int]], completions: list[list[int]], *, num_batches: int) -> list[int]:
    """
    Return an order of rows in which micro-batches share many tokens and cost about the same.

    Prompts are distributed one after another, beginning with the prompt whose rows have the most unique tokens. All
    its rows go to the cheapest micro-batch that has room for them. If no micro-batch has enough room, the rows are
    divided: some fill the micro-batch with the most room. Finally, micro-batches are sorted by their smallest row
    number.

    Args:
        prompts (`list[list[int]]`):
            Tokens of the prompts, `[B][P_i]`.
        completions (`list[list[int]]`):
            Tokens of the completions, `[B][T_i]`.
        num_batches (`int`):
            Number of micro-batches of equal size, a divisor of B.

    Returns:
        `list[int]`: Row numbers, one micro-batch after another, `[B]`.
    """
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
            fitting = [b for b in range(num_batches) if room[b] >= len(tree)]
            if fitting:
                b = min(fitting, key=costs.__getitem__)
            else:
                b = max(range(num_batches), key=room.__getitem__)
            part, tree = tree[: room[b]], tree[room[b] :]
            batches[b].extend(part)
            costs[b] += _num_unique(rows, part)
    ordered: list[int] = []
    for batch in sorted(batches, key=min):
        ordered.extend(batch)
    return ordered


def split_rows(rows: list[list[int]], *, budget: int, min_saved: int = MIN_SAVED) -> list[list[int]]:
    """Split rows `[B][L_i]` into packs whose tries have at most `budget` tokens. Return the row numbers of each pack.
    If all rows fit, they are one pack. Otherwise, fill the packs with sorted rows one after another. Raise a
    ValueError if a single row does not fit."""
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
    """Raise a ValueError if the longest row exceeds the budget."""
    if longest > budget:
        raise ValueError(
            f"`packed_token_budget={budget}` cannot hold a row of {longest} tokens (prompt and completion): set it to "
            "at least the longest prompt plus `max_completion_length`, or to None for one sequence of any length."
        )


def _num_unique(rows: list[list[int]], part: Iterable[int], min_saved: int = MIN_SAVED) -> int:
    """Return the number of tokens of the trie of the rows `part`."""
    return len(build_trie([rows[i] for i in part], min_saved=min_saved).tokens)

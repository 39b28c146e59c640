"""Actions of an agent at one decision: which rows decide together, what an action is, and who takes which.

After SESA (https://huggingface.co/papers/2510.15502), section 3.1, "Sequential Sampling for Agent".
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def action_of(message: dict[str, Any]) -> str:
    """
    What an assistant's turn does, as a text that is equal for equal actions.

    Args:
        message (`dict`):
            The parsed turn. Its tool calls are the action; without one its text is, the final answer.

    Returns:
        `str`: For instance `move(direction=left)`; several calls are joined by `; `.
    """
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    if not calls:
        return str(message.get("content") or "").strip()
    return "; ".join(f"{call.get('name')}({_arguments(call.get('arguments'))})" for call in calls)


def _arguments(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return _text(arguments)
    return ", ".join(f"{name}={_text(arguments[name])}" for name in sorted(arguments))


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def decision_blocks(
    groups: Sequence[int], contexts: Sequence[Sequence[int]], eligible: Sequence[bool]
) -> list[list[int]]:
    """
    Rows that stand before the same decision.

    Args:
        groups (`Sequence[int]`):
            Group of each row, `[B]`.
        contexts (`Sequence[Sequence[int]]`):
            Tokens that each row has seen, `[B][P_i]`.
        eligible (`Sequence[bool]`):
            Whether a row takes part.

    Returns:
        `list[list[int]]`: Blocks of at least two rows of one group with equal contexts, in the order of first rows.
    """
    blocks: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, (group, context, wanted) in enumerate(zip(groups, contexts, eligible, strict=True)):
        if wanted:
            blocks[group, tuple(context)].append(row)
    return [rows for rows in blocks.values() if len(rows) > 1]


def share_out(num_rows: int, goes_on: Sequence[bool]) -> list[int]:
    """
    Deal actions out to the rows of a block: one each in turn, then only those after which rows can still part.

    Args:
        num_rows (`int`):
            Rows of the block.
        goes_on (`Sequence[bool]`):
            Whether the episode goes on after each action; at most `num_rows` actions.

    Returns:
        `list[int]`: Action of each row.
    """
    order = list(range(len(goes_on)))
    again = [action for action in order if goes_on[action]] or order
    return [order[row] if row < len(order) else again[(row - len(order)) % len(again)] for row in range(num_rows)]

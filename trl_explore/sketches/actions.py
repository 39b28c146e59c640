"""Actions of an agent at one decision: which rows decide together, what an action is, and who takes which. After SESA
(https://huggingface.co/papers/2510.15502), section 3.1, "Sequential Sampling for Agent"."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def action_of(message: dict[str, Any]) -> str:
    """What an assistant's parsed turn does, equal for equal actions: its tool calls, as `move(direction=left)`,
    several joined by `; `; without one its text, the final answer."""
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
    """Blocks of at least two eligible rows of one group with equal contexts `[B][P_i]`, in the order of first rows."""
    blocks: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, (group, context, wanted) in enumerate(zip(groups, contexts, eligible, strict=True)):
        if wanted:
            blocks[group, tuple(context)].append(row)
    return [rows for rows in blocks.values() if len(rows) > 1]


def share_out(num_rows: int, goes_on: Sequence[bool]) -> list[int]:
    """Action of each row of a block: one each in turn, then only those after which the episode goes on, so that rows
    can still part; at most `num_rows` actions."""
    order = list(range(len(goes_on)))
    again = [action for action in order if goes_on[action]] or order
    return [order[row] if row < len(order) else again[(row - len(order)) % len(again)] for row in range(num_rows)]

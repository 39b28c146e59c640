"""Actions of an agent at a decision: the text of an action, the rows that are at the same decision, and the action
that each row takes.

After SESA (https://huggingface.co/papers/2510.15502), section 3.1, "Sequential Sampling for Agent".
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any


def action_of(message: dict[str, Any]) -> str:
    """Return the action of an assistant's parsed turn as text. Equal actions have equal texts. The text lists the tool
    calls, such as `move(direction=left)`, separated by `; `. A turn without tool calls is a final answer, and its text
    is the content of the turn."""
    texts = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        texts.append(f"{function.get('name')}({_arguments(function.get('arguments'))})")
    if not texts:
        return str(message.get("content") or "").strip()
    return "; ".join(texts)


def _arguments(arguments: Any) -> str:
    """Return the arguments of a tool call, sorted by name."""
    if not isinstance(arguments, dict):
        return _text(arguments)
    return ", ".join(f"{name}={_text(arguments[name])}" for name in sorted(arguments))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value, sort_keys=True, default=str)


def decision_blocks(
    groups: Sequence[int], contexts: Sequence[Sequence[int]], eligible: Sequence[bool]
) -> list[list[int]]:
    """
    Return the blocks of rows that are at the same decision.

    Args:
        groups (`Sequence[int]`):
            Group number of each row, `[B]`.
        contexts (`Sequence[Sequence[int]]`):
            Tokens of each row so far, `[B][P_i]`.
        eligible (`Sequence[bool]`):
            True for rows that may be in a block, `[B]`.

    Returns:
        `list[list[int]]`: Blocks of at least two rows of one group with equal contexts, in the order of their first
        rows.
    """
    blocks: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, (group, context, wanted) in enumerate(zip(groups, contexts, eligible, strict=True)):
        if wanted:
            blocks[group, tuple(context)].append(row)
    return [rows for rows in blocks.values() if len(rows) > 1]


def share_out(num_rows: int, goes_on: Sequence[bool]) -> list[int]:
    """
    Return the number of the action that each row of a block takes, `[num_rows]`.

    The first rows take one action each. The remaining rows take, in rotation, the actions after which the episode
    continues, because these rows can still differ in later turns. If the episode ends after every action, the
    remaining rows take all actions in rotation.

    Args:
        num_rows (`int`):
            Number of rows of the block.
        goes_on (`Sequence[bool]`):
            True for each action after which the episode continues. There are at most `num_rows` actions.
    """
    num_actions = len(goes_on)
    repeated = [action for action in range(num_actions) if goes_on[action]]
    if not repeated:
        repeated = list(range(num_actions))
    shares = list(range(num_actions))
    for extra in range(num_rows - num_actions):
        shares.append(repeated[extra % len(repeated)])
    return shares

"""Check the result of a branch explorer, so that a mistake is one clear error and does not train wrongly."""

import math
import operator
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from trl_explore.explorers.branch_explorer import Branches
from trl_explore.rows.rollouts import Rows


def checked_branches(name: str, branches: Any, *, main_lengths: Sequence[int], num_rewards: int) -> Branches:
    """
    Check the result of a branch explorer.

    Args:
        name (`str`):
            Name of the explorer, for messages.
        branches:
            Its result.
        main_lengths (`Sequence[int]`):
            Number of completion tokens of each main row of this process, `[B]`.
        num_rewards (`int`):
            Number of reward functions (F).

    Returns:
        [`Branches`]: The result. Tensors and NumPy values in it are Python numbers and lists.

    Raises:
        ValueError: If something is wrong. The message names the explorer, the field, the value and the remedy.
    """
    start = f"Branch explorer {name!r} returned"
    if not isinstance(branches, Branches) or not isinstance(branches.rows, Rows):
        raise ValueError(
            f"{start} {reprlib.repr(branches)}: return `Branches(self.forks.rows(...))`, also if there is no branch."
        )
    lengths = [len(ids) for ids in branches.rows.completion_ids]
    _check_rows(start, branches.rows, lengths, num_rewards)
    advantages = None
    if branches.advantages is not None:
        given = _plain(branches.advantages)
        if not isinstance(given, list | tuple) or len(given) != len(lengths):
            raise ValueError(
                f"{start} `advantages` = {reprlib.repr(given)} for {len(lengths)} rows: return a list with one entry "
                "for each row, or None for GRPO's advantages."
            )
        advantages = []
        for place, value in enumerate(given):
            advantages.append(_value(f"{start} `advantages[{place}]`", value, lengths[place]))
    if not isinstance(branches.main_advantages, Mapping):
        raise ValueError(
            f"{start} `main_advantages` = {reprlib.repr(branches.main_advantages)}: return a dictionary by "
            "`trajectory.main_row`."
        )
    main_advantages = {}
    for key, value in branches.main_advantages.items():
        row = _row(start, key, len(main_lengths))
        main_advantages[row] = _value(f"{start} `main_advantages[{row}]`", value, main_lengths[row])
    return Branches(branches.rows, advantages, main_advantages)


def _check_rows(start: str, rows: Rows, lengths: list[int], num_rewards: int) -> None:
    """Raise ValueError if a row has no tokens, a mask of another length, or wrong rewards."""
    for place, (mask, rewards) in enumerate(zip(rows.loss_mask, rows.known_rewards, strict=True)):
        if lengths[place] == 0:
            raise ValueError(f"{start} row {place} without tokens: a completion has at least one.")
        if len(mask) != lengths[place]:
            raise ValueError(
                f"{start} row {place} with {len(mask)} values of `loss_mask` for {lengths[place]} tokens: give one "
                "for each token."
            )
        if rewards is not None and (not isinstance(rewards, list | tuple) or len(rewards) != num_rewards):
            raise ValueError(
                f"{start} row {place} with the rewards {reprlib.repr(rewards)}: give a list with one number for each "
                f"reward function ({num_rewards}), or None to ask the functions. `self.forks.judge(branches)` sets "
                "them."
            )


def _row(start: str, key: Any, num_rows: int) -> int:
    """Return a key of `main_advantages` as the index of a main row. Raise ValueError if it is none."""
    try:
        # -1 means that the key is not an integer. Refuse a bool, because `operator.index` would return 0 or 1.
        row = -1 if isinstance(key, bool) else operator.index(key)
    except TypeError:
        row = -1
    if not 0 <= row < num_rows:
        raise ValueError(
            f"{start} `main_advantages` of row {key!r}: the main rows of this process are 0 to {num_rows - 1}; use "
            "`trajectory.main_row`."
        )
    return row


def _value(start: str, value: Any, length: int) -> float | list[float]:
    """Return an advantage as a number, or as a list of `length` numbers. Raise ValueError if it is neither."""
    plain = _plain(value)
    is_list = isinstance(plain, list | tuple)
    numbers = [_plain(number) for number in plain] if is_list else [plain]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise ValueError(
                f"{start} = {reprlib.repr(value)}: an advantage is a finite number, or a list with one for each "
                "token. Rewards that are infinite or NaN make such advantages."
            )
    if not is_list:
        return float(numbers[0])
    if len(numbers) != length:
        raise ValueError(
            f"{start} with {len(numbers)} numbers for a completion of {length} tokens: return one for each token."
        )
    return [float(number) for number in numbers]


def _plain(value: Any) -> Any:
    """Convert a tensor or a NumPy value to Python numbers and lists. Return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value

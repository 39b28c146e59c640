"""Check the result of a branch explorer, so that a mistake is one clear error and does not train wrongly."""

import math
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

from trl_explore.explorers.branch_explorer import Branches
from trl_explore.rows.rollouts import Rows


def check_branches(name: str, branches: Any, *, main_lengths: Sequence[int]) -> None:
    """
    Check the result of a branch explorer.

    Args:
        name (`str`):
            Name of the explorer, for messages.
        branches:
            Its result.
        main_lengths (`Sequence[int]`):
            Number of completion tokens of each main row of this process, `[B]`.

    Raises:
        ValueError: If something is wrong. The message names the explorer, the field, the value and the remedy.
    """
    start = f"Branch explorer {name!r} returned"
    if not isinstance(branches, Branches) or not isinstance(branches.rows, Rows):
        raise ValueError(
            f"{start} {reprlib.repr(branches)}: return `Branches(self.forks.rows(...))`, also if there is no branch."
        )
    lengths = [len(ids) for ids in branches.rows.completion_ids]
    if branches.advantages is not None:
        if len(branches.advantages) != len(lengths):
            raise ValueError(
                f"{start} {len(branches.advantages)} `advantages` for {len(lengths)} rows: return one entry for each "
                "row, or None for GRPO's advantages."
            )
        for place, value in enumerate(branches.advantages):
            _check_value(f"{start} `advantages[{place}]`", value, lengths[place])
    for row, value in branches.main_advantages.items():
        if not isinstance(row, int) or not 0 <= row < len(main_lengths):
            raise ValueError(
                f"{start} `main_advantages` of row {row!r}: the main rows of this process are 0 to "
                f"{len(main_lengths) - 1}; use `trajectory.main_row`."
            )
        _check_value(f"{start} `main_advantages[{row}]`", value, main_lengths[row])


def _check_value(start: str, value: Any, length: int) -> None:
    """Raise ValueError unless `value` is a finite number, or a list of `length` finite numbers."""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if not isinstance(number, Real) or not math.isfinite(number):
            raise ValueError(
                f"{start} = {reprlib.repr(value)}: an advantage is a finite number, or a list with one for each token."
            )
    if isinstance(value, list) and len(value) != length:
        raise ValueError(
            f"{start} with {len(value)} numbers for a completion of {length} tokens: return one for each token."
        )

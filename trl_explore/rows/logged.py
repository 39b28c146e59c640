"""Assign the values that reward functions log with `log_extra` to the rows that the functions scored."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class LoggedColumns:
    """
    Collects the values that reward functions log while they score some rows of a batch.

    TRL appends all logged values to one list per column. If two functions log the same column, or a function logs
    values of some rows only, that list no longer matches the rows. So this class collects the values of each function
    separately. If several functions log a column, the last one counts, as in TRL.

    Args:
        asked (`list[bool]`):
            True for rows that the functions score, `[B]`.
        known (`Sequence[Mapping[str, Any]]`, *optional*):
            Values by column that were logged before, for the other rows, `[B]`.
    """

    def __init__(self, asked: list[bool], known: Sequence[Mapping[str, Any]] = ()) -> None:
        self.asked, self.known = asked, known or [{} for _ in asked]
        self._values: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))  # by column, function

    def log_of(self, function: int) -> Callable[[str, Any], None]:
        """Return the `log_extra` of a reward function, given by its number."""

        def log_extra(column: str, values: Any) -> None:
            self._values[column][function].extend(values)

        return log_extra

    def columns(self) -> tuple[dict[str, list[Any]], dict[str, int]]:
        """
        Return one value per row and column.

        Returns:
            `tuple[dict[str, list], dict[str, int]]`: Values `[B]` by column, None where nothing was logged; and the
            number of values of each column whose values cannot be assigned to rows. Such a column is None in all rows
            that were scored.
        """
        number = sum(self.asked)
        found: dict[str, list[Any]] = {}
        unplaced: dict[str, int] = {}
        names: dict[str, None] = {}  # in order, columns of known rows first
        for row in self.known:
            names.update(dict.fromkeys(row))
        names.update(dict.fromkeys(self._values))
        for column in names:
            logged: list[Any] | None = []
            if column in self._values:
                logged = _of_rows(list(self._values[column].values()), number)
            if logged is None:
                unplaced[column] = sum(map(len, self._values[column].values()))
                logged = []
            found[column] = self._one_per_row(column, logged)
        return found, unplaced

    def _one_per_row(self, column: str, logged: list[Any]) -> list[Any]:
        """Return the values of a column, `[B]`: the new values of the rows that were scored, and the known values of
        the other rows."""
        values = iter(logged)
        found = []
        for asked, row in zip(self.asked, self.known, strict=True):
            found.append(next(values, None) if asked else row.get(column))
        return found


def _of_rows(by_function: list[list[Any]], number: int) -> list[Any] | None:
    """Return one value for each of `number` rows, or None if the number of values does not fit."""
    whole = [values for values in by_function if values and len(values) % number == 0]
    if whole:
        return whole[-1][-number:]  # if a function logs a column twice, the second time counts
    # Each function may have logged only some rows. If the counts add up, assume that the values are in row order.
    together: list[Any] = []
    for values in by_function:
        together.extend(values)
    if len(together) not in (0, number):
        return None
    return together

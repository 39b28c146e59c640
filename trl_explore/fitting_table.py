"""Tables for a terminal. If a table is too wide, it is split into several tables, so that its cells need not wrap."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SHORTEST_NAME = 12  # characters per line that the names in the first column always get


@dataclass(frozen=True)
class FittingTable:
    """
    A table that fits the console: columns that do not fit go into further tables below.

    Every table begins with the first column, which names the rows.

    Args:
        titles (`Sequence[str]`):
            Titles of the columns. They wrap between words if the table does not fit otherwise.
        rows (`Sequence[Sequence[str]]`):
            Cells, each of one or several lines that never wrap. Only names in the first column wrap, if they are too
            long to leave room for another column.
        options (`dict`, *optional*):
            Options of [`rich.table.Table`].
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    options: dict[str, Any] | None = None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        room = options.max_width
        columns = list(range(1, len(self.titles)))
        whole = self._table(columns, [row[0] for row in self.rows], self.titles)
        if _width(whole, console) <= room:
            yield whole
            return
        while columns:
            count = len(columns)  # columns of this table: the largest number that fits, at least 1
            while count > 1 and _width(self._narrow(columns[:count]), console) > room:
                count -= 1
            table = self._narrow(columns[:count])
            excess = _width(table, console) - room
            yield table if excess <= 0 else self._narrow(columns[:count], excess)
            columns = columns[count:]

    def _narrow(self, columns: Sequence[int], excess: int = 0) -> Any:
        """Return `columns` as a table with wrapped titles. Wrap the names too, so that the table is narrower by
        `excess` characters."""
        names = [row[0] for row in self.rows]
        if excess:
            most = max(SHORTEST_NAME, _longest_line(names) - excess)
            names = ["\n".join(textwrap.fill(line, most) for line in name.split("\n")) for name in names]
        titles = list(self.titles)
        for column in columns:
            titles[column] = self._title(column, [row[column] for row in self.rows])
        return self._table(columns, names, titles)

    def _table(self, columns: Sequence[int], names: Sequence[str], titles: Sequence[str]) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(**(self.options or {}))
        table.add_column(titles[0], justify="left", no_wrap=True)
        for column in columns:
            table.add_column(titles[column], justify="right", no_wrap=True)
        for name, row in zip(names, self.rows, strict=True):
            # rich would read brackets in a string as markup, but not in a `Text`.
            table.add_row(Text(name), *(Text(row[column]) for column in columns))
        return table

    def _title(self, column: int, cells: Sequence[str]) -> str:
        """Return the title of a column, in lines that are no longer than its cells or its longest word."""
        title = self.titles[column]
        most = max([_longest_line(cells), *(len(word) for word in title.split())])
        return textwrap.fill(title, most) if most else title


def _width(table: Any, console: Any) -> int:
    """Return the width that a table needs if nothing is cut off. Measure it in a console that is wide enough."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _longest_line(texts: Sequence[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)

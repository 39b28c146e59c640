"""Tables for a terminal, none of whose cells wrap."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SHORTEST_NAME = 12  # columns that a name in the first column always has


@dataclass(frozen=True)
class FittingTable:
    """
    A table as wide as the console that prints it: columns that do not fit go into further tables below.

    Every table begins with the first column, which names the rows.

    Args:
        titles (`Sequence[str]`):
            Titles of the columns. They may wrap between words.
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
        columns = list(range(1, len(self.titles)))
        while columns:
            count = len(columns)
            while count > 1 and self._width(columns[:count], console) > options.max_width:
                count -= 1
            yield self._table(columns[:count], room=options.max_width, console=console)
            columns = columns[count:]

    def _width(self, columns: Sequence[int], console: Any) -> int:
        return console.measure(self._table(columns), options=console.options.update(width=10_000)).maximum

    def _table(self, columns: Sequence[int], *, room: int | None = None, console: Any = None) -> Any:
        """Return the first column and `columns` as one table; names wrap if it would be wider than `room`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(**(self.options or {}))
        names = [row[0] for row in self.rows]
        excess = 0 if room is None else self._width(columns, console) - room
        if excess > 0:
            most = max(SHORTEST_NAME, _longest_line(names) - excess)
            names = ["\n".join(textwrap.fill(line, most) for line in name.split("\n")) for name in names]
        table.add_column(self.titles[0], justify="left", no_wrap=True)
        for column in columns:
            cells = [row[column] for row in self.rows]
            table.add_column(self._title(column, cells), justify="right", no_wrap=True)
        for name, row in zip(names, self.rows, strict=True):
            table.add_row(Text(name), *(Text(row[column]) for column in columns))
        return table

    def _title(self, column: int, cells: Sequence[str]) -> str:
        """Return the title of a column, in lines that are no longer than its cells or its longest word."""
        title = self.titles[column]
        most = max([_longest_line(cells), *(len(word) for word in title.split())])
        return textwrap.fill(title, most) if most else title


def _longest_line(texts: Sequence[str]) -> int:
    return max((len(line) for text in texts for line in text.split("\n")), default=0)

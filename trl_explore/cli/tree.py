"""The command `trl-explore tree`, which shows a search tree of a trainer in the terminal and as a web page."""

import argparse
import io
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from trl_explore.errors import UsageError
from trl_explore.saving.whole_files import whole_file
from trl_explore.tree_view.files import read_trees
from trl_explore.tree_view.text import LEGEND, depths, html_page, plain, short_text, text_tree
from trl_explore.visible_text import visible_text

# Smallest width of the text and the numbers of a node, in characters. The lines that draw the tree are not included.
LINE_WIDTH = 60


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `trl-explore tree`."""
    parser = argparse.ArgumentParser(
        prog="trl-explore tree",
        description="Look at a search tree that a trainer dumped: here, and as a web page in one file.",
        epilog="Piped into another command, lines are not wrapped: trl-explore tree FILE | less -S",
    )
    parser.add_argument("file", metavar="FILE", help="dumped trees, such as out/trees/trees_0.jsonl")
    parser.add_argument("--index", type=int, help="which tree: 0 is the first, -1 the last (default: 0)")
    parser.add_argument("--html", metavar="PATH", help="where the web page goes (default: FILE_<index>.html)")
    parser.add_argument("--list", action="store_true", help="print a table of all trees of the file")
    return parser


def run(argv: list[str]) -> int:
    """Run `trl-explore tree`, and return its exit status."""
    args = build_parser().parse_args(argv)
    path = _check_file(args.file)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows escapes instead of raising an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if args.list:
            if args.html is not None or args.index is not None:
                raise UsageError(
                    "--list shows all trees of the file: leave out --index and --html, or leave out --list"
                )
            _print(_table_of(path))
            return 0
        index, record = _pick(path, args.index or 0)
    except ValueError as error:
        raise UsageError(
            f"{str(path)!r}: {error}; delete that line, or pass a trees_<rank>.jsonl from a run's `dump_trees` folder"
        ) from error
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    # Write the page first, because a reader such as `head` may end this process while it prints.
    page = path.with_name(f"{path.stem}_{index}.html")
    if args.html is not None:
        page = Path(args.html).expanduser()
    _write_page(page, record)
    _print_tree(index, record)
    _print(Text(f"\nwrote {visible_text(str(page))}"))
    return 0


def _check_file(name: str) -> Path:
    """Return the path of a file of trees. Raise a UsageError if it is a folder or does not exist."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(file.name for file in path.rglob("trees_*.jsonl"))
        remedy = "and it holds no trees_<rank>.jsonl"
        if inside:
            remedy = f"pass a file in it: {', '.join(inside[:5])}"
        raise UsageError(f"{name!r} is a folder, {remedy}")
    if not path.exists():
        raise UsageError(
            f"{name!r} does not exist (looked from {os.getcwd()}); trees are dumped as trees_<rank>.jsonl into the "
            "`dump_trees` folder of a run's output_dir"
        )
    return path


def _no_tree(path: Path) -> UsageError:
    return UsageError(f"{str(path)!r} holds no whole tree yet; try again once the run has written one")


def _pick(path: Path, index: int) -> tuple[int, dict[str, Any]]:
    """Return a tree of a file, and its index counted from the start. A negative `index` counts from the end."""
    count = 0
    # A negative index needs only the last `-index` trees. Files of trees are too large to keep all trees in memory.
    last: deque[dict[str, Any]] = deque(maxlen=max(-index, 1))
    for record in read_trees(path):
        if count == index:
            return index, record
        last.append(record)
        count += 1
    if not count:
        raise _no_tree(path)
    if index < 0 and count >= -index:
        return count + index, last[0]
    raise UsageError(
        f"--index {index}: {str(path)!r} holds {count} tree(s); pass a number from {-count} to {count - 1}"
    )


def _table_of(path: Path) -> Table:
    """Return a table with one line per tree."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("index", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", overflow="fold")
    for name in ("success ratio", "nodes", "iterations"):
        table.add_column(name, justify="right")
    table.add_column("search ended")
    for index, record in enumerate(read_trees(path)):
        table.add_row(
            str(index),
            str(record["step"]),
            Text(short_text(record["prompt"], 60)),
            plain(record["success_ratio"]),
            str(len(record["nodes"])),
            str(record["iterations"]),
            Text(short_text(record["reason"], 30)),
        )
    if not table.row_count:
        raise _no_tree(path)
    return table


def _print_tree(index: int, record: dict[str, Any]) -> None:
    """Print a tree in the terminal. `index` is its number in the file."""
    facts = [
        f"{len(record['nodes'])} nodes",
        f"{record['iterations']} iterations",
        f"{record['generated_tokens']} tokens",
        f"success ratio {plain(record['success_ratio'])}",
        f"baseline {plain(record['baseline'])}",
        f"search ended: {short_text(record['reason'], 60)}",
    ]
    # `record["index"]` is the number of the prompt in its batch, not the number of the tree in the file.
    heading = Text(f"tree {index}: step {record['step']}, prompt {record['index']} of its batch", style="bold")
    heading.append(f"  {', '.join(facts)}", style="not bold")
    _print(heading)
    _print(text_tree(record), indent=2 * max(depths(record["nodes"])))
    _print(Text(LEGEND, style="dim"))


def _print(drawing: RenderableType, *, indent: int = 0) -> None:
    """Print a drawing. In a terminal, lines wrap at the terminal's width, or at `indent + LINE_WIDTH` characters if
    that is more, so that deep nodes have room for their text. In a file or a pipe, lines do not wrap."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.width = max(console.width, indent + LINE_WIDTH)
    else:
        console.width = 100_000
        console.width = console.measure(drawing).maximum
    console.print(drawing)


def _write_page(path: Path, record: dict[str, Any]) -> None:
    """Write a tree as a web page."""
    if path.suffix not in (".html", ".htm"):  # a typing mistake must not overwrite a file of trees or a model
        raise UsageError(f"--html {str(path)!r}: name a file that ends in .html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(html_page(record), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {str(path)!r} cannot be written: {error.strerror}; pass another path") from error

"""A dumped search tree as something to look at: lines in a terminal, or one HTML file.

Prompts and completions are untrusted: a model may write markup, scripts or terminal escape sequences. They are shown
as text, whatever they contain.
"""

import math
from collections.abc import Iterator
from typing import Any

from rich.text import Text
from rich.tree import Tree

from trl_explore.tree_view.page import render_page
from trl_explore.visible_text import visible_text

# In terminals close to the colours that they know by name, since some know only 16.
_TERMINAL_RED, _TERMINAL_GREY, _TERMINAL_GREEN = (225, 10, 30), (138, 138, 138), (0, 170, 0)
# In the page of different lightness and blueness too, which helps where red and green look alike.
_PAGE_RED, _PAGE_GREEN = (214, 69, 48), (24, 158, 104)

LEGEND = (
    "# node  i iteration that sampled it  N visits  V value backed up  Q = V/N  H mean token entropy in nats  "
    "* training row"
)


# ------------------------------------------------------------------------------------------------------------- reading


def short_text(text: str, length: int) -> str:
    """Start of an untrusted text on one line: newlines and tabs as arrows, an ellipsis where something is left out."""
    shown = visible_text(text[: length + 1]).replace("\n", "\u21b5").replace("\t", "\u21e5")
    return shown if len(shown) <= length else shown[: length - 1] + "\u2026"


def signed(number: float | None) -> str:
    """A number with its sign and two decimals, such as `"+0.25"`; `"-"` for `None`."""
    return "-" if number is None else f"{number:+z.2f}"


def plain(number: float | None) -> str:
    """A number with at most four significant digits, such as `"0.25"`; `"-"` for `None`."""
    return "-" if number is None else f"{number:.4g}"


def depths(nodes: list[dict[str, Any]]) -> list[int]:
    """Steps from the root to each node."""
    levels = [0]
    for node in nodes[1:]:
        levels.append(levels[node["parent"]] + 1)
    return levels


def shade(node: dict[str, Any]) -> float:
    """Colour from -1 to 1: a terminal node's outcome, else `tanh` of the value; 0 where nothing is known."""
    known = (node["outcome"] or 0.0) if node["terminal"] else math.tanh(node["value"])
    return 0.0 if math.isnan(known) else max(-1.0, min(1.0, known))


def verdict(node: dict[str, Any]) -> str:
    """`"correct"`, `"wrong"`, `"unscored"`, or `"cut off"` where a limit ended a completion before a right answer."""
    if node["outcome"] is None:
        return "unscored"
    if node["outcome"] > 0:
        return "correct"
    return "wrong" if node["finished"] else "cut off"


def outcome(node: dict[str, Any]) -> str:
    """What was backed up from a completion, such as `"+1"`; empty where it was not scored."""
    return "" if node["outcome"] is None else f"{node['outcome']:+.3g}"


# ------------------------------------------------------------------------------------------------------------ terminal


class _NarrowTree(Tree):
    """Two columns per level instead of four, so that deep trees leave room for their text."""

    ASCII_GUIDES = ("  ", "| ", "+ ", "` ")
    TREE_GUIDES = [("  ", "\u2502 ", "\u251c ", "\u2514 ")] * 3


def text_tree(record: dict[str, Any]) -> Tree:
    """A tree as lines for a terminal, one per node; [`LEGEND`] says what the letters mean."""
    branches: list[Tree] = []
    for index, node in enumerate(record["nodes"]):
        line = _line(index, node, record)
        branches.append(_NarrowTree(line) if node["parent"] is None else branches[node["parent"]].add(line))
    return branches[0]


_PLAIN = "not bold default"  # what a line's first colour would style otherwise


def _line(index: int, node: dict[str, Any], record: dict[str, Any]) -> Text:
    is_root = index == 0
    colour = _terminal_colour(shade(node))
    # Text, not str: rich reads a str as its own markup
    line = Text(f"#{index}", style=f"bold {colour}")
    line.append(f" i{node['iteration']} ", style=f"dim {_PLAIN}")
    text = record["prompt"] if is_root else node["text"]
    line.append(f'"{short_text(text, 48)}"', style=_PLAIN)  # quotes show spaces at either end, and empty text
    line.append(f"  {record['prompt_tokens'] if is_root else node['tokens']} tok", style=f"dim {_PLAIN}")
    line.append(f"  N {node['visits']} V {signed(node['value'])} Q {signed(node['q'])}", style="not bold")
    if node["entropy"] is not None:
        line.append(f" H {node['entropy']:.2f}", style=f"dim {_PLAIN}")
    if node["terminal"]:
        line.append(f"  {verdict(node)} {outcome(node)}".rstrip())
        line.append(f" reward {plain(node['reward'])}", style=_PLAIN)
    if node["direct"]:
        line.append(" direct", style=f"italic {_PLAIN}")
    if node["result"] is not None:
        line.append(f" *row {node['result']}", style="default")
    return line


def _terminal_colour(strength: float) -> str:
    end = _TERMINAL_GREEN if strength > 0 else _TERMINAL_RED
    mixed = (round(grey + abs(strength) * (hue - grey)) for grey, hue in zip(_TERMINAL_GREY, end, strict=True))
    return f"rgb({','.join(map(str, mixed))})"


# ---------------------------------------------------------------------------------------------------------------- HTML


def html_page(record: dict[str, Any]) -> str:
    """A tree as one HTML file that loads nothing, and whose policy allows no script but its own."""
    nodes = record["nodes"]
    depth = max(depths(nodes))
    endings = [verdict(node) for node in nodes if node["terminal"]]
    counts = [(name, endings.count(name)) for name in ("correct", "wrong", "cut off", "unscored")]
    trained = _leads_to_training(nodes)
    rows = [
        _page_row(index, record) | {"is_inner": is_inner, "closes": closes, "trained": trained[index]}
        for index, is_inner, closes in _reading_order(nodes)
    ]
    return render_page(
        {
            "step": record["step"],
            "index": record["index"],
            "prompt": visible_text(record["prompt"]),
            "facts": {
                "Prompt tokens": record["prompt_tokens"],
                "Iterations": record["iterations"],
                "Search ended": short_text(record["reason"], 60),
                "Generated tokens": record["generated_tokens"],
                "Nodes": len(nodes),
                "Depth": depth,
                "Completions": ", ".join(f"{count} {name}" for name, count in counts if count) or "none",
                "Training rows": sum(node["result"] is not None for node in nodes),
                "Success ratio": plain(record["success_ratio"]),
                "Baseline": plain(record["baseline"]),
            },
            # 340 pixels for all levels together, so that the deepest text keeps its place beside the numbers
            "indent": round(max(3.0, min(18.0, 340.0 / max(depth, 1))), 1),
            # room for the reward functions' own values
            "reward_width": 9.5 if any(row["rewards"] for row in rows) else 4.2,
            "red": " ".join(map(str, _PAGE_RED)),
            "green": " ".join(map(str, _PAGE_GREEN)),
            "rows": rows,
        }
    )


def _page_row(index: int, record: dict[str, Any]) -> dict[str, Any]:
    node = record["nodes"][index]
    text = record["prompt"] if index == 0 else node["text"]
    rewards = [] if node["rewards"] is None else node["rewards"]
    strength = shade(node)
    return {
        "number": index,
        "iteration": node["iteration"],
        "text": visible_text(text),
        "is_blank": not text.strip(),
        "tokens": record["prompt_tokens"] if index == 0 else node["tokens"],
        "visits": node["visits"],
        "value": signed(node["value"]),
        "q": signed(node["q"]),
        "credit": signed(node["credit"]),
        "entropy": "-" if node["entropy"] is None else f"{node['entropy']:.2f}",
        "verdict": verdict(node) if node["terminal"] else "",
        "outcome": outcome(node),
        "reward": plain(node["reward"]) if node["terminal"] else "",
        "rewards": ", ".join(plain(r) for r in rewards) if len(rewards) > 1 else "",
        "direct": node["direct"],
        "result": node["result"],
        "is_good": strength > 0,
        "strength": f"{abs(strength):.3f}",
        "value_strength": f"{abs(shade(node | {'terminal': False})):.3f}",
    }


def _reading_order(nodes: list[dict[str, Any]]) -> Iterator[tuple[int, bool, int]]:
    """Nodes from top to bottom: index, whether it has children, and how many of its ancestors end with it."""
    levels = depths(nodes)
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes[1:], start=1):
        children[node["parent"]].append(index)
    stack = [0]  # no recursion: a tree may be deeper than Python's stack
    while stack:
        index = stack.pop()
        stack.extend(reversed(children[index]))
        level_after = levels[stack[-1]] if stack else 0
        yield index, bool(children[index]), 0 if children[index] else levels[index] - level_after


def _leads_to_training(nodes: list[dict[str, Any]]) -> list[bool]:
    leads = [node["result"] is not None for node in nodes]
    for index in range(len(nodes) - 1, 0, -1):  # children come after their parents
        leads[nodes[index]["parent"]] |= leads[index]
    return leads

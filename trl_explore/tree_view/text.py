"""Views of a dumped search tree: lines in a terminal, and an HTML file.

Prompts and completions are untrusted, because a model may write markup, scripts or terminal escape sequences. The
views escape them, so that they appear as plain text.
"""

import math
from collections.abc import Iterator
from typing import Any

from rich.text import Text
from rich.tree import Tree

from trl_explore.tree_view.page import render_page
from trl_explore.visible_text import visible_text

# Colours close to the named colours of terminals, because some terminals have only 16.
_TERMINAL_RED, _TERMINAL_GREY, _TERMINAL_GREEN = (225, 10, 30), (138, 138, 138), (0, 170, 0)
# Colours of the page. They also differ in lightness and blue, for readers who cannot distinguish red and green.
_PAGE_RED, _PAGE_GREEN = (214, 69, 48), (24, 158, 104)

LEGEND = (
    "# node  i iteration that sampled it  N visits  V value backed up  Q = V/N  H mean token entropy in nats  "
    "* training row"
)


# ---------------------------------------------------------------------------------------------------- text and numbers


def short_text(text: str, length: int) -> str:
    """
    Shorten an untrusted text to one line.

    Args:
        text (`str`):
            The text.
        length (`int`):
            Maximum number of characters.

    Returns:
        `str`: The start of the text, with arrows for newlines and tabs, and an ellipsis if characters were left out.
    """
    shown = visible_text(text[: length + 1]).replace("\n", "\u21b5").replace("\t", "\u21e5")
    if len(shown) > length:
        shown = shown[: length - 1] + "\u2026"
    return shown


def signed(number: float | None) -> str:
    """Format a number with its sign and two decimals, such as `"+0.25"`, or `None` as `"-"`."""
    if number is None:
        return "-"
    return f"{number:+z.2f}"


def plain(number: float | None) -> str:
    """Format a number with at most four significant digits, such as `"0.25"`, or `None` as `"-"`."""
    if number is None:
        return "-"
    return f"{number:.4g}"


def depths(nodes: list[dict[str, Any]]) -> list[int]:
    """Return the number of steps from the root to each node."""
    levels = [0]
    for node in nodes[1:]:
        levels.append(levels[node["parent"]] + 1)
    return levels


def worth(node: dict[str, Any]) -> float | None:
    """Return the outcome that the search backed up from a completion. With graded rewards, it is on the scale of the
    tree's rewards. None if the completion was not scored."""
    return node.get("worth", node["outcome"])  # older dumps have only the outcome


def shade(node: dict[str, Any]) -> float:
    """Return a number from -1 (red) to 1 (green): [`worth`] of a terminal node, or else `tanh` of the node's value.
    Return 0 if it is unknown."""
    if node["terminal"]:
        strength = worth(node) or 0.0
    else:
        strength = math.tanh(node["value"])
    if math.isnan(strength):
        return 0.0
    return max(-1.0, min(1.0, strength))


def verdict(node: dict[str, Any]) -> str:
    """Return `"correct"`, `"wrong"`, `"unscored"`, or `"cut off"` for a truncated completion that is not correct."""
    if node["outcome"] is None:
        return "unscored"
    if node["outcome"] > 0:
        return "correct"
    if node["finished"]:
        return "wrong"
    return "cut off"


def outcome(node: dict[str, Any]) -> str:
    """Format [`worth`] of a completion, such as `"+1"`. Empty if it was not scored."""
    value = worth(node)
    if value is None:
        return ""
    return f"{value:+.3g}"


def _text_and_tokens(index: int, record: dict[str, Any]) -> tuple[str, int]:
    """Return the text of a node and its number of tokens. The text of the root is the prompt."""
    if index == 0:
        return record["prompt"], record["prompt_tokens"]
    node = record["nodes"][index]
    return node["text"], node["tokens"]


# ------------------------------------------------------------------------------------------------------------ terminal


class _NarrowTree(Tree):
    """Tree with two columns per level instead of four, so that deep nodes have space for their text."""

    ASCII_GUIDES = ("  ", "| ", "+ ", "` ")
    # rich has guides for normal, bold and double-underlined lines. Use the same guides for all three.
    TREE_GUIDES = [("  ", "\u2502 ", "\u251c ", "\u2514 ")] * 3


def text_tree(record: dict[str, Any]) -> Tree:
    """
    Show a tree in a terminal.

    Args:
        record (`dict[str, Any]`):
            A tree of [`~trl_explore.tree_view.files.read_trees`].

    Returns:
        `rich.tree.Tree`: One line per node. [`LEGEND`] explains the letters.
    """
    branches: list[Tree] = []
    for index, node in enumerate(record["nodes"]):
        line = _line(index, record)
        if node["parent"] is None:
            branches.append(_NarrowTree(line))
        else:
            branches.append(branches[node["parent"]].add(line))
    return branches[0]


_PLAIN = "not bold default"  # resets the style of a line's first part, which would apply to the whole line


def _line(index: int, record: dict[str, Any]) -> Text:
    """Return the line of a node in the terminal."""
    node = record["nodes"][index]
    text, tokens = _text_and_tokens(index, record)
    # rich would parse a str as its own markup, so build a Text.
    line = Text(f"#{index}", style=f"bold {_terminal_colour(shade(node))}")
    line.append(f" i{node['iteration']} ", style=f"dim {_PLAIN}")
    line.append(f'"{short_text(text, 48)}"', style=_PLAIN)  # quotes make spaces and empty texts visible
    line.append(f"  {tokens} tok", style=f"dim {_PLAIN}")
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
    """Return a mixture of grey and green (if `strength` is positive) or red."""
    end = _TERMINAL_RED
    if strength > 0:
        end = _TERMINAL_GREEN
    mixed = []
    for grey, hue in zip(_TERMINAL_GREY, end, strict=True):
        mixed.append(str(round(grey + abs(strength) * (hue - grey))))
    return f"rgb({','.join(mixed)})"


# ---------------------------------------------------------------------------------------------------------------- HTML


def html_page(record: dict[str, Any]) -> str:
    """
    Render a tree as an HTML file, which loads no other files and allows no other script than its own.

    Args:
        record (`dict[str, Any]`):
            A tree of [`~trl_explore.tree_view.files.read_trees`].

    Returns:
        `str`: HTML.
    """
    nodes = record["nodes"]
    depth = max(depths(nodes))
    endings = [verdict(node) for node in nodes if node["terminal"]]
    counts = []
    for name in ("correct", "wrong", "cut off", "unscored"):
        if name in endings:
            counts.append(f"{endings.count(name)} {name}")
    trained = _leads_to_training(nodes)
    rows = []
    for index, is_inner, closes in _reading_order(nodes):
        row = _page_row(index, record)
        rows.append(row | {"is_inner": is_inner, "closes": closes, "trained": trained[index]})
    reward_width = 4.2  # in rem
    if any(row["rewards"] for row in rows):
        reward_width = 9.5  # space for the rewards of the single functions
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
                "Completions": ", ".join(counts) or "none",
                "Training rows": sum(node["result"] is not None for node in nodes),
                "Success ratio": plain(record["success_ratio"]),
                "Baseline": plain(record["baseline"]),
            },
            # Pixels per level. All levels together take at most 340 pixels, so that the deepest text does not overlap
            # the numbers. In trees with more than 113 levels they take more, because a level needs 3 pixels.
            "indent": round(max(3.0, min(18.0, 340.0 / max(depth, 1))), 1),
            "reward_width": reward_width,
            "red": " ".join(map(str, _PAGE_RED)),
            "green": " ".join(map(str, _PAGE_GREEN)),
            "rows": rows,
        }
    )


def _page_row(index: int, record: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the page's template for a node."""
    node = record["nodes"][index]
    text, tokens = _text_and_tokens(index, record)
    strength = shade(node)
    value_strength = shade(node | {"terminal": False})  # of the value, even if the node has an outcome
    ending = reward = rewards = ""
    if node["terminal"]:
        ending, reward = verdict(node), plain(node["reward"])
    if node["rewards"] is not None and len(node["rewards"]) > 1:
        rewards = ", ".join(plain(value) for value in node["rewards"])
    entropy = "-"
    if node["entropy"] is not None:
        entropy = f"{node['entropy']:.2f}"
    return {
        "number": index,
        "iteration": node["iteration"],
        "text": visible_text(text),
        "is_blank": not text.strip(),
        "tokens": tokens,
        "visits": node["visits"],
        "value": signed(node["value"]),
        "q": signed(node["q"]),
        "credit": signed(node["credit"]),
        "entropy": entropy,
        "verdict": ending,
        "outcome": outcome(node),
        "reward": reward,
        "rewards": rewards,
        "direct": node["direct"],
        "result": node["result"],
        "is_good": strength > 0,
        "strength": f"{abs(strength):.3f}",
        "value_strength": f"{abs(value_strength):.3f}",
    }


def _reading_order(nodes: list[dict[str, Any]]) -> Iterator[tuple[int, bool, int]]:
    """
    Yield the nodes from top to bottom of the page.

    Yields:
        `tuple[int, bool, int]`: Index of the node; True if it has children; and the number of HTML elements that end
        after the node. The element of an inner node also contains its descendants, so it ends after the last of them.
    """
    levels = depths(nodes)
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes[1:], start=1):
        children[node["parent"]].append(index)
    stack = [0]  # a tree may be too deep for recursion
    while stack:
        index = stack.pop()
        stack.extend(reversed(children[index]))
        closes = 0
        if not children[index]:
            closes = levels[index]
            if stack:
                closes -= levels[stack[-1]]
        yield index, bool(children[index]), closes


def _leads_to_training(nodes: list[dict[str, Any]]) -> list[bool]:
    """Return for each node whether it or a node below it is a training row."""
    leads = [node["result"] is not None for node in nodes]
    for index in range(len(nodes) - 1, 0, -1):  # children come after their parents
        leads[nodes[index]["parent"]] |= leads[index]
    return leads

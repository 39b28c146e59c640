"""
One picture per method: where the rows of a generation batch come from, and which of their tokens get credit.

    python docs/make_diagrams.py          # writes docs/images/<method>-light.svg and -dark.svg

A picture is a list of rows. The tokens of a row are letters: `+` and `-` are trained, with much credit above or below
0, `>` and `<` with little; `p` is read but not trained; `o` was sampled and is not trained; `t` was shown by a tool,
`s` is a sketch; a capital is a state that the environment showed. `|` is a small gap, a space an empty place.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
WIDTH, START, CELL, BAR, STEP, CAPTION = 780, 118, 12, 14, 30, 500
THEMES = {
    "light": {
        "ink": "#1f2430",
        "muted": "#5b6472",
        "line": "#98a2b3",
        "pale": "#d3dae6",
        "tool": "#f2e9d8",
        "sketch": "#e6dcf5",
        "up": "#0072b2",
        "little_up": "#7fb8d8",
        "down": "#d55e00",
        "little_down": "#f0b48c",
        "right": "#1a7f37",
        "wrong": "#b42318",
        "mark": "#ffffff",
    },
    "dark": {
        "ink": "#e6e8ee",
        "muted": "#a4adbb",
        "line": "#717c8f",
        "pale": "#4a5365",
        "tool": "#574b35",
        "sketch": "#4d3f66",
        "up": "#56b4e9",
        "little_up": "#2f6c91",
        "down": "#ee8136",
        "little_down": "#8a4a20",
        "right": "#2f9e4d",
        "wrong": "#e0564a",
        "mark": "#ffffff",
    },
}
FILLS = {"+": "up", ">": "little_up", "-": "down", "<": "little_down", "p": "pale", "t": "tool", "s": "sketch"}
MEANINGS = {
    "+": "trained, credit above 0",
    "-": "trained, credit below 0",
    ">": "the same, little credit",
    "p": "shared prefix, not trained",
    "o": "sampled, not trained",
    "t": "shown by a tool, not trained",
    "s": "sketch, not trained",
    "S": "state",
}


class Picture:
    """Elements of an SVG in the colours of a theme; rows are numbered from 0."""

    def __init__(self, theme: str, what: str, extra: int = 0) -> None:
        self.colors, self.what = THEMES[theme], what
        self.elements: list[str] = []
        self.used: dict[str, None] = {}
        self.places: list[list[float]] = []  # of each row: where its tokens begin, and where it ends
        self.top = 34 + extra

    def add(self, tag: str, text: str = "", **attributes: object) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.elements.append(f"<{tag}{given}>{text}</{tag}>" if text else f"<{tag}{given}/>")

    def text(self, x: float, y: float, words: str, color: str = "ink", **attributes: object) -> None:
        self.add("text", words, x=x, y=y, fill=self.colors[color], **attributes)

    def y(self, row: float) -> float:
        """The middle of a row."""
        return self.top + row * STEP

    def cell(self, kind: str, x: float, y: float) -> None:
        colors, place = self.colors, {"x": x, "y": y - BAR / 2, "width": CELL - 1, "height": BAR, "rx": 2}
        key = "S" if kind.isupper() else {"<": ">"}.get(kind, kind)
        self.used.setdefault(key)
        if kind == "o":
            self.add("rect", **place, fill="none", stroke=colors["line"], stroke_dasharray="2 2")
        elif kind.isupper():
            self.add("rect", **place, fill=colors["tool"], stroke=colors["line"])
            self.text(x + (CELL - 1) / 2, y + 4, kind, text_anchor="middle", font_size=11, font_weight="bold")
        else:
            self.add("rect", **place, fill=colors[FILLS[kind]])

    def row(
        self,
        tokens: str,
        *,
        right: bool | None = None,
        fork: tuple[int, int] | None = None,
        label: str = "",
        answer: str = "",
    ) -> None:
        """The next row. It leaves the prompt, or `fork`: a row, and the token before which it leaves that row."""
        x, y, places = float(START), self.y(len(self.places)), []
        if fork is None:
            self.curve(78, self.top, x - 4, y)
        else:
            above, at = self.y(fork[0]) + BAR / 2, self.places[fork[0]][fork[1]] - 0.5
            self.add(
                "path",
                d=f"M{at} {above}V{y - 4}q0 4 4 4",
                fill="none",
                stroke=self.colors["line"],
                stroke_width=1.5,
            )
        for kind in tokens:
            if kind == "|":
                x += CELL / 3
            else:
                if kind != " ":
                    self.cell(kind, x, y)
                places.append(x)
                x += CELL
        if answer:
            self.add("rect", x=x + 3, y=y - 8, width=18, height=16, rx=3, fill="none", stroke=self.colors["ink"])
            self.text(x + 12, y + 4, answer, text_anchor="middle", font_size=12)
            x += 24
        if right is not None:
            self.end_mark(x + 11, y, right)
            x += 22
        self.text(x + 6, y + 4, label, "muted", font_size=12)
        self.places.append([*places, x])

    def curve(self, x: float, y: float, to_x: float, to_y: float) -> None:
        middle = (x + to_x) / 2
        self.add(
            "path",
            d=f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}",
            fill="none",
            stroke=self.colors["line"],
            stroke_width=1.5,
        )

    def end_mark(self, x: float, y: float, right: bool) -> None:
        shape = "M-3.5 0l2.5 3 4.5 -6" if right else "M-3 -3l6 6M3 -3l-6 6"
        self.add("circle", cx=x, cy=y, r=8, fill=self.colors["right" if right else "wrong"])
        self.add(
            "path",
            d=shape,
            transform=f"translate({x} {y})",
            fill="none",
            stroke=self.colors["mark"],
            stroke_width=1.8,
            stroke_linecap="round",
        )

    def pointer(self, row: int, token: float) -> None:
        """A triangle above the place where a row is left."""
        x, y = self.places[row][token] - 0.5, self.y(row) - BAR / 2 - 1
        self.add("path", d=f"M{x} {y}l-4 -7h8z", fill=self.colors["ink"])

    def caption(self, first: int, last: int, *lines: str) -> None:
        """What is to be said of some rows, behind a bracket."""
        top, bottom = self.y(first) - 9, self.y(last) + 9
        path = f"M{CAPTION - 8} {top}h4V{bottom}h-4"
        self.add("path", d=path, fill="none", stroke=self.colors["line"], stroke_width=1.5)
        y = (top + bottom) / 2 + 4 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(CAPTION + 4, y + 16 * i, line, font_size=12.5)

    def arrow(self, row: int, token: int, words: str) -> None:
        """From a token of a row to the same of the next."""
        x, top, bottom = self.places[row][token], self.y(row) + BAR / 2 + 1, self.y(row + 1) - BAR / 2 - 2
        self.add("path", d=f"M{x} {top}V{bottom}m-3 -4l3 4l3 -4", fill="none", stroke=self.colors["ink"])
        self.text(x + 8, (top + bottom) / 2 + 4, words, "muted", font_size=10.5)

    def dial(self, x: float, y: float, angle: float) -> None:
        """A direction, in degrees from the right."""
        self.add("circle", cx=x, cy=y, r=10, fill="none", stroke=self.colors["line"])
        arrow = "M-6 0H6m-4 -3l4 3l-4 3"
        turn = f"translate({x} {y}) rotate({-angle})"
        self.add("path", d=arrow, transform=turn, fill="none", stroke=self.colors["ink"], stroke_width=1.5)

    def bars(self, row: int, heights: Sequence[int]) -> None:
        """A number for every token, above it."""
        for x, height in zip(self.places[row], heights, strict=False):
            color = self.colors["ink" if height > 5 else "line"]
            self.add("rect", x=x + 3, y=self.y(row) - BAR / 2 - 2 - height, width=5, height=height, fill=color)

    def arc(self, row: int, token: int, to: int, weak: bool = False) -> None:
        """Attention of a token to an earlier one."""
        x, end, y = self.places[row][token], self.places[row][to], self.y(row) - BAR / 2 - 2
        path = f"M{x} {y}C{x} {y - 24} {end} {y - 24} {end} {y}"
        color, width = ("line", 1) if weak else ("ink", 1.8)
        self.add("path", d=path, fill="none", stroke=self.colors[color], stroke_width=width)

    def link(self, *places: tuple[int, int]) -> None:
        """A line through the tokens of several rows, and a ring around each."""
        points = [(self.places[row][token] + (CELL - 1) / 2, self.y(row)) for row, token in places]
        for (x, y), (to_x, to_y) in zip(points, points[1:], strict=False):
            path = f"M{x} {y + 10}C{x} {y + 20} {to_x} {to_y - 20} {to_x} {to_y - 10}"
            self.add("path", d=path, fill="none", stroke=self.colors["ink"], stroke_width=1.5)
        for x, y in points:
            self.add("circle", cx=x, cy=y, r=10, fill="none", stroke=self.colors["ink"], stroke_width=1.5)

    def note(self, words: str) -> None:
        """A sentence below the rows."""
        self.places.append([])
        self.text(10, self.y(len(self.places) - 1) + 2, words, font_size=12.5)

    def legend(self, more: Sequence[str], symbol: str) -> float:
        """What the letters that occurred mean, below the rows; the height of the picture."""
        x, y = 10.0, self.y(len(self.places)) + 8
        self.add("path", d=f"M10 {y - 16}H{WIDTH - 10}", stroke=self.colors["line"], stroke_width=0.5)
        entries = [(kind, MEANINGS[kind]) for kind in MEANINGS if kind in self.used]
        for kind, words in [*entries, ("end", "success"), *((symbol, words) for words in more)]:
            width = 36 + 6.1 * len(words) + {"end": 78, ">": CELL}.get(kind, 0)
            if x + width > WIDTH:
                x, y = 10.0, y + 22
            if kind == "end":
                self.end_mark(x + 8, y, True)
                self.end_mark(x + 88, y, False)
                self.text(x + 102, y + 4, "failure", "muted", font_size=12)
            elif kind == "pointer":
                self.add("path", d=f"M{x + 8} {y + 4}l-4 -7h8z", fill=self.colors["ink"])
            elif kind == "dial":
                self.dial(x + 8, y, 30)
            else:
                self.cell(kind, x + 4, y)
            self.text(x + (34 if kind == ">" else 22), y + 4, words, "muted", font_size=12)
            if kind == ">":
                self.cell("<", x + 4 + CELL, y)
            x += width
        return y + 18

    def svg(self, *more: str, symbol: str = "pointer") -> str:
        self.add("rect", x=10, y=self.top - 12, width=68, height=24, rx=4, fill=self.colors["pale"])
        self.text(44, self.top + 4.5, "prompt", text_anchor="middle", font_size=13)
        height = self.legend(more, symbol)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, f"<title>{self.what}</title>", *self.elements, "</svg>"]) + "\n"


def deep_grpo(theme: str) -> str:
    p = Picture(theme, "DEEP-GRPO: branches from a pivot inside a failed completion")
    p.row(">>>>>>>>>>>>>>>>>>", right=True)
    p.row(">>>>>>>>>>>>>>>>>>>>", right=True)
    p.row("------------------", right=False)
    p.pointer(2, 11)
    p.row("ppppppppppp+++++++", right=True, fork=(2, 11))
    p.row("ppppppppppp<<<<<", right=False, fork=(2, 11))
    p.row("ppppppppppp<<<<<<<<", right=False, fork=(2, 11))
    p.caption(0, 2, "GRPO's samples, GRPO's loss:", "credit against the group")
    p.caption(3, 5, "branches, a second loss:", "credit against the siblings,", "on the new tokens only")
    return p.svg("pivot: drawn among the starts of segments")


def tree_grpo(theme: str) -> str:
    p = Picture(theme, "TreeGRPO: the rows are paths of a search tree")
    p.row(">>>>|++++|++++", right=True)
    p.row("    |    |<<<<", right=False, fork=(0, 8))
    p.row("    |    |oooo", fork=(0, 8), label="no end yet")
    p.row("    |oooo", fork=(0, 4))
    p.row("----|----|----", right=False)
    p.row("    |oooo", fork=(4, 4))
    p.row("oooo")
    p.caption(0, 3, "a node is a chunk of tokens;", "the search samples its children", "and goes on at the best node")
    p.caption(4, 6, "credit of a node: its value", "minus the mean outcome of the tree")
    p.note("Training rows are the paths that ended; a node that several rows share is trained in each of them.")
    return p.svg()


def sesa(theme: str) -> str:
    p = Picture(theme, "SESA: sketches in turn, then a completion for each")
    p.row("ssssss|++++++++++++++", right=True)
    p.row("ssssss|<<<<<<<<<<<<<", right=False)
    p.row("ssssss|<<<<<<<<<<<<<<<", right=False)
    p.row("<<<<<<<<<<<<<<", right=False)
    for row in range(2):
        p.arrow(row, 3, "shown to the next")
    p.caption(
        0,
        2,
        "sketches are drafted in turn,",
        "each asked to differ from those before;",
        "a completion follows its sketch",
    )
    p.caption(3, 3, "a plain sample (max_trajectories)")
    p.note("All completions are trained under the prompt alone, with GRPO's credit.")
    return p.svg()


def g2rl(theme: str) -> str:
    p = Picture(theme, "G2RL: credit grows with how far a gradient points away from the others")
    for tokens, right, angle in (
        (">>>>>>>>>>>>>>>>", True, -28),
        (">>>>>>>>>>>>>>>>>>", True, -18),
        ("++++++++++++++++", True, 80),
        ("<<<<<<<<<<<<<<<", False, -36),
        ("-----------------", False, -150),
    ):
        p.row(tokens, right=right)
        p.dial(p.places[-1][-1] + 18, p.y(len(p.places) - 1), angle)
    p.caption(0, 1, "like gradients: little novelty,", "the reward stays near +1")
    p.caption(2, 2, "a success in a direction of its own")
    p.caption(3, 4, "failures: near -1, or lower", "the more novel they are")
    return p.svg("direction of a completion's gradient", symbol="dial")


def branpo(theme: str) -> str:
    p = Picture(theme, "BranPO: other endings of an agent's trajectory")
    p.row("<<<<tt|<<<<tt|----tt|----", right=False)
    p.pointer(0, 12)
    p.pointer(0, 18)
    p.row("pppptt|pppptt|pppptt|ooo", right=False, fork=(0, 18))
    p.row("pppptt|pppptt|++++tt|+++", right=True, fork=(0, 12))
    p.row(">>>>tt|>>>>tt|++++", right=True)
    p.caption(0, 0, "an initial trajectory, split at the fork")
    p.caption(1, 1, "the same outcome: dropped")
    p.caption(2, 2, "the other outcome: kept")
    p.caption(3, 3, "no branch kept: split before the end")
    p.note("Prefix: mean reward of both endings, against other prefixes. Ending: its own, against all endings.")
    return p.svg("a branch starts before a response")


def agent_tree_grpo(theme: str) -> str:
    p = Picture(theme, "Tree-GRPO: trajectories grow into trees, compared twice")
    p.row("----tt|----tt|----", right=False)
    p.row("++++tt|++++tt|++++", right=True, fork=(0, 6))
    p.row("----tt|---", right=False, fork=(0, 0))
    p.row(">>>>tt|>>>>tt|>>>>", right=True)
    p.row(">>>>tt|>>>>tt|>>>", right=True, fork=(3, 12))
    p.pointer(0, 6)
    p.pointer(0, 0)
    p.pointer(3, 12)
    p.caption(0, 2, "a tree: leaves with different rewards,", "compared in the tree and in the prompt")
    p.caption(3, 4, "a tree: leaves with the same reward,", "compared in the prompt only")
    p.note("All rows are trained whole: turns that rows share are trained once per row.")
    return p.svg("a random node, from which a branch is sampled")


def gigpo(theme: str) -> str:
    p = Picture(theme, "GiGPO: steps from the same state are compared")
    p.row("A++++B++++C+++", right=True)
    p.row("A>>>>D>>>>B>>>>C>>>", right=True)
    p.row("A<<<<B----D---", right=False)
    p.link((0, 5), (1, 10), (2, 5))
    p.caption(
        0, 2, "steps from state B are a group:", "credit of the step, added to", "GRPO's credit of the trajectory"
    )
    p.note("A later success is discounted: the shorter way from a state gets more.")
    return p.svg()


def evol_rl(theme: str) -> str:
    p = Picture(theme, "EVOL-RL: the majority is right, and unusual reasoning gets more")
    p.row(">>>>>>>>>>>>>>>>", answer="7", right=True)
    p.row(">>>>>>>>>>>>>>>>>", answer="7", right=True)
    p.row("++++++++++++++", answer="7", right=True)
    p.row("----------------", answer="3", right=False)
    p.row("<<<<<<<<<<<<<<<<<<", answer="5", right=False)
    p.caption(0, 1, "right: the answer of most;", "texts alike, reward towards 0.5")
    p.caption(2, 2, "right and unlike the others: towards 1")
    p.caption(3, 4, "wrong: another answer; from -1", "to -0.5, the more novel the higher")
    return p.svg()


def tree_rl(theme: str) -> str:
    p = Picture(theme, "TreeRL: forks at the least certain tokens, credit by the leaves of a node")
    p.row("<<<<<<|<<<<<|-------", right=False)
    p.bars(0, (2, 3, 1, 2, 4, 1, 9, 2, 3, 1, 2, 9, 3, 1, 2, 4, 1, 2))
    p.row("<<<<<<|++++++++", right=True, fork=(0, 6))
    p.row("<<<<<<|------", right=False, fork=(0, 6))
    p.row("<<<<<<|<<<<<|+++++", right=True, fork=(0, 11))
    p.row("<<<<<<|<<<<<|------", right=False, fork=(0, 11))
    p.row("++++++++++++++++++", right=True)
    p.caption(0, 0, "a chain; bars: -log p of its tokens")
    p.caption(
        1,
        4,
        "branches from its two least",
        "certain tokens, trained whole:",
        "a shared stretch has the same",
        "credit in all of them",
    )
    p.caption(5, 5, "a second chain, forked likewise")
    return p.svg()


def attn_rl(theme: str) -> str:
    p = Picture(theme, "AttnRL: forks at steps that later steps attend to", 26)
    p.row("<<<<|<<<<|----|----|----", right=False)
    p.arc(0, 14, 9)
    p.arc(0, 18, 10)
    p.arc(0, 13, 5, weak=True)
    p.pointer(0, 8)
    p.row("<<<<|<<<<|++++|+++", right=True, fork=(0, 8))
    p.row("<<<<|<<<<|----|----|--", right=False, fork=(0, 8))
    p.row("++++|++++|++++|++++", right=True)
    p.caption(0, 0, "a chain, cut into steps; arcs: attention")
    p.caption(1, 2, "branches from the step that is", "attended to most, trained whole")
    p.caption(3, 3, "fewer chains of easy prompts are forked")
    return p.svg("start of the forked step")


def auto(theme: str) -> str:
    p = Picture(theme, "Auto: an explorer for each unsolved prompt, or none")
    p.row(">>>>>>>>>>>>>>", right=True)
    p.row("<<<<<<<<<<<<<<<<", right=False)
    p.row("oooooooooooooooo", right=False)
    p.row("oooooooooooooo", right=False)
    p.row("++++|++++|++++", right=True)
    p.row("    |----|----", right=False, fork=(4, 4))
    p.row("oooo")
    p.caption(0, 1, "a prompt with contrast:", "GRPO only, never explored")
    p.caption(2, 3, "an unsolved prompt: all rewards equal,", "so GRPO's credit is 0")
    p.caption(4, 6, "the explorer that the trainer chose,", "here a tree, adds rows to the batch")
    p.note("Choices: each explorer, or no exploration. The estimate: groups with contrast per generated token.")
    return p.svg()


PICTURES: dict[str, Callable[[str], str]] = {
    draw.__name__: draw
    for draw in (
        deep_grpo,
        tree_grpo,
        sesa,
        g2rl,
        branpo,
        agent_tree_grpo,
        gigpo,
        evol_rl,
        tree_rl,
        attn_rl,
        auto,
    )
}


def draw() -> dict[str, str]:
    """All files by name."""
    return {f"{name}-{theme}.svg": picture(theme) for name, picture in PICTURES.items() for theme in THEMES}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in draw().items():
        (folder / name).write_text(text)

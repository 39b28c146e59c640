"""
One picture per method: where the rows of a generation batch come from, and which of their tokens get credit.

    python docs/make_diagrams.py          # writes docs/images/<method>-light.svg and -dark.svg

A picture is a list of rows. The tokens of a row are letters: `+` and `-` are trained, with much credit above or below 0,
`>` and `<` with little; `p` is read but not trained; `o` was sampled and is not trained; `t` was shown by a tool, `s` is
a sketch; a capital is a state that the environment showed. `|` is a small gap, a space an empty place.
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
        self.ends: list[float] = []
        self.top = 34 + extra

    def add(self, tag: str, text: str = "", **attributes: object) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.elements.append(f"<{tag}{given}>{text}</{tag}>" if text else f"<{tag}{given}/>")

    def text(self, x: float, y: float, words: str, color: str = "ink", **attributes: object) -> None:
        self.add("text", words, x=x, y=y, fill=self.colors[color], **attributes)

    def y(self, row: float) -> float:
        """The middle of a row."""
        return self.top + row * STEP

    def x(self, token: float) -> float:
        """Where a token of a row begins."""
        return START + token * CELL

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
        number = len(self.ends)
        x, y = self.x(0), self.y(number)
        if fork is None:
            self.curve(78, self.top, x - 4, y)
        else:
            above, at = self.y(fork[0]) + BAR / 2, self.x(fork[1]) - 0.5
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
                x += CELL
        if answer:
            self.add("rect", x=x + 3, y=y - 8, width=18, height=16, rx=3, fill="none", stroke=self.colors["ink"])
            self.text(x + 12, y + 4, answer, text_anchor="middle", font_size=12)
            x += 24
        if right is not None:
            self.end_mark(x + 11, y, right)
            x += 22
        self.text(x + 6, y + 4, label, "muted", font_size=12)
        self.ends.append(x)

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
        x, y = self.x(token) - 0.5, self.y(row) - BAR / 2 - 1
        self.add("path", d=f"M{x} {y}l-4 -7h8z", fill=self.colors["ink"])

    def caption(self, first: int, last: int, *lines: str) -> None:
        """What is to be said of some rows, behind a bracket."""
        top, bottom = self.y(first) - 9, self.y(last) + 9
        path = f"M{CAPTION - 8} {top}h4V{bottom}h-4"
        self.add("path", d=path, fill="none", stroke=self.colors["line"], stroke_width=1.5)
        y = (top + bottom) / 2 + 4 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(CAPTION + 4, y + 16 * i, line, font_size=12.5)

    def legend(self, more: Sequence[str]) -> float:
        """What the letters that occurred mean, below the rows; the height of the picture."""
        x, y = 10.0, self.y(len(self.ends)) + 8
        self.add("path", d=f"M10 {y - 16}H{WIDTH - 10}", stroke=self.colors["line"], stroke_width=0.5)
        entries = [(kind, MEANINGS[kind]) for kind in MEANINGS if kind in self.used]
        for kind, words in [*entries, ("right", "success"), ("wrong", "failure"), *(("pointer", w) for w in more)]:
            width = 26 + 6.4 * len(words) + 14
            if x + width > WIDTH:
                x, y = 10.0, y + 22
            if kind in ("right", "wrong"):
                self.end_mark(x + 8, y, kind == "right")
            elif kind == "pointer":
                self.add("path", d=f"M{x + 8} {y + 4}l-4 -7h8z", fill=self.colors["ink"])
            else:
                self.cell(kind, x + 4, y)
                if kind == ">":
                    self.cell("<", x + 4 + CELL, y)
                    x, width = x + CELL, width
            self.text(x + 22, y + 4, words, "muted", font_size=12)
            x += width
        return y + 18

    def svg(self, *more: str) -> str:
        self.add("rect", x=10, y=self.top - 12, width=68, height=24, rx=4, fill=self.colors["pale"])
        self.text(44, self.top + 4.5, "prompt", text_anchor="middle", font_size=13)
        height = self.legend(more)
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


PICTURES: dict[str, Callable[[str], str]] = {"deep_grpo": deep_grpo}


def draw() -> dict[str, str]:
    """All files by name."""
    return {f"{name}-{theme}.svg": picture(theme) for name, picture in PICTURES.items() for theme in THEMES}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in draw().items():
        (folder / name).write_text(text)

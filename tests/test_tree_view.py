"""Dumped search trees as text and as a web page. Prompts and completions are hostile here."""

import copy
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from trl_explore.cli import main
from trl_explore.tree_view.files import read_trees
from trl_explore.tree_view.text import html_page, outcome, shade, short_text, text_tree, verdict, visible_text

SCRIPT = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
BREAKOUT = '</span></summary></details></main></style><h1>owned</h1>" onclick="alert(1)'
MARKUP = "[bold red]loud[/bold red] [/] [link=https://example.org]x[/link] :smile:"
ESCAPES = "\x1b[31mred\x1b[0m\x1b]0;owned\x07 \x9b2J\x00\x7f\r"
UNICODE = "日本語 مرحبا é \U0001f469\u200d\U0001f467 \u202eexe.gnp \ud800 \u2028 end"
SPACES = "\n\n  two\tthree\n"


def node(index, parent, text="", **fields):
    inner = {
        "index": index,
        "parent": parent,
        "depth": 0,
        "text": text,
        "token_ids": [7] * 5,
        "tokens": 5,
        "visits": 3,
        "value": 0.4,
        "q": 0.1333,
        "credit": 0.38,
        "entropy": None if parent is None else 0.71,
        "terminal": False,
        "finished": False,
        "direct": False,
        "outcome": None,
        "reward": None,
        "rewards": None,
        "iteration": index,
        "result": None,
    }
    return inner | fields


def leaf(index, parent, text="", *, outcome=1.0, finished=True, **fields):
    value = 0.0 if outcome is None else outcome
    scored = {"outcome": outcome, "reward": outcome, "rewards": None if outcome is None else [outcome]}
    backed_up = {"value": value, "q": value, "credit": value}
    return node(index, parent, text, terminal=True, finished=finished, **scored | backed_up | fields)


def tree(nodes, prompt="6a-0b-8=", **fields):
    about = {
        "step": 12,
        "index": 3,
        "prompt": prompt,
        "prompt_tokens": 9,
        "iterations": 14,
        "generated_tokens": 301,
        "success_ratio": 0.25,
        "reason": "complete",
        "baseline": -0.5,
        "results": [n["index"] for n in nodes if n["result"] is not None],
        "nodes": nodes,
    }
    return about | fields


def small_tree(**fields):
    nodes = [
        node(0, None),
        node(1, 0, "a6-0=6;"),
        node(2, 0, "a6-0=1;", value=-0.3, visits=2),
        leaf(3, 1, "b6-8=8;#8", result=0),
        leaf(4, 1, "b6-8=2;#2", outcome=-1.0, visits=0, value=0.0, q=0.0),
        leaf(5, 2, "b1-8=", outcome=-0.5, finished=False, result=1),
        leaf(6, 0, "#", outcome=None, direct=True, result=2),
    ]
    return tree(nodes, **fields)


def chain(length):
    inner = [node(i, i - 1, f"step {i}") for i in range(1, length)]
    return tree([node(0, None), *inner, leaf(length, length - 1, "the end", result=0)])


def hostile_tree():
    texts = [SCRIPT, BREAKOUT, MARKUP, ESCAPES, UNICODE, SPACES, "", " \n"]
    return tree([node(0, None), *(leaf(i, 0, text) for i, text in enumerate(texts, start=1))], prompt=SCRIPT)


@pytest.fixture
def dump(tmp_path):
    def write(*records, tail=b""):
        path = tmp_path / "trees_0.jsonl"
        path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + tail)
        return path

    return write


def printed(record, *, width=400, **console):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, **console).print(text_tree(record))
    return out.getvalue().splitlines()


class Page(HTMLParser):
    """The elements and attributes of a page, its nodes' texts, and how deep its nodes are nested."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], set(), [], []
        self.level = self.depth = 0
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "input", "img"):
            self.open.append((tag, dict(attrs).get("class")))
        if self.open[-1] == ("span", "text"):
            self.texts.append("")
        self.level += self.open[-1] == ("div", "children")
        self.depth = max(self.depth, self.level)

    def handle_endtag(self, tag):
        closed = self.open.pop()
        assert closed[0] == tag
        self.level -= closed == ("div", "children")

    def handle_data(self, data):
        if self.open and self.open[-1] == ("span", "text"):
            self.texts[-1] += data


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("cut", [1, 9, 400, -2])
def test_a_last_line_that_a_killed_run_cut_off_is_passed_over_and_a_whole_one_is_read(dump, cut):
    whole = json.dumps(small_tree(prompt="日本語"), ensure_ascii=False).encode()
    start = whole.index("語".encode()) + 1 if cut == 9 else cut  # inside a character
    assert list(read_trees(dump(small_tree(), tail=whole[:start]))) == [small_tree()]
    assert list(read_trees(dump(small_tree(), tail=whole))) == [small_tree(), small_tree(prompt="日本語")]


@pytest.mark.parametrize("broken", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b'{"step": 1e'])
def test_a_broken_line_before_the_end_is_named(dump, broken):
    path = dump(small_tree(), tail=broken + b"\n" + json.dumps(small_tree()).encode() + b"\n")
    trees = read_trees(path)
    assert next(trees) == small_tree()
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        next(trees)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("prompt"), "'prompt' is missing"),
        (lambda t: t.update(nodes=[]), "it has no nodes"),
        (lambda t: t.update(step="12"), "'step' cannot be a str"),
        (lambda t: t.update(step=True), "'step' cannot be a bool"),
        (lambda t: t["nodes"][2].pop("visits"), "node 2: 'visits' is missing"),
        (lambda t: t["nodes"][2].update(value=None), "node 2: 'value' cannot be a NoneType"),
        (lambda t: t["nodes"][2].update(parent=2), "node 2: 'parent' is 2"),
        (lambda t: t["nodes"][2].update(parent=-1), "node 2: 'parent' is -1"),
        (lambda t: t["nodes"][2].update(parent=None), "node 2: 'parent' is None"),
        (lambda t: t["nodes"][0].update(parent=0), "node 0: 'parent' is 0"),
        (lambda t: t["nodes"].insert(1, 7), "node 1: a int instead of an object"),
        (lambda t: t["nodes"][3].update(rewards=[1.0, "x"]), "node 3: 'rewards' cannot hold a str"),
    ],
)
def test_a_line_that_is_no_tree_is_named_with_the_reason(dump, change, message):
    record = copy.deepcopy(small_tree())
    change(record)
    with pytest.raises(ValueError, match=f"line 2 is not a dumped tree: {message}"):
        list(read_trees(dump(small_tree(), record)))


def test_fields_that_the_views_do_not_use_may_come_and_go(dump):
    record = small_tree(another=1)
    del record["results"]
    for entry in record["nodes"]:
        del entry["token_ids"]
    assert list(read_trees(dump(record))) == [record]


# -------------------------------------------------------------------------------------------------------------- values


def test_text_keeps_what_can_be_seen_and_spells_out_what_acts():
    assert visible_text(MARKUP) == MARKUP
    assert visible_text(SPACES) == SPACES
    assert visible_text(ESCAPES) == r"\x1b[31mred\x1b[0m\x1b]0;owned\x07 \x9b2J\x00\x7f\r"
    assert visible_text(UNICODE) == "日本語 مرحبا é \U0001f469\u200d\U0001f467 \\u202eexe.gnp \\ud800 \\u2028 end"


def test_short_text_is_one_line_of_limited_length():
    assert short_text(SPACES, 48) == "↵↵  two⇥three↵"
    assert short_text("a" * 48, 48) == "a" * 48
    assert short_text("a" * 49, 48) == "a" * 47 + "…"
    assert short_text("\x1b" * 48, 9) == r"\x1b\x1b" + "…"


def test_the_shade_is_the_outcome_at_the_end_and_the_value_elsewhere():
    assert shade(node(1, 0, value=50.0)) == 1.0 and shade(node(1, 0, value=-50.0)) == -1.0
    assert 0 < shade(node(1, 0, value=0.1)) < shade(node(1, 0, value=0.2)) < 1
    assert shade(leaf(1, 0, outcome=1.0, value=0.0)) == 1.0  # correct, but never backed up
    assert shade(leaf(1, 0, outcome=-0.5)) == -0.5
    assert (
        shade(leaf(1, 0, outcome=None)) == shade(node(1, 0, value=0.0)) == shade(node(1, 0, value=float("nan"))) == 0
    )


def test_graded_completions_are_shown_with_the_outcome_that_was_backed_up():
    graded = leaf(1, 0, outcome=-1.0, worth=0.5)
    assert shade(graded) == 0.5 and outcome(graded) == "+0.5"
    older = leaf(1, 0, outcome=-1.0)  # a dump without `worth`
    assert shade(older) == -1.0 and outcome(older) == "-1"
    assert verdict(leaf(1, 0, outcome=1.0, finished=False)) == "correct"


# ------------------------------------------------------------------------------------------------------------ terminal


def test_each_node_is_one_line_with_its_numbers_below_its_parent():
    assert printed(small_tree()) == [
        '#0 i0 "6a-0b-8="  9 tok  N 3 V +0.40 Q +0.13',
        '├ #1 i1 "a6-0=6;"  5 tok  N 3 V +0.40 Q +0.13 H 0.71',
        '│ ├ #3 i3 "b6-8=8;#8"  5 tok  N 3 V +1.00 Q +1.00 H 0.71  correct +1 reward 1 *row 0',
        '│ └ #4 i4 "b6-8=2;#2"  5 tok  N 0 V +0.00 Q +0.00 H 0.71  wrong -1 reward -1',
        '├ #2 i2 "a6-0=1;"  5 tok  N 2 V -0.30 Q +0.13 H 0.71',
        '│ └ #5 i5 "b1-8="  5 tok  N 3 V -0.50 Q -0.50 H 0.71  cut off -0.5 reward -0.5 *row 1',
        '└ #6 i6 "#"  5 tok  N 3 V +0.00 Q +0.00 H 0.71  unscored reward - direct *row 2',
    ]


def test_markup_and_terminal_escapes_are_printed_as_text():
    lines = printed(hostile_tree(), color_system="truecolor", force_terminal=True, legacy_windows=False)
    plain = Text.from_ansi("\n".join(lines)).plain
    for text in (MARKUP[:47] + "…", r"\x1b[31mred\x1b[0m\x1b]0;owned\x07 \x9b2J", "↵↵  two⇥three↵"):
        assert text in plain
    raw = "\n".join(lines)
    assert "\x1b[31m" not in raw and "\x1b]" not in raw and "\x9b" not in raw and "\x07" not in raw
    raw.encode()  # no lone surrogate is left


def test_good_nodes_are_green_bad_ones_red_and_unknown_ones_grey():
    correct, wrong = text_tree(small_tree()).children[0].children
    (unknown,) = text_tree(small_tree()).children[2:]
    (good, bad, grey) = (Style.parse(branch.label.style).color.get_truecolor() for branch in (correct, wrong, unknown))
    assert good.green > good.red and bad.red > bad.green and len(set(grey)) == 1
    # Also on a terminal with 16 colours, of which 1 is red and 2 is green.
    colours = [Style.parse(branch.label.style).color.downgrade(ColorSystem.STANDARD) for branch in (correct, wrong)]
    assert [colour.number for colour in colours] == [2, 1]


def test_a_deep_tree_needs_two_columns_per_level():
    lines = printed(chain(64))
    assert len(lines) == 65
    assert lines[64].startswith(" " * 126 + "└ #64 ")
    assert text_tree(chain(1500)).children  # deeper than Python's stack


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_page_shows_texts_as_they_are_and_builds_no_element_from_them():
    source = html_page(hostile_tree())
    plain, page = Page(html_page(small_tree())), Page(source)
    assert page.texts == [SCRIPT] + [visible_text(n["text"]) for n in hostile_tree()["nodes"] if n["text"]]
    assert set(page.tags) == set(plain.tags) and page.tags.count("script") == page.tags.count("h1") == 1
    assert page.attributes == plain.attributes and "onclick" not in page.attributes
    assert "(no text)" in source and "(only whitespace)" in source
    # It loads nothing, and its policy names its one script.
    assert "default-src 'none'" in source
    assert "script-src 'sha256-" in source and "script-src 'unsafe" not in source
    assert not page.attributes & {"src", "href", "srcset", "action"}
    assert "url(" not in source and "@import" not in source


def test_the_page_nests_every_node_in_its_parent():
    page = Page(html_page(small_tree()))
    assert page.texts == ["6a-0b-8=", "a6-0=6;", "b6-8=8;#8", "b6-8=2;#2", "a6-0=1;", "b1-8=", "#"]
    assert (page.depth, page.tags.count("details")) == (2, 3)
    assert Page(html_page(chain(64))).depth == 64
    assert Page(html_page(chain(1500))).depth == 1500
    assert Page(html_page(tree([node(0, None)]))).depth == 0


def test_the_page_says_how_the_search_went_and_marks_what_was_not_trained_on():
    source = html_page(small_tree(success_ratio=None, reason="<empty> frontier"))
    facts = ("1 correct, 1 wrong, 1 cut off, 1 unscored", "&lt;empty&gt; frontier", "row 2")
    for text in ("step 12, prompt 3 of its batch", *facts):
        assert text in source
    assert "cut off -0.5" in source and "#6 direct" in source
    assert source.count('class="leaf aside"') == 1 and source.count('class="leaf"') == 3
    assert source.count('<details open class="aside">') == 0


def browser():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    return pytest.skip("needs chromium or google-chrome")


def browse(page, folder):
    """The page as a browser has built it."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
    command = [browser(), *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.slow
def test_a_browser_shows_the_page_and_runs_only_its_own_script(tmp_path):
    page = tmp_path / "tree.html"
    page.write_text(html_page(hostile_tree()), encoding="utf-8")
    shown = Page(browse(page, tmp_path / "profile"))
    assert shown.texts == Page(page.read_text(encoding="utf-8")).texts and shown.texts[1] == SCRIPT
    assert "img" not in shown.tags and shown.tags.count("script") == 1
    assert "data-ready" in shown.attributes  # the page's script ran under the page's policy

    # text that slipped through the escaping would still not run
    page.write_text(html_page(hostile_tree()).replace("</main>", f"{SCRIPT}</main>"), encoding="utf-8")
    dom = browse(page, tmp_path / "profile")
    assert "img" in Page(dom).tags and "<title>Search tree: step 12, prompt 3 of its batch</title>" in dom


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_prints_one_tree_unwrapped(dump, capsys):
    path = dump(small_tree(), chain(64))
    assert main(["tree", str(path), "--index", "1"]) == 0
    out = capsys.readouterr().out
    assert "65 nodes" in out and "search ended: complete" in out
    assert sum("#" in line and " tok " in line for line in out.splitlines()) == 65
    assert main(["tree", str(path)]) == 0
    assert '"b6-8=8;#8"' in capsys.readouterr().out


@pytest.mark.parametrize(("index", "step"), [("0", 0), ("2", 2), ("-1", 2), ("-3", 0)])
def test_trees_are_counted_from_either_end(dump, capsys, index, step):
    assert main(["tree", str(dump(*(small_tree(step=i) for i in range(3)))), "--index", index]) == 0
    printed = capsys.readouterr().out
    assert f"tree {step}: step {step}, prompt 3 of its batch" in printed
    page = Path(printed.split("wrote ")[1].strip())  # beside the dump, named after the tree
    assert page.name.endswith(f"_{step}.html") and page.read_text() == html_page(small_tree(step=step))


def test_the_list_has_one_row_per_tree(dump, capsys):
    path = dump(small_tree(), hostile_tree(), chain(5), tail=b'{"step": 1')
    assert main(["tree", str(path), "--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4
    assert rows[1].split() == ["0", "12", "6a-0b-8=", "0.25", "7", "14", "complete"]
    assert "<script>" in rows[2]


def test_the_page_is_written_whole_and_named(dump, capsys, tmp_path):
    target = tmp_path / "new" / "tree.html"
    target.parent.mkdir()
    target.write_text("old")
    assert main(["tree", str(dump(small_tree())), "--html", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == html_page(small_tree())
    assert f"wrote {target}" in capsys.readouterr().out
    assert [file.name for file in target.parent.iterdir()] == ["tree.html"]


def test_a_terminal_that_cannot_show_a_character_gets_its_number(dump, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    assert main(["tree", str(dump(tree([node(0, None), leaf(1, 0, "日本")])))]) == 0
    assert rb"\u65e5\u672c" in raw.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{dump}", "--index", "2"], "--index 2: '{dump}' holds 2 tree(s); pass a number from -2 to 1"),
        (["{dump}", "--list", "--index", "1"], "leave out --index and --html"),
        (["{dump}", "--html", "{dump}"], "name a file that ends in .html"),
        (["{dump}", "--html", "{dump}/tree.html"], "cannot be written"),
        (["{folder}/trees_1.jsonl"], "'{folder}/trees_1.jsonl' does not exist"),
        (["{folder}"], "'{folder}' is a folder, pass a file in it: trees_0.jsonl"),
        (["{folder}/empty"], "'{folder}/empty' holds no whole tree yet"),
        (["{folder}/notes"], "'{folder}/notes': line 1 is not JSON"),
        (["{folder}/rows"], "'{folder}/rows': line 1 is not a dumped tree: 'step' is missing"),
    ],
)
def test_mistakes_are_told_in_one_line(dump, tmp_path, capsys, arguments, message):
    names = {"dump": dump(small_tree(), small_tree()), "folder": tmp_path}
    before = names["dump"].read_bytes()
    (tmp_path / "empty").touch()
    (tmp_path / "notes").write_text("once upon a time\n")
    (tmp_path / "rows").write_text('{"prompt": "1+1="}\n')
    assert main(["tree", *(argument.format(**names) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message.format(**names) in error and error.count("\n") == 1
    assert names["dump"].read_bytes() == before

"""The pages against the code: their commands, their Python, their fields, and the messages that they quote."""

import ast
import re
import shlex
from functools import cache

import pytest
import yaml
from commands import EXAMPLES, ROOT

from trl_explore.cli import _build_parser, compare, tree
from trl_explore.cli import eval as evaluating
from trl_explore.cli import filter as filtering
from trl_explore.cli import tasks as listing
from trl_explore.cli.train import _split_arguments, parse_train_arguments
from trl_explore.compare.settings import read_comparison
from trl_explore.trainers import ExplorationConfig

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", EXAMPLES / "README.md", *sorted(DOCS.rglob("*.md"))]
# A fenced block, and the comment in front of it that says what becomes of it, where there is one.
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^( *)```(\w+)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)


def blocks(language, pages=PAGES):
    """Page, comment and text of every block of a language, for `parametrize`."""
    return [
        pytest.param(page, note, text, id=f"{page.relative_to(ROOT)}:{number}")
        for page in pages
        for number, (note, _, name, text) in enumerate(BLOCK.findall(page.read_text()))
        if name == language
    ]


def page_blocks(page, language):
    return [text for _, _, name, text in BLOCK.findall((DOCS / page).read_text()) if name == language]


# ------------------------------------------------------------------------------------------------------------ commands


def parse(command, tmp_path):
    """The arguments of a `trl-explore` line, read by the command's own parser and then left."""
    name, *argv = shlex.split(command.partition(" > ")[0], comments=True)[1:]
    of_flags = {"eval": evaluating, "filter": filtering, "compare": compare, "tasks": listing}
    if name == "train" and {"--help", "--help-all"} & set(argv):
        if "my_module.MyTrainer" not in argv:
            _split_arguments([flag for flag in argv if flag not in ("--help", "--help-all")])
    elif name == "train":
        parse_train_arguments([*argv, "--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path)])
    elif name in of_flags:
        args = of_flags[name].build_parser().parse(argv)
        if name == "compare" and args.config is None:
            document = compare._document(args)
            document.pop("output_dir", None)
            read_comparison(document)
    elif name == "tree":
        tree.build_parser().parse_args(argv)
    else:
        _build_parser().parse_args([name, *argv])


@pytest.mark.parametrize(("page", "note", "text"), blocks("bash"))
def test_every_command_is_run_or_parsed_or_says_why_not(page, note, text, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if note.startswith("not run: "):
        assert len(note) > len("not run: ") + 10
    elif note.startswith("run by "):
        assert page.name in (ROOT / note.removeprefix("run by ")).read_text()
    else:  # run by tests/test_page_blocks.py, unless it says why it is only parsed
        assert not note or len(note) > len("parsed: ") + 10 and note.startswith("parsed: "), note
        lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
        for line in lines:
            assert line.startswith("trl-explore "), f"neither run nor parsed: {line}"
            parse(line, tmp_path)


# -------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize(("page", "note", "text"), blocks("python"))
def test_python_compiles_and_its_imports_are_there(page, note, text, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(ast.unparse(node), {})


@pytest.mark.parametrize(("page", "note", "text"), blocks("yaml"))
def test_yaml_is_yaml(page, note, text):
    assert isinstance(yaml.safe_load(text), dict)


# -------------------------------------------------------------------------------------------------------------- fields


def test_every_shared_field_is_on_one_page_with_its_default():
    pages = ("training", "credit", "selection", "memory", "vllm")
    text = "\n".join((DOCS / f"{page}.md").read_text() for page in pages)
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .* \|$", text, re.MULTILINE)
    config = vars(ExplorationConfig("out", use_cpu=True))
    expected = {name: config[name] for name in ExplorationConfig.__annotations__}
    found = {name: ast.literal_eval(default) for name, default in rows}
    assert found == expected and len(rows) == len(expected)


# ------------------------------------------------------------------------------------------------------------ messages


def words_of(node):
    """The text of a string in the code, with `…` for what is put into it; `None` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part) or "…" for part in node.values)
    return None


@cache
def nodes_of(path):
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def texts_of(path):
    return [found for node in nodes_of(path) if (found := words_of(node))]


def sources():
    return [*ROOT.glob("trl_explore/*.py"), *ROOT.glob("trl_explore/*/*.py"), *ROOT.glob("trainers/*.py")]


def quoted_messages():
    """The first column of the page's tables, where it is a message and not a sign."""
    cells = re.findall(r"^\| (`.*?`)(?: and `.*?`)? \| ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [cell.strip("`") for cell in cells]


def pattern_of(message):
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" .,;:")]
    return re.compile(".*".join(parts), re.DOTALL)


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_code(message):
    texts = [text.replace("`", "") for path in sources() for text in texts_of(path)]
    pattern = pattern_of(message)
    elsewhere = message == "'Parameter' object has no attribute 'weight_loader'"  # vLLM's
    assert elsewhere or any(pattern.search(text) for text in texts)


def test_every_warning_of_the_code_is_quoted():
    patterns = [pattern_of(message) for message in quoted_messages()]
    calls = [node for path in sources() for node in nodes_of(path) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) in ("warnings.warn", "logger.warning")]
    texts = [text.replace("`", "") for call in calls if (text := words_of(call.args[0]))]
    assert len(texts) > 20
    assert [text for text in texts if not any(pattern.search(text) for pattern in patterns)] == []


REFUSING = [
    *(path for path in (ROOT / "trainers").glob("*.py") if path.name not in ("saving.py", "__init__.py")),
    *(ROOT / "trl_explore" / name for name in ("credit/checks.py", "selection/budget.py", "packing/forward.py")),
    *(ROOT / "trl_explore" / name for name in ("credit/maxrl.py", "credit/subsets.py", "rewards/success.py")),
    *(ROOT / "trl_explore" / name for name in ("agents/snapshots.py", "chains/reading.py", "pivots/explorer.py")),
    ROOT / "trl_explore" / "auto" / "explorer_table.py",
]


@pytest.mark.parametrize("path", REFUSING, ids=lambda path: path.name)
def test_every_field_that_a_trainer_refuses_is_on_the_page(path):
    page = (DOCS / "coming-from-grpo.md").read_text()
    raised = [node.exc for node in nodes_of(path) if isinstance(node, ast.Raise)]
    messages = [words_of(error.args[0]) for error in raised if isinstance(error, ast.Call) and error.args]
    for message in filter(None, messages):
        first = re.match(r"\W*(\w+)=", message) or re.match(r"`(\w+)`", message)
        assert first is None or first[1] in page, message

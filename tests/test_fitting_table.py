"""Tables that fit a terminal: no cell wraps, whatever the number of columns."""

import io
import re

from rich.console import Console

from trl_explore.cli.eval import _report
from trl_explore.fitting_table import FittingTable


def printed(table, width):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


def test_a_table_that_fits_is_one_table():
    lines = printed(FittingTable(["name", "first", "second"], [["a", "1", "2"], ["b", "3", "4"]]), 80)
    assert [line.split("│")[1:4] for line in lines if line.startswith("│")] == [
        [" a    ", "     1 ", "      2 "],
        [" b    ", "     3 ", "      4 "],
    ]


def test_a_long_title_wraps_between_words_and_not_inside():
    table = FittingTable(["arm", "greedy accuracy (%)"], [["x", "1.0"]])
    assert any("greedy accuracy (%)" in line for line in printed(table, 80))
    assert any("accuracy" in line and "greedy" not in line for line in printed(table, 20))


def test_an_evaluation_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    interval = {"value": 0.497, "low": 0.3115, "high": 0.688}
    metrics = {f"{kind}@{k}": interval for kind in ("pass", "maj") for k in (1, 8, 64)}
    counts = {"num_prompts": 1319, "truncated": 0.1, "unanswered": 0.2, "tokens": 12_345_678, "unscored": 0}
    results = {"gsm8k": {"metrics": metrics, "settings": {"num_samples": 64}, **counts}}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _report(results, ["gsm8k"])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("49.7 [31.1, 68.8]") for line in lines) == 6 and any("12,345,678" in line for line in lines)

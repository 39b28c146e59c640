"""The runs that share a GPU for a quarter of an hour: their settings, what they write, and the table of it."""

import argparse
import importlib
import json

import pytest
import yaml
from commands import EXAMPLES


@pytest.fixture
def quarter(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "real"))
    return importlib.import_module("gpu_quarter_hour")


def point(arm, seed, step, tokens, pass_1):
    run = {"kind": "point", "comparison": "countdown", "arm": arm, "seed": seed, "step": step, "tokens": tokens}
    return {**run, "trained_tokens": tokens, "seconds": 2.0 * step, "eval/pass_at_1": pass_1, "eval/pass_at_8": 0.5}


def test_all_comparisons_of_the_file_are_valid(quarter):
    pytest.importorskip("reasoning_gym")
    from trl_explore.compare.settings import read_comparison

    settings = yaml.safe_load((EXAMPLES / "real" / "gpu_quarter_hour.yaml").read_text())
    args = argparse.Namespace(device="cpu", steps=2)
    for documents in quarter.documents_of(settings, args):
        for document in documents.values():
            document.pop("tokens_between")
            comparison = read_comparison(document)
            assert comparison.common["use_cpu"] and comparison.budget.steps == 2
            assert comparison.arms[0].name.startswith("GRPO")


def test_the_table_compares_at_tokens_and_seconds_that_all_runs_reached(quarter, tmp_path):
    lines = {}
    for seed in (1, 2, 3):
        lines["GRPO", seed] = [point("GRPO", seed, 2, 200, 0.1 * seed)]
        lines["auto", seed] = [point("auto", seed, 1, 100, 0.1 * seed), point("auto", seed, 3, 300, 0.1 * seed + 0.2)]
    lines["GRPO", 1].insert(0, point("GRPO", 1, 0, 0, 0.1))  # before training, once for all runs
    folder = tmp_path / "runs" / "countdown"
    folder.mkdir(parents=True)
    for number, ((arm, seed), points) in enumerate(lines.items()):
        step = {**points[-1], "kind": "step", "reward": 0.5}
        text = "".join(json.dumps(line) + "\n" for line in [*points, step])
        (folder / f"{number:02d}-{arm}-{seed}.jsonl").write_text(text)
    quarter.gather(tmp_path)
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 7
    arms = quarter.read_points(tmp_path / "points.csv")["countdown"]
    assert list(arms) == ["GRPO", "auto"] and all(runs[1][0]["step"] == 0 for runs in arms.values())
    _, _, before, grpo, auto, *of_seconds = quarter.table_of(arms)
    assert before.startswith("| before training |  | 0 | 10.0 |")
    assert grpo.startswith("| GRPO | 200 tokens | 2 | 20.0 |  |")
    # At 200 tokens the line of `auto` is half way between 0.1 * seed and 0.1 * seed + 0.2.
    assert auto.startswith("| auto | 200 tokens | 2 | 30.0 | 10.0 ± 0.0 |")
    assert of_seconds[1].startswith("| auto | 4 seconds | 2 | 30.0 | 10.0 ± 0.0 |")
    assert quarter.report(tmp_path).startswith("**countdown**") and (tmp_path / "curves.png").stat().st_size > 1000

"""The runs that share a GPU for a quarter of an hour: their settings, what they write, and the table of it."""

import argparse
import importlib
import json

import pytest
import yaml
from commands import EXAMPLES

from trl_explore.errors import UsageError


@pytest.fixture
def quarter(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "real"))
    return importlib.import_module("gpu_quarter_hour")


def point(arm, seed, step, tokens, pass_1):
    run = {"kind": "point", "comparison": "countdown", "arm": arm, "seed": seed, "step": step, "tokens": tokens}
    return {**run, "trained_tokens": tokens, "seconds": 2.0 * step, "eval/pass_at_1": pass_1, "eval/pass_at_8": 0.5}


def test_all_comparisons_of_the_file_are_valid(quarter):
    pytest.importorskip("reasoning_gym")
    settings = yaml.safe_load((EXAMPLES / "real" / "gpu_quarter_hour.yaml").read_text())
    assert settings["shared"].pop("tokens_between") > 0
    args = argparse.Namespace(device="cpu", steps=None, processes=16)
    for comparisons in quarter.comparisons_of(settings, args):
        for comparison in comparisons.values():
            assert comparison.common["use_cpu"] and comparison.arms[0].name.startswith("GRPO")
    args.processes = 8
    with pytest.raises(UsageError, match=r"waves\[0\] has 15 runs, but --processes is 8"):
        quarter.comparisons_of(settings, args)
    settings["shared"]["num_evals"] = 3
    with pytest.raises(UsageError, match="countdown: .*num_evals"):
        quarter.comparisons_of(settings, args)


def test_a_run_without_a_value_is_left_out_and_never_counts_as_zero(quarter, tmp_path):
    folder = tmp_path / "runs" / "countdown"
    folder.mkdir(parents=True)
    # The run that evaluates the model before training has failed, so the curves begin at their first evaluation.
    for number, (arm, tokens) in enumerate((("GRPO", 100), ("auto", 200))):
        line = json.dumps(point(arm, 1, 2, tokens, 0.5))
        (folder / f"{number:02d}-{arm}-1.jsonl").write_text(line + "\n" + line[:20])  # killed while it wrote
    quarter.gather(tmp_path)
    text = quarter.report(tmp_path)
    for arm in ("GRPO", "auto"):  # a single evaluation is no curve
        assert f"| {arm} | 100 tokens | - | - |  | - |" in text
    assert "0.0" not in text
    (tmp_path / "points.csv").write_text("comparison,arm,seed,step\n")
    assert quarter.report(tmp_path).startswith("No run has an evaluation")


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

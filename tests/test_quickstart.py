"""The quick-start: what it runs, what it says about the result, and that it goes on where it was stopped."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml
from commands import EXAMPLES

from trl_explore.cli import main
from trl_explore.compare.folder import ComparisonFolder
from trl_explore.compare.quickstart import FAST, NUM_SEEDS, difference_text, document, verdicts
from trl_explore.compare.run import Run
from trl_explore.compare.settings import read_comparison

FULL = dict(fast=False, seed=0, num_seeds=None)


def point(tokens, accuracy, seconds):
    costs = {"tokens": tokens, "trained_tokens": tokens, "seconds": seconds, "cpu_seconds": seconds, "step": tokens}
    return {**costs, "eval/greedy_accuracy": accuracy, "eval/pass_at_1": accuracy}


def run(arm, seed, end, *, seconds=10.0, tokens=60_000):
    return Run(arm, seed, [point(0, 0.0, 0.0), point(tokens, end, seconds)], [])


# By seed; the tree is 0.2 ahead on average, in twice the seconds, the branches are level.
ENDS = {"GRPO": [0.5, 0.6, 0.4], "DEEP-GRPO, unsolved": [0.7, 0.4, 0.4], "TreeGRPO": [0.7, 0.78, 0.62]}


def runs(ends, seeds=(0, 1, 2)):
    seconds = {"GRPO": 10.0, "DEEP-GRPO, unsolved": 11.0, "TreeGRPO": 20.0}
    return [run(arm, seed, ends[arm][seed], seconds=seconds[arm]) for arm in ends for seed in seeds]


def test_it_runs_the_regime_with_settings_that_are_tried_there(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "benchmarks"))
    from regimes_plan import Regime

    regime = Regime.load(EXAMPLES / "benchmarks" / "regimes" / "deep_ends.yaml")
    tried = {arm["name"]: arm for arm in regime.arms}
    ours = read_comparison(document(**FULL))
    chosen = []
    for arm in ours.arms:
        there, rate = tried[arm.name], ours.common["learning_rate"]
        ((knob, values),) = there["knob"].items()
        assert rate in regime.learning_rates and arm.options[knob] in values
        options = {**there.get("options", {}), "learning_rate": rate, knob: arm.options[knob]}
        chosen.append({"name": arm.name, "method": there["method"], "options": options})
    theirs = read_comparison(regime.document("verdict", chosen) | {"seeds": [0]})
    assert ours.task == theirs.task and ours.warm_start_steps == theirs.warm_start_steps
    assert ours.num_eval == theirs.num_eval and ours.metrics[0] == regime.metric
    for arm, other in zip(ours.arms, theirs.arms, strict=True):
        assert (arm.name, arm.method) == (other.name, other.method)
        assert {**ours.common, **arm.options} == {**theirs.common, **other.options}


def test_it_takes_at_least_four_seeds_and_fast_is_smaller():
    assert document(**FULL)["seeds"] == list(range(NUM_SEEDS)) and NUM_SEEDS >= 4
    fast = document(fast=True, seed=7, num_seeds=None)
    assert fast["seeds"] == [7, 8] and fast["budget"] == FAST["budget"]
    assert document(fast=True, seed=2, num_seeds=3)["seeds"] == [2, 3, 4]


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        ((0.108, 0.091), "+10.8 ± 9.1 (ahead)"),
        ((-0.108, 0.091), "-10.8 ± 9.1 (behind)"),
        ((0.05, 0.05), "+5.0 ± 5.0 (not clear: the interval includes 0)"),
        ((-0.01, 0.3), "-1.0 ± 30.0 (not clear: the interval includes 0)"),
        ((0.2, None), "+20.0 (may be chance: an interval needs 3 seeds)"),
    ],
)
def test_a_difference_is_called_what_its_interval_allows(difference, text):
    assert difference_text(*difference) == text


def test_the_verdict_is_computed_from_the_runs_along_the_curve_and_at_its_end():
    comparison = read_comparison({**document(**FULL), "seeds": [0, 1, 2]})
    found = [vars(run) for run in runs(ENDS)]
    # Straight lines from 0: along them everything is half of what it is at the end. 4.303 * 0.02 / sqrt(3) = 0.05.
    deep, tree = verdicts(found, comparison)
    assert tree == (
        "TreeGRPO - GRPO on these seeds, points of greedy accuracy for as many tokens: +10.0 ± 2.5 (ahead) on average "
        "along the curve, +20.0 ± 5.0 (ahead) at the end, in 2.0 times the CPU seconds."
    )
    assert deep.startswith("DEEP-GRPO, unsolved - GRPO on these seeds") and deep.count("the interval includes 0") == 2
    losing = {**ENDS, "TreeGRPO": [0.3, 0.42, 0.18]}
    assert "-20.0 ± 5.0 (behind) at the end" in verdicts([vars(run) for run in runs(losing)], comparison)[1]


def finished(folder, given):
    """A folder in which every run is finished."""
    place = ComparisonFolder(read_comparison(given), folder)
    place.write_settings()
    for arm, seed in place.missing():
        place.of_run(arm, seed).mkdir()
        run(arm.name, seed, 0.5 + seed / 100).save(place.of_run(arm, seed) / "run.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in place.path.glob("*/run.json")}


def test_a_second_quickstart_keeps_what_is_there_says_so_and_how_to_start_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = finished("out/quickstart", document(**FULL))
    assert main(["quickstart"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "out/quickstart is there already: its 18 finished runs are kept, there is nothing to train." in shown
    assert "To start again, remove it (rm -r out/quickstart) or name another folder with --output_dir." in shown
    assert "TreeGRPO - GRPO on these seeds" in shown and "DEEP-GRPO, unsolved - GRPO on these seeds" in shown
    assert "Plain GRPO wins" in shown and "docs/evidence.md" in shown
    assert "Another machine gives other figures" in shown and "docs/measured.md" in shown
    after = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/quickstart/*/run.json")}
    assert after == before and len(after) == 18
    for name in ("curves.png", "curves.csv", "table.md"):
        assert (tmp_path / "out/quickstart" / name).stat().st_size > 0


def test_a_folder_of_other_settings_and_no_process_are_refused(tmp_path, capsys):
    finished(tmp_path / "out", document(**FULL))
    assert main(["quickstart", "--fast", "--output_dir", str(tmp_path / "out")]) == 2
    assert "holds another comparison: budget.tokens: 60000.0 in the folder, 3000.0 now" in capsys.readouterr().err
    assert main(["quickstart", "--processes", "0"]) == 2
    assert "processes=0: give an integer of at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xdist_group("deep_doors")
def test_ctrl_c_in_a_terminal_keeps_a_quickstart_that_the_same_command_finishes(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    flags = ["--fast", "--output_dir", str(tmp_path / "out"), "--num_seeds", "1", "--processes", "2"]
    command = [sys.executable, "-m", "trl_explore.cli", "quickstart", *flags]
    options = dict(env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    options |= dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process = subprocess.Popen(command, start_new_session=True, **options)
    output = ""
    while "1/3 " not in output:  # the line of the first run that is finished
        line = process.stdout.readline()
        assert line, output
        output += line
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes at once
    rest, _ = process.communicate(timeout=300)
    output += rest
    assert process.returncode == 130 and "Traceback" not in output, output
    hint = next(line.strip() for line in output.splitlines() if line.strip().startswith("trl-explore"))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/run.json")}
    assert 1 <= len(kept) < 3

    again = [sys.executable, "-m", "trl_explore.cli", *hint.split()[1:]]
    done = subprocess.run(again, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"its {len(kept)} finished runs are kept, the other {3 - len(kept)} go on" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for path in tmp_path.glob("out/*/run.json"):
        steps = [step["step"] for step in json.loads(path.read_text())["steps"]]
        assert steps == list(range(1, len(steps) + 1))
    assert yaml.safe_load((tmp_path / "out/comparison.yaml").read_text())["seeds"] == [0]
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")
    assert "a check that everything runs" in done.stdout

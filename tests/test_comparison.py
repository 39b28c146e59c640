"""Budgets, costs and curves of a comparison; the quick-start's table, picture and resume."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tqdm import tqdm
from transformers import TrainerCallback

from trl_explore.comparison import Arm, Budget, train_arm
from trl_explore.plots import learning_curves
from trl_explore.quickstart import COLUMNS, Size, result_table, run_arm
from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start

TASK = get_task("chain")
SMALL = dict(per_device_train_batch_size=16, num_generations=4)
DEEP = Arm("DEEP-GRPO", "deep_grpo", dict(segment_delimiters=[";"], num_branches=2, max_pivots_per_batch=2))
GRPO = Arm("GRPO", "grpo")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return warm_start(TASK, seed=0, steps=2, cache_dir=tmp_path_factory.mktemp("cache"), progress=False)


def train(arm, start, folder, **changes):
    settings = dict(
        output_dir=folder, seed=0, budget=Budget(steps=3), evaluate_every=2, num_eval=4, num_samples=2, k=(1, 2)
    )
    settings.update(changes)
    return train_arm(arm, TASK, start, num_train=64, options={**SMALL, **settings.pop("options", {})}, **settings)


@pytest.mark.parametrize("arm", [DEEP, GRPO], ids=lambda arm: arm.name)
def test_costs_are_those_of_training(arm, start, tmp_path):
    run = train(arm, start, tmp_path)
    assert [p["step"] for p in run.points] == [0, 2, 3]
    assert run.points[0]["tokens"] == run.points[0]["seconds"] == 0
    main = sum(step["completions/mean_length"] * 16 for step in run.steps)
    extra = sum(step.get("pivots/sampled_tokens", 0) for step in run.steps)
    assert run.points[-1]["tokens"] == pytest.approx(main + extra)
    assert (extra > 0) == (arm is DEEP)
    seconds = [p["seconds"] for p in run.points]
    assert seconds == sorted(seconds) and run.points[-1]["cpu_seconds"] > 0


def test_a_token_budget_stops_at_the_step_that_reaches_it(start, tmp_path):
    free = train(GRPO, start, tmp_path)
    budget = free.steps[0]["tokens"] + 1
    run = train(GRPO, start, tmp_path, budget=Budget(tokens=budget))
    assert [step["tokens"] for step in run.steps] == [step["tokens"] for step in free.steps[:2]]
    assert run.points[-1]["step"] == 2 and run.points[-1]["tokens"] >= budget


def test_a_resumed_arm_has_the_rate_of_its_own_tokens(start, tmp_path):
    options = dict(save_strategy="steps", save_steps=1)
    first = train(GRPO, start, tmp_path, budget=Budget(steps=2), options=options)
    begun = []

    class Began(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append((bar.initial, bar.n, bar.last_print_n))

    with tqdm(total=10_000, file=io.StringIO()) as bar:
        budget = Budget(steps=3, tokens=10_000)
        run = train(GRPO, start, tmp_path, budget=budget, progress=bar, callbacks=[Began()], resume=True)
    done, total = first.points[-1]["tokens"], run.points[-1]["tokens"]
    assert begun == [(done, done, done)]
    # tqdm divides what is between them by the time of this process.
    assert (bar.format_dict["initial"], bar.format_dict["n"]) == (done, total) and total > done


def test_a_resumed_arm_keeps_its_curve_and_its_budget(start, tmp_path):
    options = dict(save_strategy="steps", save_steps=2)
    whole = train(DEEP, start, tmp_path / "whole", budget=Budget(steps=4), options=options)
    train(DEEP, start, tmp_path / "part", budget=Budget(steps=4), options=options)
    (tmp_path / "part" / "checkpoint-4" / "trainer_state.json").unlink()  # as if it had ended after step 2
    again = train(DEEP, start, tmp_path / "part", budget=Budget(steps=4), options=options, resume=True)
    costs = ("cpu_seconds", "seconds")
    for first, second in zip(again.points, whole.points, strict=True):
        assert {k: v for k, v in first.items() if k not in costs} == {
            k: v for k, v in second.items() if k not in costs
        }
    assert [s["tokens"] for s in again.steps] == [s["tokens"] for s in whole.steps]


def test_a_finished_arm_is_read_back_and_not_trained_again(start, tmp_path):
    size = Size(tokens=100, evaluate_every=5, num_eval=2)
    run = run_arm(Arm("GRPO", "grpo", SMALL), TASK, start, tmp_path, seed=0, size=size, resume=False)
    assert run.points[-1]["step"] == 1
    stamp = (tmp_path / "run.json").stat().st_mtime_ns
    again = run_arm(Arm("GRPO", "grpo", SMALL), TASK, start, tmp_path, seed=0, size=size, resume=True)
    assert again == run and (tmp_path / "run.json").stat().st_mtime_ns == stamp


def fake_runs():
    point = {"step": 0, "tokens": 0, "seconds": 0.0, **{key: 0.25 for key in COLUMNS.values()}}
    later = {**point, "step": 9, "tokens": 1234567.0, "seconds": 8.0, "eval/greedy_accuracy": 0.875}
    return [{"arm": arm, "seed": 3, "points": [point, later]} for arm in ("DEEP-GRPO", "GRPO")]


def test_the_table_shows_the_warm_start_once_and_every_arm(capsys):
    from rich.console import Console

    Console(width=120).print(result_table(fake_runs()))
    lines = [line for line in capsys.readouterr().out.splitlines() if " 3 " in line]
    assert [re.findall(r"warm start|DEEP-GRPO|GRPO", line) for line in lines] == [
        ["warm start"],
        ["DEEP-GRPO"],
        ["GRPO"],
    ]
    assert "87.5" in lines[1] and "1,234,567" in lines[1] and "25.0" in lines[0]


def test_the_picture_is_a_png_with_a_panel_per_metric_and_clock(tmp_path):
    path = learning_curves(fake_runs(), tmp_path / "curves.png", title="x")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert width > 1000 and height > 800


@pytest.mark.slow
@pytest.mark.xdist_group("chain")
def test_ctrl_c_keeps_a_resumable_quickstart(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "trl_explore.cli", "quickstart", "--fast", "--output_dir", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = ""
    while "step=2" not in output:  # the progress line of the first arm
        character = process.stdout.read(1)
        assert character, output
        output += character
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output + rest
    hint = next(line.strip() for line in (output + rest).splitlines() if line.strip().startswith("trl-explore"))
    assert "--resume" in hint and "--fast" in hint
    assert list((tmp_path / "out" / "seed0" / "deep-grpo").glob("checkpoint-*"))

    resume = [sys.executable, "-m", "trl_explore.cli", *hint.split()[1:]]
    done = subprocess.run(resume, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert [run["arm"] for run in runs] == ["DEEP-GRPO", "GRPO"]
    steps = [step["step"] for step in runs[0]["steps"]]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "greedy accuracy" in done.stdout

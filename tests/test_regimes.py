"""The regimes benchmark: tuning, results that survive their folder, and what a report makes of them."""

import csv
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import EXAMPLES

from trl_explore.clocks import mean_along
from trl_explore.comparison import Run
from trl_explore.intervals import crossed_interval
from trl_explore.tasks.tiny_model import build_model

BENCHMARKS = EXAMPLES / "benchmarks"
ARMS = [
    {"name": "GRPO", "method": "grpo", "role": "baseline", "grid": {"learning_rate": [1e-4, 1e-3]}},
    {
        "name": "GRPO, 4x samples",
        "method": "grpo",
        "role": "admission",
        "options": {"num_generations": 4, "per_device_train_batch_size": 8},
        "grid": {"learning_rate": [1e-4, 1e-3]},
    },
    {"name": "G2RL", "method": "g2rl", "role": "method", "grid": {"novelty_weight": [0.5, 1.0]}},
]
REGIME = {
    "claim": "Nothing, in three steps.",
    "metric": "greedy_accuracy",
    "comparison": {
        "task": "dialects",
        "warm_start_steps": 2,
        "budget": {"tokens": 48},
        "evaluations": 2,
        "num_eval": 4,
        "metrics": ["greedy_accuracy", "pass_at_8"],
        "common": {"per_device_train_batch_size": 4, "num_generations": 2},
    },
    "seeds": {"tuning": [7], "verdict": [0, 1]},
    "arms": ARMS,
}


@pytest.fixture(scope="module")
def modules():
    """The benchmark's scripts, imported as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import regimes
        import regimes_report

        yield regimes, regimes_report
    for name in ("regimes", "regimes_report"):
        del sys.modules[name]


@pytest.fixture
def regimes(modules, tmp_path, monkeypatch):
    monkeypatch.setenv("REGIMES", str(tmp_path))
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return modules[0]


def load(regimes, **changes):
    path = Path("small.yaml")
    path.write_text(yaml.safe_dump({**REGIME, **changes}))
    return regimes.Regime.load(path)


def point(cost, value, **more):
    costs = dict.fromkeys(("step", "tokens", "trained_tokens", "seconds", "cpu_seconds"), float(cost))
    training = {"train/entropy": 0.5, "train/frac_reward_zero_std": 0.5}
    return {**costs, **training, "eval/greedy_accuracy": value, "eval/pass_at_8": value, **more}


def made(regimes, regime, values, stage="verdict"):
    """Results in which every arm rises in a straight line to the value given for each seed."""
    rows = []
    arms = regimes.tuning_arms(regime) if stage == "tuning" else regime.arms
    for arm, of_seeds in zip(arms, values, strict=True):
        for seed, value in enumerate(of_seeds):
            points = [point(0, 0.0, correct=[0, 0], greedy_correct=[0, 0])]
            points.append(point(10, value, correct=[8, 0], greedy_correct=[int(value > 0.25), int(value > 0.75)]))
            options = {name: choices[0] for name, choices in arm.get("grid", {}).items()}
            run = Run(arm["name"], seed, points, [])
            rows += regimes.to_rows(run, stage, arm.get("options", {}) | options, ["greedy_accuracy", "pass_at_8"])
    return rows


def test_the_mean_along_a_curve_tells_which_rose_earlier():
    early = [{"t": 0, "m": 0.0}, {"t": 10, "m": 1.0}, {"t": 20, "m": 1.0}]
    late = [{"t": 0, "m": 0.0}, {"t": 10, "m": 0.0}, {"t": 20, "m": 1.0}]
    assert mean_along(early, "t", 20, "m") == pytest.approx(0.75)
    assert mean_along(late, "t", 20, "m") == pytest.approx(0.25)
    assert mean_along(early, "t", 15, "m") == pytest.approx((5 + 5) / 15)
    assert mean_along([{"t": 0, "m": np.array([0.0, 1.0])}, {"t": 2, "m": np.array([1.0, 1.0])}], "t", 2, "m") == (
        pytest.approx([0.5, 1.0])
    )
    with pytest.raises(ValueError, match="`reading` is 21, but the curve is known up to 20 t"):
        mean_along(early, "t", 21, "m")


def test_the_crossed_interval_covers_seeds_and_prompts():
    random = np.random.default_rng(0)
    covered = 0
    for number in range(200):
        noise = random.normal(size=(40, 1)) + random.normal(size=(1, 40)) + random.normal(size=(40, 40))
        low, high = crossed_interval(noise, num_resamples=400, seed=number)
        covered += low <= 0 <= high
    assert covered / 200 == pytest.approx(0.95, abs=0.05)
    assert crossed_interval(np.full((3, 5), 0.25)) == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match="must have shape"):
        crossed_interval(np.zeros(3))


def test_the_best_candidate_on_the_development_seeds_runs_the_verdict(regimes):
    regime = load(regimes)
    assert [arm["name"] for arm in regimes.tuning_arms(regime)] == [
        *("GRPO: learning_rate 0.0001", "GRPO: learning_rate 0.001"),
        *("GRPO, 4x samples: learning_rate 0.0001", "GRPO, 4x samples: learning_rate 0.001"),
        *("G2RL: novelty_weight 0.5", "G2RL: novelty_weight 1.0"),
    ]
    rows = made(regimes, regime, [[0.2], [0.6], [0.5], [0.1], [0.3], [0.9]], stage="tuning")
    arms = regimes.verdict_arms(regime, rows)
    assert [arm["name"] for arm in arms] == ["GRPO", "GRPO, 4x samples", "G2RL"]
    assert arms[0]["options"] == {"learning_rate": 1e-3} and arms[2]["options"] == {"novelty_weight": 1.0}
    assert arms[1]["options"] == {"num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-4}


def test_arms_are_tuned_alike_and_have_a_role(regimes):
    uneven = [ARMS[0], {**ARMS[2], "grid": {"novelty_weight": [1.0]}}]
    with pytest.raises(ValueError, match="grids of different sizes: {'GRPO': 2, 'G2RL': 1}"):
        load(regimes, arms=uneven)
    with pytest.raises(ValueError, match="the first is the baseline"):
        load(regimes, arms=ARMS[1:])


def test_effects_are_paired_and_as_wide_as_the_seeds_or_problems_make_them(regimes, modules):
    regime, report = load(regimes), modules[1]
    # Of two problems, GRPO solves none and one; the other arm one and both.
    runs = regimes.to_runs(made(regimes, regime, [[0.0, 0.5], [0.0, 0.5], [0.5, 1.0]]), "verdict")
    found = report.effect(regime, runs, "G2RL", "GRPO", metric="greedy_accuracy", clock="tokens")
    assert found.mean == 50 and (found.low, found.high) == (0, 100) and found.verdict == "undecided"
    by_seed = report.effect(regime, runs, "G2RL", "GRPO", metric="pass_at_8", clock="tokens")
    assert (by_seed.mean, by_seed.low, by_seed.high) == (0, 0, 0)  # one problem always, the other never
    along = report.effect(regime, runs, "G2RL", "GRPO", metric="greedy_accuracy", clock="step", along=True)
    assert along.mean == pytest.approx(25)
    assert report.admission(regime, runs).mean == 0
    assert report.effect(regime, runs, "SESA", "GRPO", metric="greedy_accuracy", clock="step") is None


def test_the_report_says_what_is_not_admitted(regimes, modules, capsys):
    regime = load(regimes)
    rows = made(regimes, regime, [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]])
    regimes.write_results(regimes.results_path(regime), rows)
    assert regimes.to_runs(regimes.read_results(regimes.results_path(regime)), "verdict")[0].points[1]["tokens"] == 10
    modules[1].report([regime])
    text = Path("results.md").read_text()
    assert "optimisation-limited: not admitted" in text and "| G2RL | novelty_weight 0.5 | 100.0 |" in text
    assert "| G2RL | +50.0 [" in text and Path("results.png").read_bytes().startswith(b"\x89PNG")


def test_results_outlive_the_folder_and_are_not_trained_again(regimes):
    regime, path = load(regimes), Path("results/small.csv")
    regimes.train(regime, Path("out"))
    first = path.read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert {row["stage"] for row in rows} == {"tuning", "verdict"}
    verdict = {(row["arm"], row["seed"]) for row in rows if row["stage"] == "verdict"}
    assert verdict == {(arm["name"], seed) for arm in ARMS for seed in ("0", "1")}
    assert all(row["version"] and len(row["correct"]) == (4 if row["stage"] == "verdict" else 0) for row in rows)
    trained = [float(row["trained_tokens"]) for row in rows if row["stage"] == "verdict"]
    assert max(trained) >= 48 and min(trained) == 0

    shutil.rmtree("out")
    regimes.train(regime, Path("out"))
    assert path.read_text() == first and not list(Path("out").rglob("checkpoint-*"))

    changed = load(regimes, arms=[*ARMS[:2], {**ARMS[2], "grid": {"novelty_weight": [0.5, 2.0]}}])
    regimes.train(changed, Path("again"))
    tried = {row["arm"] for row in csv.DictReader(open(path)) if row["stage"] == "tuning"}
    assert "G2RL: novelty_weight 2.0" in tried and "G2RL: novelty_weight 1.0" not in tried
    assert not list(Path("again").rglob("grpo-*/checkpoint-*"))


def test_slices_of_time_keep_what_is_finished(regimes, monkeypatch):
    load(regimes, arms=ARMS[:2])
    monkeypatch.setattr(sys, "argv", ["regimes.py", "train", "small", "--minutes", str(0.2 / 60)])
    codes = []
    for _ in range(40):
        try:
            regimes.main()
            break
        except SystemExit as stop:
            codes.append(stop.code)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert set(codes) == {130}
    rows = regimes.read_results(Path("results/small.csv"))
    assert len(regimes.to_runs(rows, "verdict")) == 4


def test_a_gpu_gets_a_larger_model_and_results_of_its_own(regimes):
    large = regimes.enlarged(load(regimes, arms=ARMS[:2]))
    assert regimes.results_path(large).name == "small-large.csv" and large.seeds["verdict"] == [0, 1]
    arms = regimes.tuning_arms(large)
    assert [arm["options"]["learning_rate"] for arm in arms] == pytest.approx([1e-5, 1e-4] * 2)
    document = large.document("tuning", arms)
    assert document["common"]["bf16"] and not document["common"]["use_cpu"]
    size = sum(p.numel() for p in build_model(seed=0, **document["model_size"]).parameters())
    assert 50e6 < size < 100e6


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "regimes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_regimes_can_be_compared(modules, path):
    from trl_explore.compare_settings import read_comparison

    regime = modules[0].Regime.load(path)
    comparison = read_comparison(regime.document("tuning", modules[0].tuning_arms(regime)))
    assert regime.metric in comparison.metrics
    assert not set(regime.seeds["tuning"]) & set(regime.seeds["verdict"]) and len(regime.seeds["verdict"]) >= 5
    assert sum(arm["role"] == "admission" for arm in regime.arms) == 1

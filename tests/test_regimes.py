"""The regimes benchmark: tuning, results that survive their folder, and what a report makes of them."""

import csv
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from commands import EXAMPLES

from trl_explore.compare.costs import mean_along
from trl_explore.compare.folder import ComparisonFolder
from trl_explore.compare.run import Run
from trl_explore.compare.settings import read_comparison
from trl_explore.tasks.tiny_model import build_model

BENCHMARKS = EXAMPLES / "benchmarks"
SCALE = {"scale_rewards": ["group", "none"]}
METRICS = ["greedy_accuracy", "pass_at_16"]
SHUFFLED = {"novelty_scores": "shuffled"}
WEIGHTS = {"novelty_weight": [0.5, 1.0]}
MORE = {"num_generations": 4, "per_device_train_batch_size": 8}
ARMS = [
    {"name": "GRPO", "method": "grpo", "role": "baseline", "knob": SCALE},
    {"name": "4x", "method": "grpo", "role": "more samples", "options": MORE, "knob": SCALE},
    {"name": "G2RL", "method": "g2rl", "role": "method", "knob": WEIGHTS},
    dict(name="G2RL, shuffled", method="g2rl", role="control", of="G2RL", options=SHUFFLED, knob=WEIGHTS),
]
REGIME = {
    "claim": "Nothing, in three steps.",
    "metric": "greedy_accuracy",
    "comparison": {
        "task": "examples.benchmarks.tasks:DIALECT",
        "warm_start_steps": 2,
        "budget": {"tokens": 48},
        "evaluations": 2,
        "num_eval": 4,
        "metrics": METRICS,
        "samples_at_ends": 40,
        "common": {"per_device_train_batch_size": 4, "num_generations": 2},
    },
    "admission_steps": 2,
    "learning_rates": [1e-4, 1e-3],
    "arms": ARMS,
    "variety": "pass_at_16",
    "seeds": {"development": [7], "verdict": [0, 1]},
}


@pytest.fixture(scope="module")
def modules():
    """The benchmark's scripts, imported as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import regimes
        import regimes_effects
        import regimes_plan
        import regimes_report
        import regimes_results

        loaded = dict(regimes=regimes, results=regimes_results, plan=regimes_plan)
        yield SimpleNamespace(**loaded, effects=regimes_effects, report=regimes_report)
    for name in [name for name in sys.modules if name.startswith("regimes")]:
        del sys.modules[name]


@pytest.fixture
def regimes(modules, tmp_path, monkeypatch):
    monkeypatch.setenv("REGIMES", str(tmp_path))
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return modules.regimes


@pytest.fixture
def results(modules):
    return modules.results


@pytest.fixture
def plan(modules):
    return modules.plan


def load(regimes, **changes):
    path = Path("small.yaml")
    path.write_text(yaml.safe_dump({**REGIME, **changes}))
    return regimes.Regime.load(path)


def comparison(**changes):
    return {"comparison": {**REGIME["comparison"], **changes}}


def third_arm(**changes):
    return {"arms": [*ARMS[:2], {**ARMS[2], **changes}]}


def point(cost, value, correct, greedy):
    costs = dict.fromkeys(("step", "tokens", "trained_tokens", "seconds", "cpu_seconds"), float(cost))
    training = {"train/entropy": 0.5, "train/frac_reward_zero_std": 0.5}
    measured = {"eval/greedy_accuracy": value, "eval/pass_at_16": value, "correct": correct, "greedy_correct": greedy}
    return {**costs, **training, **measured}


def made(results, stage, arms, values, regime=None):
    """Results in which every arm rises in a straight line to the value given for each seed, of four problems."""
    rows = []
    for arm, of_seeds in zip(arms, values, strict=True):
        for seed, value in enumerate(of_seeds):
            greedy = [int(value > share) for share in (0.0, 0.25, 0.5, 0.75)]
            points = [point(0, 0.0, [0] * 4, [0] * 4), point(10, value, [8, 12, 0, 0], greedy)]
            options = {"learning_rate": 1e-3, "scale_rewards": "none", "novelty_weight": 1.0, **arm.get("options", {})}
            arm = {**arm, "options": options}
            run = Run(arm["name"], seed, points, [])
            settings = results.settings_of(regime.document(stage, []), arm) if regime else ""
            rows += results.to_rows(run, stage, arm, settings=settings, metrics=METRICS)
    return rows


def test_the_mean_along_a_curve_tells_which_rose_earlier():
    early = [{"t": 0, "m": 0.0}, {"t": 10, "m": 1.0}, {"t": 20, "m": 1.0}]
    late = [{"t": 0, "m": 0.0}, {"t": 10, "m": 0.0}, {"t": 20, "m": 1.0}]
    assert mean_along(early, "t", 20, "m") == pytest.approx(0.75)
    assert mean_along(late, "t", 20, "m") == pytest.approx(0.25)
    assert mean_along(early, "t", 15, "m") == pytest.approx((5 + 5) / 15)
    both = [{"t": 0, "m": np.array([0.0, 1.0])}, {"t": 2, "m": np.array([1.0, 1.0])}]
    assert mean_along(both, "t", 2, "m") == pytest.approx([0.5, 1.0])
    with pytest.raises(ValueError, match="`reading` is 21, but the curve is known up to 20 t"):
        mean_along(early, "t", 21, "m")


def test_the_crossed_interval_covers_seeds_and_prompts(modules):
    crossed_interval = modules.effects.crossed_interval
    random = np.random.default_rng(0)
    covered = 0
    for number in range(100):
        noise = random.normal(size=(40, 1)) + random.normal(size=(1, 40)) + random.normal(size=(40, 40))
        low, high = crossed_interval(noise, num_resamples=200, seed=number)
        covered += low <= 0 <= high
    assert covered / 100 == pytest.approx(0.95, abs=0.05)
    assert crossed_interval(np.full((3, 5), 0.25)) == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match="must have shape"):
        crossed_interval(np.zeros(3))


def test_results_from_before_tasks_had_import_paths_count(modules):
    arm = {"method": "grpo", "options": {}}
    now, before = ({"task": task, "seeds": [1]} for task in ("examples.benchmarks.tasks:DIALECT", "dialects"))
    assert modules.results.settings_of(now, arm) == modules.results.settings_of(before, arm)


def test_prompts_of_one_group_are_drawn_together(modules):
    crossed_interval = modules.effects.crossed_interval
    values = np.repeat([[0.0, 1.0]], 3, axis=0).repeat(10, axis=1)  # (3, 20): ten prompts of each of two facts
    low, high = crossed_interval(values)
    assert 0.2 < low < 0.4 < 0.6 < high < 0.8
    assert crossed_interval(values, groups=["a"] * 10 + ["b"] * 10) == (0, 1)
    uneven = np.array([[0.0, 1.0, 1.0, 1.0]])  # one group counts three times: draws are weighted by what they hold
    assert crossed_interval(uneven, groups="abbb") == (0, 1)


def test_every_stage_takes_the_best_of_the_one_before(regimes, results, plan):
    regime = load(regimes)
    arms = plan.stage_arms(regime, "admission rates", [])
    assert [arm["name"] for arm in arms] == [f"{n}: learning_rate {r}" for n in ("GRPO", "4x") for r in (1e-4, 1e-3)]
    rows = made(results, "admission rates", arms, [[0.2], [0.1], [0.3], [0.9]])
    admitted = plan.stage_arms(regime, "admission", rows)
    assert [arm["options"]["learning_rate"] for arm in admitted] == [1e-4, 1e-3]

    rows += made(results, "rates", plan.stage_arms(regime, "rates", rows), [[0.2], [0.6], [0.5], [0.1]])
    arms = plan.stage_arms(regime, "knob", rows)
    tuned = {"scale_rewards": "none", "learning_rate": 1e-3}
    assert arms[0] == {"name": "GRPO: scale_rewards none", "method": "grpo", "options": tuned}
    assert arms[1]["options"] == {**MORE, "learning_rate": 1e-4, "scale_rewards": "none"}
    rows += made(results, "knob", arms, [[0.7], [0.4]])

    arms = plan.stage_arms(regime, "method rates", rows)
    assert arms[0]["options"] == {"novelty_weight": 0.5, "learning_rate": 1e-4}
    rows += made(results, "method rates", arms, [[0.3], [0.9], [0.2], [0.1]])
    arms = plan.stage_arms(regime, "method knob", rows)
    assert [arm["options"]["novelty_weight"] for arm in arms] == [1.0, 1.0]
    rows += made(results, "method knob", arms, [[0.8], [0.9]])
    last = plan.stage_arms(regime, "verdict", rows)
    assert [arm["name"] for arm in last] == ["GRPO", "4x", "G2RL", "G2RL, shuffled"]
    assert [arm["options"]["learning_rate"] for arm in last] == [1e-3, 1e-4, 1e-3, 1e-4]
    assert [arm["options"]["scale_rewards"] for arm in last[:2]] == ["none", "group"]
    assert [arm["options"]["novelty_weight"] for arm in last[2:]] == [0.5, 1.0]
    assert all(plan.asked_for(regime, row) for row in made(results, "verdict", last, [[1.0]] * 4, regime))


def test_rivals_are_the_tuned_baseline_with_one_thing_changed(regimes, results, plan):
    regime = load(regimes, rivals=["entropy bonus", "unlikeliness"])
    assert [arm["name"] for arm in regime.arms][1:5] == ["4x", "entropy bonus", "unlikeliness", "G2RL"]
    rows = made(results, "rates", plan.stage_arms(regime, "rates", []), [[0.2], [0.6], [0.5], [0.1]])
    rows += made(results, "knob", plan.stage_arms(regime, "knob", rows), [[0.7], [0.4]])
    arms = plan.stage_arms(regime, "rival rates", rows)
    assert arms[1]["options"] == {"scale_rewards": "none", "entropy_coef": 0.003, "learning_rate": 1e-3}
    expected = {"advantage": "unlikeliness", "unlikeliness_beta": 0.25}
    assert arms[3]["options"] == {"scale_rewards": "none", "learning_rate": 1e-3, **expected}
    rows += made(results, "rival rates", arms, [[0.5], [0.6], [0.3], [0.2]])
    arms = plan.stage_arms(regime, "rival knob", rows)
    assert [arm["options"]["learning_rate"] for arm in arms] == [1e-3, 1e-4]
    rows += made(results, "rival knob", arms, [[0.9], [0.1]])
    # Of GRPO and what may keep its variety, the setting that ends with most of it.
    (varied,) = plan.stage_arms(regime, "collapse", rows)
    assert varied["name"] == "entropy bonus, tuned on pass_at_16" and varied["options"]["entropy_coef"] == 0.01
    assert all(plan.asked_for(regime, row) for row in made(results, "collapse", [varied], [[1.0]], regime))


def test_a_collapse_is_read_against_the_start_and_against_the_best_on_development_seeds(regimes, modules, results):
    regime = load(regimes)

    def runs(stage, arm, heights):
        rows = []
        for seed in regime.seeds_of(stage):
            of_seed = [point(24 * i, h, [], []) for i, h in enumerate(heights)]
            rows += results.to_rows(Run(arm["name"], seed, of_seed, []), stage, arm, settings="", metrics=METRICS)
        return rows

    tuned = {"name": "GRPO: learning_rate 0.001", "method": "grpo", "options": {"learning_rate": 1e-3}}
    rows = runs("rates", tuned, [0.25, 0.75, 0.5])
    rows += runs("collapse", {**tuned, "name": "GRPO, tuned on pass_at_16"}, [0.125, 0.5, 0.25])
    found = modules.effects.Results(regime, rows)
    arm, start, best = found.collapse()
    assert arm == "GRPO, tuned on pass_at_16" and start.mean > 0 > best.mean and found.limits == ["variety"]
    level = modules.effects.Results(regime, [*rows[:3], *runs("collapse", tuned, [0.125, 0.5, 0.5])])
    assert level.collapse()[2].mean == 0 and level.limits == [] and not level.admitted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "small.yaml: unknown field 'seed'; did you mean 'seeds'?"),
        ({"arms": ARMS[1:]}, "the first arm must have the role baseline, the second the role more samples"),
        (
            third_arm(knob={"novelty_weight": [1.0]}),
            "arm G2RL: knob={'novelty_weight': [1.0]}: give one field with two values",
        ),
        (third_arm(role="hero"), "role='hero': choose one of baseline"),
        ({"arms": [*ARMS[:3], {**ARMS[3], "of": "SESA"}]}, "of='SESA': name the method"),
        (third_arm(grid={}), "arm G2RL: unknown field 'grid'"),
        (third_arm(method="g2lr"), "unknown method 'g2lr'; did you mean 'g2rl'?"),
        ({"arms": [*ARMS[:2], {"name": "SESA", "method": "sesa", "role": "method"}]}, "arm SESA: give it a knob"),
        (comparison(budget={"steps": 3}), "give the budget in tokens"),
        ({"metric": "pass_at_1"}, "metric='pass_at_1' is not measured"),
        ({"variety": "coverage_at_8"}, "variety='coverage_at_8' is not measured"),
        ({"rivals": ["MaxRl"]}, "rivals: unknown rival 'MaxRl'; did you mean 'MaxRL'?"),
        ({"seeds": {"second": [7]}}, "seeds: unknown stage 'second'; did you mean 'seconds'?"),
        (
            comparison(metrics=[*METRICS, "pass_at_64"]),
            "they need 64 samples per problem, but a results file can hold the successes of at most 35",
        ),
    ],
)
def test_what_is_wrong_with_a_regime_is_said_in_a_sentence(regimes, changes, message, monkeypatch, capsys):
    Path("small.yaml").write_text(yaml.safe_dump({**REGIME, **changes}))
    monkeypatch.setattr(sys, "argv", ["regimes.py", "train"])
    with pytest.raises(SystemExit):
        regimes.main()
    assert message in capsys.readouterr().err


def test_older_rows_keep_their_metrics_when_a_metric_is_removed(regimes, results):
    regime = load(regimes)
    rows = made(results, "verdict", regime.arms, [[0.2]] * 4)
    results.write_results(regime.path, rows, METRICS)
    results.write_results(regime.path, results.read_results(regime.path), METRICS[:1])
    found = results.read_results(regime.path)
    assert len(found) == len(rows) and all(row[METRICS[1]] == 0.2 for row in found[1::2])


def test_names_of_regimes_may_follow_flags(regimes, monkeypatch):
    load(regimes)
    monkeypatch.setattr(regimes, "train", lambda regime, output_dir, **given: trained.append((regime.name, given)))
    monkeypatch.setattr(sys, "argv", ["regimes.py", "train", "--large", "--anyway", "small"])
    trained = []
    regimes.main()
    assert trained == [("small-large", {"anyway": True, "processes": None})]


def test_effects_are_paired_and_as_wide_as_seeds_and_problems_make_them(regimes, modules):
    regime, results = load(regimes), modules.results
    # Of four problems, GRPO solves one and two on its two seeds, the other arm two and four.
    rows = made(results, "verdict", regime.arms, [[0.2, 0.5], [0.2, 0.5], [0.5, 1.0], [0.5, 1.0]])
    found = modules.effects.Results(regime, rows)
    by_end = found.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="tokens", along=False)
    assert by_end.mean == 37.5 and by_end.high - by_end.mean >= 12.7 * 12.5 / 1.0001 and not by_end.clear
    level = found.effect("G2RL", "GRPO", metric="pass_at_16", cost="tokens")
    assert (level.mean, level.low, level.high) == (0, 0, 0)  # one problem sometimes, another always, two never
    along = found.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="step")
    assert along.mean == pytest.approx(18.75)
    assert found.effect("G2RL", "G2RL, shuffled", metric="greedy_accuracy", cost="step").mean == 0
    assert found.effect("SESA", "GRPO", metric="greedy_accuracy", cost="step") is None
    untrained = [row | {"trained_tokens": 0.0} if row["arm"] == "G2RL" else row for row in rows]
    no_loss = modules.effects.Results(regime, untrained)
    assert no_loss.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="trained_tokens") is None
    assert no_loss.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="tokens").mean == pytest.approx(18.75)
    one = modules.effects.Results(regime, [row for row in rows if row["seed"] == 0])
    single = one.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="step")
    assert str(single) == "+12.5 (one seed)" and not single.clear


def test_the_report_says_what_is_not_admitted_and_compares_with_controls(regimes, modules):
    regime, results, report = load(regimes), modules.results, modules.report
    rows = made(results, "verdict", regime.arms, [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0], [0.5, 0.5]], regime)
    rows += made(results, "admission", regime.arms[:2], [[0.5, 0.5], [0.5, 0.5]], regime)
    rows = [row | {"trained_tokens": 0.0} if row["arm"] == "G2RL" else row for row in rows]  # no group had contrast
    results.write_results(regime.path, rows, METRICS)
    again = results.to_runs(results.read_results(regime.path), "verdict")[0].points[1]
    assert again["tokens"] == 10 and again["correct"] == [8, 12, 0, 0]
    report.report([regime], Path("results"))
    text = Path("results.md").read_text()
    assert "Limited neither by samples nor variety. 4x against GRPO over 2 steps, greedy along the curve: +0.0" in text
    assert "| G2RL | learning_rate 0.001, novelty_weight 1.0 | 100.0 |" in text
    [line] = [line for line in text.splitlines() if line.startswith("| G2RL - GRPO |")]
    assert line.split("|")[2].strip() == "+25.0 (two seeds)"  # equal steps
    assert not line.split("|")[4].strip()  # equal tokens in the loss
    assert "## Verdicts" not in text  # nothing to be said of a method where exploration has nothing to give
    assert "| G2RL - G2RL, shuffled |" in text and Path("forest.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_counts_and_draws_what_training_gains_and_loses(regimes, modules):
    regime, results = load(regimes), modules.results
    rows = made(results, "verdict", regime.arms, [[0.5, 0.5]] * 4, regime)
    rows += made(results, "admission", regime.arms[:2], [[0.5, 0.5]] * 2, regime)
    results.write_results(regime.path, rows, METRICS)
    modules.report.report([regime], Path("results"))
    text = Path("results.md").read_text()
    assert "newly solved" not in text and "Began at other values" not in text and not Path("changes.png").exists()

    for row in rows[:16]:  # the verdicts
        row["end_correct"] = [6, 0, 0, 9] if row["step"] else [0, 5, 9, 9]
    rows[8]["greedy_accuracy"] = 0.25  # where the third arm begins on its first seed
    results.write_results(regime.path, rows, METRICS)
    modules.report.report([regime], Path("results"))
    lines = Path("results.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| G2RL | 9.4") and line.endswith("| 1.0 | 2.0 |")]
    assert Path("changes.png").read_bytes().startswith(b"\x89PNG")
    assert 'Began at other values than GRPO ("The same start" in evidence.md says why): G2RL (1 of 2 seeds).' in lines


def test_seconds_of_verdicts_are_of_one_sitting(regimes, results):
    regime = load(regimes)
    rows = made(results, "verdict", regime.arms, [[0.5, 0.5]] * 4, regime)
    timed = made(results, "seconds", regime.arms, [[0.5]] * 4, regime)
    for row, factor in zip(timed, [1, 1, 1, 1, 3, 3, 3, 3], strict=True):  # two points for each of four arms
        row["cpu_seconds"] *= factor
    rows[3]["tokens"] = 20.0  # the end of the baseline's second seed, twice as far as what was timed
    again = results.timed_alike(rows + timed)
    ends = [row["cpu_seconds"] for row in again if row["stage"] == "verdict" and row["step"] == 10]
    assert ends == [10, 20, 10, 10, 30, 30, 30, 30] and rows[9]["cpu_seconds"] == 10
    assert [row for row in again if row["stage"] == "seconds"] == timed
    # Of several runs of an arm it is the mean.
    factors = [0.5, 2.0, 0.5, 0.5]
    more = [{**row, "seed": 1, "cpu_seconds": row["cpu_seconds"] * factors[i // 2]} for i, row in enumerate(timed)]
    ends = [row["cpu_seconds"] for row in results.timed_alike(rows + timed + more) if row["stage"] == "verdict"]
    assert ends[1::2] == [7.5, 15, 15, 15, 22.5, 22.5, 22.5, 22.5]
    # Not where an arm was not timed, or with another setting.
    for lacking in (timed[2:], [*timed[2:], *({**row, "settings": "other"} for row in timed[:2])]):
        assert results.timed_alike([*rows, *lacking]) == [*rows, *lacking]


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rates": [1e-4, 1e-2]},
        comparison(num_eval=5),
        {"seeds": {**REGIME["seeds"], "verdict": [0, 2]}},
        {"arms": [*third_arm(options={"min_correct": 1})["arms"], ARMS[3]]},
    ],
)
def test_what_was_measured_in_another_way_is_not_reported(regimes, modules, change, capsys, plan):
    regime, results, report = load(regimes), modules.results, modules.report
    rows = made(results, "verdict", regime.arms, [[0.5, 0.5]] * 4, regime)
    rows += made(results, "admission", regime.arms[:2], [[0.5, 0.5]] * 2, regime)
    assert all(plan.asked_for(regime, row) for row in rows)
    changed = load(regimes, **change)
    left_out = {(row["arm"], row["seed"]) for row in rows if not plan.asked_for(changed, row)}
    only_g2rl, one_seed = "arms" in change, "seeds" in change
    assert {arm for arm, _ in left_out} == ({"G2RL"} if only_g2rl else {arm["name"] for arm in ARMS})
    assert {seed for _, seed in left_out} == ({1} if one_seed else {0, 1})
    results.write_results(changed.path, rows, METRICS)
    if only_g2rl:
        report.report([changed], Path("results"))
        assert "2 runs do not match the regime's file and are left out: G2RL\n" in capsys.readouterr().out
        assert "| G2RL | " not in Path("results.md").read_text()
    elif not one_seed:
        with pytest.raises(SystemExit, match="no results yet"):
            report.report([changed], Path("results"))
        # Two seeds of 4 arms in the stage `verdict`, and of 2 arms in the stage `admission`.
        assert "12 runs do not match the regime's file" in capsys.readouterr().out


def test_verdicts_tell_what_is_clear_from_what_is_not(regimes, modules):
    regime, results, report = load(regimes), modules.results, modules.report
    rows = made(results, "verdict", regime.arms, [[0.1] * 3, [0.1] * 3, [1.0] * 3, [0.1, 1.0, 0.1]])
    rows += made(results, "admission", regime.arms[:2], [[0.1, 0.1], [1.0, 1.0]])
    text = "\n".join(report.verdicts([modules.effects.Results(regime, rows)]))
    assert "- **G2RL.** Against GRPO at equal generated tokens: clearly ahead in small +" in text
    assert "Against its controls at equal generated tokens: neither clearly in small, G2RL, shuffled +" in text
    assert "clearly behind" not in text and "At equal CPU seconds: clearly ahead" in text

    # Of two seeds nothing is called clear.
    found = modules.effects.Results(regime, [row for row in rows if row["seed"] < 2])
    text = "\n".join(report.verdicts([found]))
    assert "clearly ahead" not in text and "(two seeds)" in text and "±" not in text
    effect = found.effect("G2RL", "GRPO", metric="greedy_accuracy", cost="tokens")
    assert effect.seeds == 2 and not effect.has_interval


@pytest.mark.slow
def test_a_frontier_waits_for_the_last_seed(modules):
    """The report can be made while runs of the verdict are missing."""
    regime = modules.plan.Regime.load(BENCHMARKS / "regimes" / "coverage.yaml")
    rows = modules.results.read_results(regime.path)
    whole = modules.effects.Results(regime, rows)
    assert {"SESA", "G2RL"} <= whole.places().keys()
    for of in (regime.arms[0]["name"], "SESA"):
        missing = [row for row in rows if (row["stage"], row["arm"], row["seed"]) != ("verdict", of, 33)]
        assert len(missing) < len(rows)
        found = modules.effects.Results(regime, missing)
        assert found.places() == {} and any(line.startswith("| SESA - GRPO") for line in modules.report.table(found))


@pytest.mark.parametrize(("more", "anyway", "stages"), [(0.0, False, 7), (0.0, True, 8), (1.0, False, 8)])
def test_a_regime_that_is_not_admitted_ends_there(regimes, results, monkeypatch, more, anyway, stages):
    regime = load(regimes)
    rows = made(results, "admission", regime.arms[:2], [[0.0, 0.0], [more, more]])
    results.write_results(regime.path, rows, METRICS)
    monkeypatch.setattr(regimes, "STAGES", regimes.STAGES[:8])
    seen = []
    monkeypatch.setattr(regimes, "train_stage", lambda regime, stage, *rest, **more: seen.append(stage))
    regimes.train(regime, Path("out"), anyway=anyway)
    assert seen == list(regimes.STAGES[:stages])


def test_what_is_missing_is_said_with_the_time_it_takes(regimes, results, plan):
    regime = load(regimes)
    text = regimes.outlook([regime], None)
    assert "small: 34 runs missing (admission rates 4, admission 4, rates 4, knob 2, collapse 2" in text
    assert text.endswith("the time is unknown until a first run has finished")
    arms = plan.stage_arms(regime, "admission rates", [])
    rows = made(results, "admission rates", arms, [[0.2]] * 4)
    for row in rows:
        arm = next(arm for arm in arms if arm["name"] == row["arm"])
        row["seed"], row["settings"] = 7, results.settings_of(regime.document("admission rates", []), arm)
        row["seconds"] = 600.0
    results.write_results(regime.path, rows[:-2], METRICS)
    assert "31 runs missing (admission rates 1, admission 4" in regimes.outlook([regime], 2)
    results.write_results(regime.path, rows, METRICS)
    # 26 runs in pairs, and the 4 runs of the stage `seconds` one at a time: 17 times 600 seconds and the overhead.
    assert "seconds 4)" in regimes.outlook([regime], 2)
    assert regimes.outlook([regime], 2).endswith("about 4.2 hours, estimated from 4 finished runs")
    assert regimes.outlook([regime], None).endswith("about 7.5 hours, estimated from 4 finished runs")


@pytest.mark.slow
def test_results_outlive_the_folder_and_are_not_trained_again(regimes):
    regime = load(regimes)
    regimes.train(regime, Path("out"), anyway=True)
    first = regime.path.read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert {row["stage"] for row in rows} == {stage for stage in regimes.STAGES if not stage.startswith("rival")}
    verdict = {(row["arm"], row["seed"]) for row in rows if row["stage"] == "verdict"}
    assert verdict == {(arm["name"], seed) for arm in ARMS for seed in ("0", "1")}
    assert {row["stage"] for row in rows if row["correct"]} == {"admission", "collapse", "verdict"}
    many = {(row["arm"], row["step"] == "0") for row in rows if row["end_correct"]}
    assert many == {("GRPO", True), *((arm["name"], False) for arm in ARMS)}
    assert {len(row["end_correct"]) for row in rows if row["stage"] == "verdict"} == {0, 8}
    assert {row["step"] for row in rows if row["stage"] == "admission"} == {"0", "1", "2"}
    tokens = [float(row["tokens"]) for row in rows if row["stage"] == "verdict"]
    assert max(tokens) >= 48 and min(tokens) == 0

    shutil.rmtree("out")
    regimes.train(regime, Path("out"), anyway=True)
    assert regime.path.read_text() == first and not list(Path("out").rglob("checkpoint-*"))

    # Another knob of one arm, in the same folder: only that arm is trained again.
    changed = load(regimes, **third_arm(knob={"novelty_weight": [0.25, 2.0]}))
    regimes.train(changed, Path("out"), anyway=True)
    rows = list(csv.DictReader(open(regime.path)))
    tried = {row["arm"] for row in rows if row["stage"] == "method knob"}
    assert tried == {"G2RL: novelty_weight 2.0"}
    assert {row["arm"] for row in rows if row["stage"] == "verdict"} == {"GRPO", "4x", "G2RL"}
    trained = [path.parts[2:4] for path in Path("out").rglob("checkpoint-*")]
    assert {name.split("-")[0] for place, name in trained if not place.startswith("seconds")} == {"g2rl"}
    # All are timed again, in one sitting.
    assert {name.split("-")[0] for place, name in trained if place.startswith("seconds")} == {"g2rl", "grpo", "4x"}

    # Another budget: nothing of what was there can stand beside it.
    longer = load(regimes, arms=ARMS[:2], **comparison(budget={"tokens": 64}))
    regimes.train(longer, Path("out"), anyway=True)
    rows = list(csv.DictReader(open(regime.path)))
    ends = [float(row["tokens"]) for row in rows if row["stage"] == "verdict" and int(row["step"]) > 0]
    assert len({row["settings"] for row in rows if row["stage"] == "verdict"}) == 2 and max(ends) >= 64


def test_a_stage_that_was_stopped_keeps_its_finished_runs(regimes, results, monkeypatch):
    """`trl-explore compare`, which a stage calls, has tests of its own."""

    def stopped_after_a_run(command):
        place = ComparisonFolder(read_comparison(yaml.safe_load(Path(command[2]).read_text())), Path(command[4]))
        arm, seed = next(iter(place.missing()))
        place.of_run(arm, seed).mkdir()
        run = Run(arm.name, seed, [point(0, 0.0, [0] * 4, [0] * 4), point(10, 0.5, [0] * 4, [0] * 4)], [])
        run.save(place.of_run(arm, seed) / "run.json")
        return 130

    regime = load(regimes)
    monkeypatch.setattr(sys.modules["stages"], "main", stopped_after_a_run)
    with pytest.raises(SystemExit, match="130"):
        regimes.train(regime, Path("out"))
    assert [row["arm"] for row in results.read_results(regime.path)] == ["GRPO: learning_rate 0.0001"] * 2


def test_a_gpu_gets_a_larger_model_and_results_of_its_own(regimes, plan):
    large = plan.enlarged(load(regimes))
    assert large.path.name == "small-large.csv" and large.seeds_of("admission") == [0, 1]
    assert large.seeds_of("seconds") == []  # a slice may be shorter than a sitting
    arms = plan.stage_arms(large, "rates", [])
    assert [arm["options"]["learning_rate"] for arm in arms[:2]] == [1e-5, 1e-4]
    document = large.document("rates", arms)
    assert document["common"]["bf16"] and not document["common"]["use_cpu"]
    size = sum(p.numel() for p in build_model(seed=0, **document["model_size"]).parameters())
    assert 50e6 < size < 100e6


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "regimes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_regimes_can_be_compared(modules, path):
    regime = modules.plan.Regime.load(path)  # which has `trl-explore compare` check every arm
    assert not {*regime.seeds_of("rates"), *regime.seeds_of("knob")} & set(regime.seeds_of("verdict"))
    assert len(regime.seeds_of("verdict")) >= 5

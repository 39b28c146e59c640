"""The benchmark of a pretrained model: its arms, how settings are chosen, its results file, and its tables."""

import dataclasses
import importlib
import signal
import sys

import pytest
import torch
import yaml
from commands import EXAMPLES

from trl_explore.compare.settings import read_comparison
from trl_explore.errors import UsageError
from trl_explore.tasks.tiny_model import build_model

BENCHMARKS = EXAMPLES / "benchmarks"
METRICS = ["pass_at_1", "pass_at_8", "greedy_accuracy"]


@pytest.fixture
def pretrained(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("pretrained")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "curves.png")
    return module


def rows_of(task, stage, rows, heights):
    """Return the rows of a stage: two evaluations per run. `heights` has the last value of each arm by its name, and
    arms without a name in it get 0.2."""
    settings_of = importlib.import_module("regimes_results").settings_of
    document = task.document(stage, rows)
    found = []
    for arm in document["arms"]:
        for seed in document["seeds"]:
            for number, cost in enumerate((0, 100)):
                head = {"stage": stage, "arm": arm["name"], "seed": seed, "version": "v"}
                head |= {"settings": settings_of(document, arm), "options": "{}", "correct": []}
                head |= {"greedy_correct": [], "entropy": None, "frac_reward_zero_std": None}
                costs = dict.fromkeys(("step", "tokens", "trained_tokens", "seconds", "cpu_seconds"), float(cost))
                value = number * heights.get(arm["name"], 0.2)
                training = {"entropy": 0.1, "frac_reward_zero_std": 0.5} if number else {}
                found.append(head | costs | dict.fromkeys(task.comparison["metrics"], value) | training)
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_all_arms_of_all_tasks_are_valid(pretrained):
    for task in pretrained.read_tasks().values():
        rows = rows_of(task, "rates", [], {})
        rows += rows_of(task, "fields", rows, {})
        for stage in task.stages:
            document = task.document(stage, rows)
            comparison = read_comparison(document)
            names = [arm.name for arm in comparison.arms]
            assert len(names) == len(set(names)) >= 1
            assert len(comparison.task.held_out_rows(comparison.num_eval)) == comparison.num_eval
        assert set(task.advantages) <= {arm["name"] for arm in task.arms}


def test_each_stage_gets_the_best_values_of_the_stages_before_it(pretrained):
    task = pretrained.read_tasks()["jugs"]
    assert task.document("verdict", [])["arms"][0]["options"] == {"learning_rate": task.first_rate}
    rows = rows_of(task, "rates", [], {"GRPO, 1e-05": 0.9})
    fields = {arm["name"]: arm for arm in task.document("fields", rows)["arms"]}
    assert all(arm["options"]["learning_rate"] == 1e-5 for arm in fields.values())
    assert {"pass@k, passk_k 2", "pass@k, passk_k 4"} <= fields.keys() and "GRPO" not in fields
    # Until the fields are chosen, the verdict has only the arms without a choice.
    early = [arm["name"] for arm in task.document("verdict", rows)["arms"]]
    assert early == ["GRPO", "auto", "resampling alone"]
    chosen = {"pass@k, passk_k 4": 0.8, "MaxRL, num_iterations 2": 0.7, "PODS, trained_generations 16": 0.3}
    rows += rows_of(task, "fields", rows, chosen)
    arms = {arm["name"]: arm["options"] for arm in task.document("verdict", rows)["arms"]}
    assert list(arms)[:4] == ["GRPO", "auto", "auto, pass@k", "resampling alone"]
    assert arms["GRPO"] == arms["auto"] == {"learning_rate": 1e-5}
    assert arms["auto, pass@k"] == arms["pass@k"] == {"learning_rate": 1e-5, "advantage": "passk", "passk_k": 4}
    assert arms["MaxRL"]["num_iterations"] == 2 and arms["PODS"]["trained_generations"] == 16


def test_shuffled_rewards_keep_the_rewards_and_lose_the_rows(pretrained):
    rewards = torch.zeros(8, 4)
    rewards[0] = 1.0
    advantages = pretrained.advantages_of_shuffled_rewards(rewards)
    assert torch.equal(advantages, pretrained.advantages_of_shuffled_rewards(rewards))
    assert advantages.sum(dim=1).abs().max() < 1e-4
    assert (advantages > 0).sum() == 4  # as many successes as before
    assert (advantages[1:] > 0).any()


def test_a_part_of_the_arms_can_be_trained_and_keeps_the_runs_of_the_others(pretrained, tmp_path):
    results = importlib.import_module("regimes_results")
    task = pretrained.read_tasks()["countdown"]
    rows = rows_of(task, "rates", [], {})
    rows += rows_of(task, "verdict", rows, {})
    kept = [row for row in rows if row["stage"] == "rates" or row["arm"] == "resampling alone"]
    results.write_results(task.path, kept, METRICS)
    found = results.read_results(task.path)
    part = task.stage("verdict", found, tmp_path / "out", ["GRPO", "auto"])
    assert {arm for arm, _ in part.finished(found)} == {"resampling alone"}
    assert len(part.missing(found)) == 6 == len(task.stage("verdict", found, tmp_path / "out").missing(found))
    part.collect()
    assert len(results.read_results(task.path)) == len(kept)
    # With another budget, the runs of the verdict do not count, but the file keeps them.
    other = dataclasses.replace(part, document={**part.document, "budget": {"tokens": 1}})
    assert not other.finished(found) and {row["stage"] for row in other.without_stale(found)} == {"rates"}
    other.collect()
    assert results.read_results(task.path) == found
    with pytest.raises(UsageError, match="stage verdict: unknown arm 'Auto'; did you mean 'auto'"):
        task.stage("verdict", found, tmp_path / "out", ["GRPO", "Auto"])


def test_the_runs_of_another_learning_rate_are_not_in_the_tables(pretrained):
    results = importlib.import_module("regimes_results")
    task = pretrained.read_tasks()["countdown"]
    early = rows_of(task, "verdict", [], {})  # at the first rate
    results.write_results(task.path, early, METRICS)
    assert "| pass@1 | auto | 3 |" in pretrained.report([task])
    rates = rows_of(task, "rates", [], {"GRPO, 1e-05": 0.9})
    results.write_results(task.path, [*rates, *early], METRICS)
    text = pretrained.report([task])
    assert "| GRPO, 1e-05 |" in text and "| auto |" not in text


def test_the_table_has_paired_differences_and_names_other_starts(pretrained):
    results = importlib.import_module("regimes_results")
    task = pretrained.read_tasks()["jugs"]
    rows = rows_of(task, "rates", [], {})
    rows += rows_of(task, "verdict", rows, {"GRPO": 0.2, "auto": 0.4})
    results.write_results(task.path, rows, task.comparison["metrics"])
    text = pretrained.report([task])
    # The curves are lines from 0, so half of the difference at the end is their difference along the curve.
    assert "| pass@1 | auto | 3 | 0.0 | 40.0 | +10.0 ± 0.0 |" in text
    assert "| pass@1 | GRPO | 3 | 0.0 | 20.0 |  |" in text
    assert "Seeds whose model" not in text
    for row in rows:
        if row["stage"] == "verdict" and (row["arm"], row["seed"], row["step"]) == ("auto", 12, 0.0):
            row["pass_at_1"] = 0.1
    results.write_results(task.path, rows, task.comparison["metrics"])
    assert "Seeds whose model before training was not GRPO's: auto: 12." in pretrained.report([task])
    pretrained.draw([task], pretrained.PICTURE)
    assert pretrained.PICTURE.stat().st_size > 1000
    assert pretrained.status([task]).startswith("jugs: missing: fields 14, verdict ")


def test_the_table_of_samples_has_a_row_per_problem(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    samples = importlib.import_module("pretrained_samples")
    completions = {"before training": [("1 + 2 = 3\n", 0.0), ("", None)], "GRPO": [("a | b\nc", 1.0), ("d", 0.5)]}
    assert samples.table(["Make 3.", "Make 4.\nNow."], completions).splitlines() == [
        "| problem | before training | GRPO |",
        "| --- | --- | --- |",
        r"| Make 3. | 1 + 2 = 3<br>*reward 0* | a \| b<br>c<br>*reward 1* |",
        "| Make 4.<br>Now. | <br>*no reward* | d<br>*reward 0.5* |",
    ]
    assert samples.last_message([{"role": "user", "content": "Make 3."}]) == samples.last_message("Make 3.")


def test_the_committed_table_has_the_committed_results_with_todays_settings(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pretrained = importlib.import_module("pretrained")
    results = importlib.import_module("regimes_results")
    tasks = pretrained.read_tasks()
    assert (pretrained.RESULTS / "results.md").read_text() == pretrained.report(list(tasks.values()))
    for task in tasks.values():
        rows = results.read_results(task.path)
        for stage in task.stages:
            assert task.stage(stage, rows).without_stale(rows) == rows, f"{task.name}, {stage}: other settings"


@pytest.mark.slow
def test_all_stages_run_and_a_second_call_trains_nothing(pretrained, tmp_path, monkeypatch, capsys):
    task = {
        "comparison": {"task": "chain", "warm_start_steps": 2, "num_eval": 4, "metrics": METRICS},
        "arms": [{"name": "G2RL", "method": "g2rl", "choice": {"min_correct": [1, 0]}}],
    }
    stage = {"seeds": [1], "budget": {"tokens": 48}, "evaluations": 1}
    document = yaml.safe_load(pretrained.SETTINGS.read_text())
    document |= {
        "comparison": {"common": {"per_device_train_batch_size": 8, "num_generations": 8}},
        "learning_rates": [1e-4, 1e-3],
        "stages": {name: stage for name in document["stages"]},
        "arms": document["arms"][:5],
        "tasks": {"chain": task},
    }
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setattr(pretrained.read_tasks, "__defaults__", (settings,))
    monkeypatch.setattr(sys, "argv", ["pretrained.py", "train", "--output_dir", str(tmp_path / "out")])
    handler = signal.getsignal(signal.SIGINT)
    pretrained.main()
    signal.signal(signal.SIGINT, handler)
    first = (tmp_path / "results" / "chain.csv").read_text()
    (chain,) = pretrained.read_tasks().values()
    path = tmp_path / "results" / "chain_steps.csv"
    steps = importlib.import_module("stages").read_steps(path)
    assert {row["stage"] for row in steps} == set(chain.stages)
    assert any(row["explore/share/resample"] for row in steps if row["arm"] == "resampling alone")
    assert pretrained.status([chain]) == "chain: complete"
    build_model(seed=0)  # the random state of a later call is another one
    pretrained.main()
    assert (tmp_path / "results" / "chain.csv").read_text() == first
    assert importlib.import_module("stages").read_steps(path) == steps
    monkeypatch.setattr(sys, "argv", ["pretrained.py", "report"])
    capsys.readouterr()
    pretrained.main()
    told = capsys.readouterr().out
    assert "| shuffled |" in told and "| auto, " in told and "| G2RL |" in told
    assert pretrained.PICTURE.is_file()

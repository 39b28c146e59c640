"""`trl-explore compare` as it is typed: a model and data of one's own, embedded tasks, mistakes, and going on."""

import csv
import json
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
import yaml
from world import make_dataset, make_model, make_tokenizer

from trl_explore.cli import main
from trl_explore.compare.folder import ComparisonFolder
from trl_explore.compare.run import held_out_split
from trl_explore.compare.settings import read_comparison, run_arguments

REWARDS = """
import os
import signal
from pathlib import Path

def contains_answer(completions, answer, trainer_state=None, **kwargs):
    if Path("silence").exists() and trainer_state.global_step and len(answer) == 32:  # an evaluation after training
        return [None] * len(answer)
    if Path("nonsense").exists() and trainer_state.global_step:
        return ["good"] * len(answer)
    stop = Path("stop")
    how, step = stop.read_text().split() if stop.exists() else ("", "0")
    if how and trainer_state.global_step >= int(step):
        stop.unlink()
        if how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        elif how == "ctrl-c-parent":
            os.kill(os.getppid(), signal.SIGINT)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise RuntimeError("the reward service is gone")
    return [1.0 if right in text else 0.0 for text, right in zip(completions, answer)]

def other(completions, **kwargs):
    return [0.0] * len(completions)
"""
OWN = {
    "model_name_or_path": "./tiny",
    "dataset_name": "data.jsonl",
    "reward_funcs": ["compare_rewards.contains_answer"],
    "budget": {"tokens": "4e2"},
    "seeds": [0],
    "metrics": ["reward", "maj@2"],
    "evaluations": 3,
    "num_eval": 4,
    "common": {
        **dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8),
        **dict(learning_rate="1e-2", use_cpu=True, bf16=False),
    },
    "arms": [
        {"method": "grpo"},
        {"name": "DEEP, 2", "method": "deep_grpo", "options": {"num_branches": 2, "max_pivots_per_batch": 1}},
    ],
}
TINY_TASK = {
    "task": "examples.benchmarks.tasks:PATHS",
    "warm_start_steps": 2,
    "budget": {"seconds": 1e3},
    "evaluations": 1,
    "num_eval": 2,
    "common": {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1},
    "metrics": ["coverage_at_8"],
}


pytestmark = pytest.mark.xdist_group("compare")  # many look at one finished comparison


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model, its data and a module of rewards."""
    folder = tmp_path_factory.mktemp("files")
    make_model().save_pretrained(folder / "tiny")
    make_tokenizer().save_pretrained(folder / "tiny")
    make_dataset().to_json(folder / "data.jsonl")
    (folder / "compare_rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A working directory with these files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    sys.modules.pop("compare_rewards", None)
    return tmp_path


def compare(document, *flags):
    Path("run.yaml").write_text(yaml.safe_dump(document))
    return main(["compare", "--config", "run.yaml", *flags])


def curves(folder):
    """What was measured, without what depends on the machine's speed."""
    with open(Path(folder) / "curves.csv", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def stamps(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in Path(folder).glob("*/run.json")}


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A finished comparison of one seed, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(files, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        sys.modules.pop("compare_rewards", None)
        assert compare(OWN, "--output_dir", "out") == 0
    return folder / "out", out.getvalue(), err.getvalue()


def test_a_model_and_data_of_ones_own_are_compared_at_equal_tokens(whole):
    folder, out, err = whole
    assert "DEEP, 2" in out and "- GRPO" in out and "One seed: there is no interval" in out
    assert "2/2 DEEP, 2, seed 0" in err  # the progress line
    rows = curves(folder)
    assert {row["arm"] for row in rows} == {"GRPO", "DEEP, 2"}
    for arm in ("GRPO", "DEEP, 2"):
        trained = [float(row["trained_tokens"]) for row in rows if row["arm"] == arm]
        assert trained[0] == 0 and trained == sorted(trained) and trained[-1] > 0
        tokens = [float(row["tokens"]) for row in rows if row["arm"] == arm]
        assert tokens[0] == 0 and tokens == sorted(tokens) and tokens[-2] < 400 <= tokens[-1]
        if arm == "GRPO":
            assert trained == pytest.approx(tokens)  # all that it generates is in its loss
        assert [int(count * 3 / 400) for count in tokens] == [0, 1, 2, 3]  # an evaluation in each third
    costs = "tokens | wall seconds | CPU seconds | wall s/step"
    assert (folder / "table.md").read_text().startswith(f"| arm | reward | maj@2 (%) | {costs} |")
    assert len(list((folder / "deep-2-seed0").glob("checkpoint-*"))) == 2


def test_a_falling_share_falls_over_the_budget(workdir):
    arm = {"method": "sesa", "options": {"explore_share_end": 0.0, "max_sketch_length": 4}}
    assert compare({**OWN, "budget": {"tokens": "2e3"}, "arms": [arm], "evaluations": 1}, "--output_dir", "out") == 0
    (path,) = Path("out").glob("*/run.json")
    steps = json.loads(path.read_text())["steps"]
    shares = [step["explore_share"] for step in steps]
    assert len(shares) > 12 and shares[0] == 1.0
    late = shares[-len(shares) // 4 :]
    assert sum(late) / len(late) < 0.4


def test_a_finished_comparison_grows_by_seeds_and_arms(whole, workdir, capsys):
    shutil.copytree(whole[0], "out")
    before, rows = stamps("out"), curves("out")
    assert compare({**OWN, "seeds": [0, 1]}, "--output_dir", "out") == 0
    after = stamps("out")
    assert {name: after[name] for name in before} == before
    assert len(after) == 4 and "Two seeds: there is no interval" in capsys.readouterr().out
    assert [row for row in curves("out") if row in rows] == rows
    added = {"name": "no std", "method": "grpo", "options": {"scale_rewards": "none"}}
    grown = ComparisonFolder(read_comparison({**OWN, "seeds": [0, 1], "arms": [*OWN["arms"], added]}), "out")
    assert [(arm.name, seed) for arm, seed in grown.missing()] == [("no std", 0), ("no std", 1)]

    # The folder's own settings are a file to go on with; fewer seeds are another comparison.
    assert main(["compare", "--config", "out/comparison.yaml", "--output_dir", "out", "--seeds", "0"]) == 2
    assert "'out' holds another comparison: seeds: 1 in the folder, not in this comparison" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["training rows", "model"])
def test_other_data_or_another_model_of_the_same_name_are_refused(whole, workdir, capsys, changed):
    shutil.copytree(whole[0], "out")
    more = {**OWN, "seeds": [0, 1]}
    if changed == "model":
        make_model(seed=7).save_pretrained("tiny")
    else:
        make_dataset().map(lambda row: {"answer": ""}).to_json("data.jsonl")
    assert compare(more, "--output_dir", "out") == 2
    assert f"'out' holds runs of other inputs. Changed under the same name: {changed}." in capsys.readouterr().err
    assert list(stamps("out")) == list(stamps(whole[0]))
    assert compare(OWN, "--output_dir", "out") == 0  # the results of finished runs can still be shown


def test_a_comparison_that_was_stopped_twice_goes_on_as_if_it_had_not_been(whole, workdir, capsys):
    shutil.copytree(whole[0], "out")
    shutil.rmtree("out/deep-2-seed0")
    finished = stamps("out")
    Path("stop").write_text("ctrl-c 1")
    assert compare(OWN, "--output_dir", "out") == 130
    command = "trl-explore compare --config run.yaml --output_dir out"
    assert capsys.readouterr().err.splitlines()[-1].strip() == command
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    Path("stop").write_text("error 3")
    assert compare(OWN, "--output_dir", "out") == 2
    assert "'contains_answer' raised RuntimeError in compare_rewards.py, line 22: the rew" in capsys.readouterr().err
    assert stamps("out") == finished

    assert main(["compare", "--config", "out/comparison.yaml", "--output_dir", "out"]) == 0
    assert stamps("out").items() >= finished.items()
    assert curves("out") == curves(whole[0])


@pytest.mark.slow
def test_runs_in_processes_stop_in_order_and_give_what_they_give_one_after_the_other(whole, workdir, capsys):
    command = "trl-explore compare --config run.yaml --output_dir out --processes 2"
    flags = ["--output_dir", "out", "--processes", "2"]
    killed = "was killed, probably because the machine ran out of memory; what is done is kept. Continue with:"
    stopped = "Stopped; what is done is kept. Continue with:"
    for how, code, words in (("kill", 1, killed), ("ctrl-c-parent", 130, stopped)):
        Path("stop").write_text(f"{how} 1")
        assert compare(OWN, *flags) == code
        error = capsys.readouterr().err
        assert words in error and error.splitlines()[-1].strip() == command
        assert "Traceback" not in error
        assert len(stamps("out")) < 2
    assert list(Path("out").glob("*/checkpoint-*"))
    assert compare(OWN, *flags) == 0
    shown = capsys.readouterr().out
    assert "2/2 " in shown and "seed 0: reward 0." in shown
    assert curves("out") == curves(whole[0])


def test_an_evaluation_without_any_reward_ends_in_a_sentence_and_loses_nothing(whole, workdir, capsys):
    shutil.copytree(whole[0], "out")
    shutil.rmtree("out/deep-2-seed0")
    finished = stamps("out")
    Path("silence").touch()
    assert compare(OWN, "--output_dir", "out") == 2
    assert (
        "trl-explore: error: DEEP, 2, seed 0: reward_funcs=['compare_rewards.contains_answer'] returned no reward for "
        "any sample of the 4 held-out rows, so nothing can be measured. Correct the columns of these rows"
    ) in capsys.readouterr().err
    assert stamps("out") == finished
    assert list(Path("out/deep-2-seed0").glob("checkpoint-*"))
    Path("silence").unlink()
    assert compare(OWN, "--output_dir", "out") == 0
    assert curves("out") == curves(whole[0])


@pytest.mark.parametrize("processes", [None, 1])
def test_a_wrong_reward_names_the_run_and_how_to_continue(whole, workdir, capsys, processes):
    shutil.copytree(whole[0], "out")
    shutil.rmtree("out/deep-2-seed0")
    Path("nonsense").touch()
    more = [] if processes is None else ["--processes", str(processes)]
    assert compare(OWN, "--output_dir", "out", *more) == 2
    shown = capsys.readouterr().err
    assert "trl-explore: error: DEEP, 2, seed 0: " in shown and "'good' for completion 0" in shown
    assert "; what is done is kept. Continue with:\n  trl-explore compare " in shown
    assert "Traceback" not in shown


def test_checkpoints_with_nothing_left_to_train_or_without_their_record_are_passed_over(whole, workdir):
    shutil.copytree(whole[0], "out")
    run = Path("out/grpo-seed0")
    (run / "run.json").unlink()  # as if it had been killed while it evaluated the last model
    last, before = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    assert json.loads((last / "comparison.json").read_text())["finished"]
    (before / "comparison.json").unlink()
    assert compare(OWN, "--output_dir", "out") == 0
    assert curves("out") == curves(whole[0])


def test_held_out_rows_are_never_trained_on(workdir):
    def split(**changes):
        comparison = read_comparison({**OWN, **changes})
        arguments = run_arguments(comparison, comparison.arms[0], seed=0, folder="out")
        train, rows = held_out_split(comparison, arguments)
        return {row["prompt"] for row in train}, {row["prompt"] for row in rows}

    train, held_out = split()
    assert len(held_out) == 4 and len(train) == 32 and not train & held_out
    assert split()[1] == held_out
    Path("data").mkdir()
    for name, rows in (("train", range(30)), ("test", range(30, 36))):
        make_dataset().select(rows).to_json(f"data/{name}.jsonl")
    train, held_out = split(dataset_name="data", dataset_test_split="test")
    assert len(train) == 30 and held_out == {"5+0=", "5+1=", "5+2=", "5+3="}


# The changes that make a document of an embedded task.
OF_TASK = {"task": "doors", "model_name_or_path": None, "dataset_name": None, "reward_funcs": None, "arms": None}


def common(**fields):
    return {"common": {**OWN["common"], **fields}}


def deep(**options):
    return {"arms": [{"method": "deep_grpo", "options": options}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain"}, "dataset_name: `task` has its own model, data and reward; leave one of the two out"),
        ({"model_name_or_path": None}, "nothing to train: give `task` (an embedded task) or `model_name_or_path`"),
        ({"model_name_or_path": "./tiny2"}, "model_name_or_path='tiny2' does not exist"),
        ({"dataset_name": "dota.jsonl"}, "did you mean 'data.jsonl'?"),
        ({"reward_funcs": ["accuracy"]}, "did you mean 'accuracy_reward'?"),
        ({"reward_funcs": ["compare_rewards.other", "compare_rewards.contains_answer"]}, "success_threshold must be"),
        ({"success_reward": "nobody"}, "`success_reward='nobody'` is none of the reward functions: name one of"),
        ({"budget": None}, "budget is missing: say what is equal for all arms, tokens, seconds or steps"),
        ({"budget": {"tokens": 1, "seconds": 1}}, "give one of tokens, seconds and steps"),
        ({"budget": {"token": 1}}, "budget: unknown field 'token'; did you mean 'tokens'?"),
        ({"budget": {"tokens": "many"}}, "budget.tokens='many': give a number"),
        ({"budget": {"tokens": -1}}, "budget.tokens=-1: it must be positive"),
        ({"budget": {"steps": 2.5}}, "budget.steps=2.5: it must be a whole number of steps"),
        ({"budget": 3}, "budget=3: expected fields with values"),
        ({"seeds": [0, 0]}, "seeds=[0, 0]: give different integers"),
        ({"seeds": ["a"]}, "seeds=['a']: give different integers"),
        ({"seed": 1}, "seed: training fields go under `common`"),
        ({"arm": []}, "unknown field 'arm'; did you mean 'arms'?"),
        ({"arms": []}, "arms=[]: give a list"),
        ({"arms": [{"name": "x"}]}, "arms[0]: method is missing"),
        ({"arms": [{"method": "deep_gpro"}]}, "arms[0]: unknown method 'deep_gpro'; did you mean 'deep_grpo'?"),
        ({"arms": [{"method": "grpo", "option": {}}]}, "arms[0]: unknown field 'option'; did you mean 'options'?"),
        ({"arms": [{"method": "grpo"}] * 2}, "arms[1]: name='GRPO': give each arm letters or digits of its own"),
        ({"arms": [{"name": "../..", "method": "grpo"}]}, "arms[0]: name='../..': give each arm letters or digits"),
        (deep(num_branch=2), "DEEP-GRPO: unknown field of deep_grpo 'num_branch'; did you mean 'num_branches'?"),
        (deep(num_branches=1), "arm DEEP-GRPO: `num_branches=1`"),
        ({"common": {"num_branches": 2}}, "common: num_branches is no field of grpo, but of deep_grpo and branpo"),
        ({"common": {"learning_rat": 1}}, "common: unknown field of grpo 'learning_rat'; did you mean"),
        ({"common": {"seed": 1}}, "common: seed is set by the comparison (it is `seeds`); leave it out"),
        (common(num_generations=3), "arm GRPO: "),
        (common(gradient_accumulation_steps=2, steps_per_generation=1), "steps_per_generation=1 is less than"),
        (common(lr_scheduler_type="cosine"), "lr_scheduler_type='cosine' would last 100,000 steps: set `max_steps`"),
        (
            common(lr_scheduler_type="constant_with_warmup", warmup_steps=0.1),
            "arm GRPO: warmup_steps=0.1 is a share of 100,000 steps: set `max_steps`",
        ),
        ({"metrics": ["pass_at_eight"]}, "metrics: unknown metric 'pass_at_eight'; did you mean 'pass_at_8'?"),
        ({"metrics": ["reward", "reward"]}, "give different names"),
        ({"metrics": ["coverage_at_8"]}, "coverage_k needs a column `targets`"),
        ({"evaluations": 0}, "evaluations=0: give an integer of at least 1"),
        ({"num_eval": 100}, "num_eval=100: the split 'train' is 36 rows long"),
        ({"warm_start_steps": 3}, "only a `task` has a warm start"),
        ({"model_size": {"num_layers": 3}}, "only the model of an embedded `task` is built"),
        ({**OF_TASK, "model_size": {"hidden_size": 100}}, "model_size.hidden_size=100: give a multiple of 16"),
        ({**OF_TASK, "model_size": {"layers": 3}}, "model_size: unknown field 'layers'; did you mean 'num_layers'?"),
        ({**OF_TASK, "model_size": {"num_layers": 0}}, "model_size.num_layers=0: give an integer of at least 1"),
    ],
)
def test_mistakes_in_the_file_are_explained_in_one_line_before_anything_is_trained(changes, message, workdir, capsys):
    document = {name: value for name, value in {**OWN, **changes}.items() if value is not None}
    assert compare(document, "--output_dir", "out") == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert message in error and error.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_arm_whose_package_is_missing_is_named_in_one_line(workdir, capsys):
    arms = [{"method": "grpo"}, {"name": "served", "method": "exploration", "options": {"use_vllm": True}}]
    assert compare({**OWN, "arms": arms}, "--output_dir", "out") == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert error.startswith("arm served: vLLM is not available") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "chian", "--tokens", "1"], "task: unknown task 'chian'; did you mean 'chain'?"),
        (["--task", "chain", "--methods", "sesa"], "sesa does not suit the task chain; it suits doors, deep_doors"),
        (["--tsk", "chain"], "unknown flag '--tsk'; did you mean '--task'?"),
        (["--tokens", "few"], "invalid float value: 'few'"),
        (["--processes", "0"], "processes=0: give an integer of at least 1"),
        (["--config", "missing.yaml"], "--config missing.yaml: "),
    ],
)
def test_mistakes_in_the_flags_too(flags, message, workdir, capsys):
    assert main(["compare", *flags, "--output-dir", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("out").exists()


def test_a_budget_of_steps_is_the_same_number_for_all(workdir, capsys):
    common = {name: value for name, value in TINY_TASK["common"].items() if name != "max_steps"}
    document = {**TINY_TASK, "budget": {"steps": 2}, "evaluations": 2, "common": common}
    assert compare(document, "--methods", "grpo", "--output_dir", "out") == 0
    assert [row["step"] for row in curves("out")] == ["0", "1", "2"]
    assert "At 2 optimiser steps, interpolated between" in capsys.readouterr().out


def test_an_embedded_task_is_compared_on_equal_seconds_with_a_model_of_another_size(workdir, capsys):
    size = {"hidden_size": 32, "num_layers": 1}
    assert compare({**TINY_TASK, "model_size": size}, "--methods", "grpo", "g2rl", "--output_dir", "out") == 0
    rows = curves("out")
    assert [(row["arm"], row["step"]) for row in rows] == [("GRPO", "0"), ("GRPO", "1"), ("G2RL", "0"), ("G2RL", "1")]
    assert "seconds of training, interpolated between" in capsys.readouterr().out
    config = json.loads(Path("out/grpo-seed0/checkpoint-1/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 1)
    assert yaml.safe_load(Path("out/comparison.yaml").read_text())["model_size"] == size


def test_several_processes_are_refused(workdir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compare", "--task", "chain"]) == 2
    assert "compare runs in one process" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "methods"),
    [
        ("doors", ["grpo", "deep_grpo", "tree_grpo", "sesa", "g2rl"]),
        ("multi_hop", ["deep_grpo", "branpo", "gigpo", "agent_tree_grpo"]),
        ("examples.benchmarks.tasks:LAKE_AGENT", ["sesa", "gigpo"]),
    ],
)
def test_all_methods_train_on_the_tasks_that_suit_them(task, methods, workdir):
    common = {**TINY_TASK["common"], "per_device_train_batch_size": 8}
    document = {**TINY_TASK, "task": task, "metrics": ["reward", "pass_at_2"], "common": common}
    assert compare(document, "--methods", *methods, "--output_dir", "out") == 0
    settings = yaml.safe_load(Path("out/comparison.yaml").read_text())
    assert [arm["method"] for arm in settings["arms"]] == methods
    assert [row["step"] for row in curves("out")] == ["0", "1"] * len(methods)

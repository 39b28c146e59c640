"""Tree search as a user runs it: command line, example scripts, a run that is killed, trees that are looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import TINY_RUN, as_flags, run_example
from world import make_tokenizer, saved_model

from trl_explore.cli import main
from trl_explore.tree_view.files import read_trees
from trl_explore.trees.replay import read_cache

ROWS = [{"question": f"{i}+{i}=", "final_answer": str(2 * i % 10)} for i in range(8)]
REWARDS = """
def digit_reward(completions, final_answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(answer in text) for text, answer in zip(texts, final_answer, strict=True)]
"""
DATA = ["--dataset_name", "prompts.jsonl", "--reward_funcs", "tree_rewards.digit_reward"]
TRAIN = ["train", "--method", "tree_grpo", *DATA]
RUN = dict(TINY_RUN, per_device_train_batch_size=8, gradient_accumulation_steps=1)
RUN |= dict(max_completion_length=8, node_length=2, overlong_buffer=2)


def flags(**fields):
    return as_flags({**RUN, "model_name_or_path": saved_model(), **fields})


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("tree_rewards", None)
    Path("tree_rewards.py").write_text(REWARDS)
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prompts = [{"prompt": row["question"], "final_answer": row["final_answer"]} for row in ROWS]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return tmp_path


def test_train_look_at_a_tree_and_filter(workdir, capsys):
    run = flags(dump_trees="trees", replay_buffer="true", replay_threshold=0.9)
    assert main([*TRAIN, *run]) == 0
    capsys.readouterr()
    assert main(["tree", "out/trees/trees_0.jsonl", "--index", "-1", "--html", "tree.html"]) == 0
    assert "tree.html" in capsys.readouterr().out and "<details" in Path("tree.html").read_text()
    filtering = ["--model_name_or_path", "out", *DATA, "--max_completion_length", "8", "--threshold", "1.0"]
    assert main(["filter", *filtering, "--output", "hard.jsonl"]) == 0
    kept = [json.loads(line) for line in Path("hard.jsonl").read_text().splitlines()]
    assert 0 < len(kept) <= 8 and all(row["pass_rate"] < 1.0 for row in kept)
    again = ["--dataset_name", "hard.jsonl", "--reward_funcs", "tree_rewards.digit_reward"]
    second = flags(output_dir="second", replay_buffer="true", replay_file="out/solutions.jsonl")
    assert main(["train", "--method", "tree_grpo", *again, *second]) == 0


def test_mistakes_are_one_line(workdir, capsys):
    assert main([*TRAIN, *flags(node_length=9)]) == 2
    assert "`node_length=9` is longer than a whole completion" in capsys.readouterr().err
    assert main([*TRAIN, *flags(expansion_widht=4)]) == 2
    assert "did you mean '--expansion_width'?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_runs_offline(workdir, monkeypatch):
    run = flags(node_length=None, overlong_buffer=2, dataset_name="data.jsonl")
    run_example("tree_grpo.py", *run, "--node_length", "2", "--use_peft", folder=workdir, monkeypatch=monkeypatch)
    assert Path("out/adapter_model.safetensors").exists()
    assert len(list(read_trees("out/trees/trees_0.jsonl"))) == 4


@pytest.mark.slow
def test_the_example_of_two_rounds_runs_offline_and_continues(workdir, monkeypatch, capsys):
    options = dict(dataset_name="data.jsonl", filter_threshold=1.0, replay_threshold=0.9, overlong_buffer=None)
    where = dict(folder=workdir, monkeypatch=monkeypatch)
    run_example("tree_grpo_rounds.py", *flags(**options), "--num_rounds", "1", **where)
    first = capsys.readouterr().out
    assert "round 1: " in first and "are hard for" in first
    run_example("tree_grpo_rounds.py", *flags(**options), **where)
    both = capsys.readouterr().out
    assert "round 1: " not in both and "round 2: " in both  # a finished round is not repeated
    for number in (1, 2):
        folder = Path("out") / f"round_{number}"
        assert (folder / "config.json").is_file() and (folder / "pass_rates.jsonl").is_file()
        read_cache(folder / "solutions.jsonl", make_tokenizer(), solutions_per_prompt=2, threshold=0.9)


@pytest.mark.slow
def test_a_killed_run_leaves_its_files_readable(workdir):
    run = flags(max_steps=10_000, save_steps=10_000, dump_trees="trees", replay_buffer="true", replay_threshold=0.9)
    command = [sys.executable, "-m", "trl_explore.cli", *TRAIN, *run]
    with open("log", "w") as log:
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    trees, solutions = Path("out/trees/trees_0.jsonl"), Path("out/solutions.jsonl")
    try:
        deadline = time.monotonic() + 300
        while not (trees.is_file() and trees.read_bytes().count(b"\n") >= 40 and solutions.is_file()):
            assert process.poll() is None and time.monotonic() < deadline, Path("log").read_text()[-2000:]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(read_trees(trees))) >= 40
    cache = read_cache(solutions, make_tokenizer(), solutions_per_prompt=2, threshold=0.9)
    assert cache.num_solutions > 0
    # A new run starts from what the killed one found.
    again = flags(output_dir="again", replay_buffer="true", replay_file="out/solutions.jsonl", save_steps=2)
    assert main([*TRAIN, *again]) == 0

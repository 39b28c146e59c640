"""How many threads tiny models get: one on a CPU, in every command and in the functions that make and measure them."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import yaml
from world import contains_answer, make_dataset, make_model, make_tokenizer, saved_model

from trl_explore.cli import main
from trl_explore.evaluation.evaluate import evaluate
from trl_explore.evaluation.samplers import Sampling
from trl_explore.machine.threads import TINY, suitable_threads
from trl_explore.tasks import get_task
from trl_explore.tasks.warm_start import warm_start

CPU, GPU = torch.device("cpu"), torch.device("cuda")
REWARDS = """
import torch
from world import contains_answer

def noting_reward(completions, **kwargs):
    with open("threads", "a") as file:
        file.write(f"{torch.get_num_threads()}\\n")
    return contains_answer(completions=completions, **kwargs)
"""
TRAINING = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """Two threads in force, nobody has asked for a number, and a reward function that notes how many there are."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("thread_rewards", None)
    Path("thread_rewards.py").write_text(REWARDS)
    make_dataset().select(range(8)).to_json("data.jsonl")
    torch.set_num_threads(2)
    return tmp_path


def flags(command, **fields):
    fields = {"model_name_or_path": saved_model(), "reward_funcs": "thread_rewards.noting_reward", **fields}
    return [command, *(text for name, value in fields.items() for text in (f"--{name}", str(value)))]


def compare_file():
    subject = {"model_name_or_path": saved_model(), "dataset_name": "data.jsonl"}
    document = {**subject, "reward_funcs": ["thread_rewards.noting_reward"], "budget": {"steps": 1}, "num_eval": 2}
    common = {name: value for name, value in TRAINING.items() if name != "max_steps"}
    arms = [{"method": "grpo"}, {"method": "g2rl"}]
    text = yaml.safe_dump({**document, "metrics": ["reward"], "evaluations": 1, "common": common, "arms": arms})
    Path("run.yaml").write_text(text)
    return ["compare", "--config", "run.yaml", "--output_dir", "out"]


COMMANDS = {
    "train": lambda: flags("train", method="grpo", dataset_name="data.jsonl", output_dir="out", **TRAINING),
    "eval": lambda: flags("eval", dataset="data.jsonl", output_dir="out", max_new_tokens=4),
    "filter": lambda: flags("filter", dataset_name="data.jsonl", output="hard.jsonl", max_completion_length=4, k=2),
    "compare": compare_file,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_computes_with_one_thread_and_says_so_once(command, workdir, capsys):
    assert main(COMMANDS[command]()) == 0
    assert set(Path("threads").read_text().split()) == {"1"}
    assert capsys.readouterr().err.count("computing with one thread, because the model is small") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_that_the_user_chose_stays(command, workdir, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(COMMANDS[command]()) == 0
    assert set(Path("threads").read_text().split()) == {"2"}
    assert "computing with one thread" not in capsys.readouterr().err


def test_a_warm_start_computes_with_one_thread_and_leaves_their_number(workdir):
    noted = []
    chain = get_task("chain")

    class Noting(type(chain)):
        def demonstration(self, prompt, rng):
            noted.append(torch.get_num_threads())
            return super().demonstration(prompt, rng)

    task = Noting(**{spec.name: vars(chain)[spec.name] for spec in dataclasses.fields(chain) if spec.init})
    warm_start(task, seed=0, steps=2, cache_dir=workdir, progress=False)
    assert set(noted) == {1}
    assert torch.get_num_threads() == 2


def test_an_evaluation_samples_with_one_thread_and_leaves_their_number(workdir):
    noted, model = [], make_model()
    model.register_forward_hook(lambda *_: noted.append(torch.get_num_threads()))
    rows = make_dataset().select(range(2))
    sampling = Sampling(max_new_tokens=2)
    evaluate(model, rows, processing_class=make_tokenizer(), reward_funcs=contains_answer, sampling=sampling)
    assert set(noted) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("num_parameters", "device", "expected"), [(TINY, CPU, 1), (TINY + 1, CPU, 2), (TINY, GPU, 2)]
)
def test_only_a_tiny_model_on_a_cpu_gets_one_thread(num_parameters, device, expected, workdir):
    assert suitable_threads(num_parameters, device) == expected

"""`trl-explore eval`: what it prints and writes, that it can be killed, and what it says about mistakes."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from world import contains_answer, make_dataset, make_tokenizer, saved_model

from trl_explore.cli import main
from trl_explore.evaluation.evaluate import evaluate
from trl_explore.evaluation.presets import FOLDER, preset_names
from trl_explore.evaluation.samplers import Sampling
from trl_explore.runs.models import find_model

ROWS = make_dataset().select(range(12))
REWARDS = """
from world import contains_answer

def reward(prompts, **kwargs):
    return contains_answer(prompts=prompts, **kwargs)

def none(prompts, **kwargs):
    return [None] * len(prompts)

def wrong(prompts, **kwargs):
    raise ValueError("the reward's own mistake")
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with data files and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("eval_rewards", None)
    Path("eval_rewards.py").write_text(REWARDS)
    ROWS.to_json("data.jsonl")
    ROWS.rename_column("prompt", "question").to_json("questions.jsonl")
    ROWS.remove_columns("answer").to_json("unanswered.jsonl")
    return tmp_path


def flags(**fields):
    settings = {
        "model_name_or_path": saved_model(),
        "dataset": "data.jsonl",
        "reward_funcs": "eval_rewards.reward",
        "num_samples": 4,
        "max_new_tokens": 8,
        "output_dir": "out",
    } | fields
    pairs = [(f"--{name}", str(value).split(" ")) for name, value in settings.items() if value is not None]
    return ["eval", *(text for name, values in pairs for text in (name, *values))]


def results():
    return json.loads(Path("out/results.json").read_text())


def test_the_command_writes_and_prints_what_the_function_returns(workdir, capsys):
    assert main(flags()) == 0
    model = AutoModelForCausalLM.from_pretrained(saved_model())
    sampling = Sampling(num_samples=4, max_new_tokens=8)
    expected = evaluate(
        model, ROWS, processing_class=make_tokenizer(), reward_funcs=contains_answer, sampling=sampling
    )
    entry = results()["results"]["data"]
    assert entry["metrics"] == expected["metrics"] and entry["tokens"] == expected["tokens"]
    assert entry["dataset"] == {"path": "data.jsonl", "config": None, "split": "train"}
    assert {"trl-explore", "transformers"} <= entry["versions"].keys()
    table = capsys.readouterr().out
    found = [100 * expected["metrics"]["pass@4"][part] for part in ("value", "low", "high")]
    assert "{:.1f} [{:.1f}, {:.1f}]".format(*found) in table
    assert "pass@1" in table and "maj@4" in table and "truncated" in table
    assert not list(Path("out").glob("*.part"))
    assert main([*flags(), "--json"]) == 0  # nothing else is printed then
    assert json.loads(capsys.readouterr().out)["results"] == results()["results"]


def test_answers_that_no_reward_reads_are_not_said_to_be_missing(workdir, capsys):
    def cells(table):  # by heading, of the one row
        lines = [line.strip("│┃ ") for line in table.splitlines() if line.startswith(("│", "┃"))]
        return dict(zip(*([cell.strip() for cell in re.split("[│┃]", line)] for line in lines), strict=True))

    assert main(flags(num_samples=1)) == 0
    out = capsys.readouterr().out
    assert "no answer" not in cells(out) and "have none" not in out
    assert main(flags(num_samples=1, reward_funcs="accuracy_reward", output_dir="read")) == 0
    read = json.loads(Path("read/results.json").read_text())["results"]["data"]["unanswered"]
    assert cells(capsys.readouterr().out)["no answer"] == f"{100 * read:.1f} %" and read > 0
    assert main(flags(output_dir="votes")) == 0  # which are what the missing marks matter to
    share = json.loads(Path("votes/results.json").read_text())["results"]["data"]["unanswered"]
    assert f"votes on marked answers, such as \\boxed{{7}}, but {100 * share:.1f} % of the samples have none" in (
        capsys.readouterr().out
    )


def test_tasks_and_data_come_in_one_table_and_more_can_follow(workdir, capsys):
    tasks = flags(dataset="chain data.jsonl", reward_funcs=None, limit=3, max_new_tokens=None, num_samples=2)
    assert main([*tasks, "--max_new_tokens", "70"]) == 0
    out = capsys.readouterr().out
    assert out.index("│ chain ") < out.index("│ data ")
    first = results()["results"]
    assert [entry["num_prompts"] for entry in first.values()] == [3, 3]
    assert first["chain"]["dataset"]["path"] == "chain"
    assert main(flags(dataset="late1", reward_funcs=None, limit=3, num_samples=2)) == 0
    assert results()["results"].keys() == {"chain", "data", "late1"}


def test_a_benchmark_is_evaluated_as_it_recommends_unless_flags_differ(workdir):
    Path("quiz.yaml").write_text(
        yaml.safe_dump(
            {"path": "./questions.jsonl", "question": "question", "answer": "answer", "num_samples": 3, "top_p": 0.5}
            | {"temperature": 0.5, "max_new_tokens": 6}
        )
    )
    assert main(flags(dataset="quiz.yaml", num_samples=None, max_new_tokens=None, temperature=0.25)) == 0
    settings = results()["results"]["quiz"]["settings"]
    expected = {"num_samples": 3, "temperature": 0.25, "top_p": 0.5, "max_new_tokens": 6, "reward_funcs": ["reward"]}
    assert settings.items() >= expected.items()


def test_temperature_0_needs_no_number_of_samples(workdir):
    assert main(flags(temperature=0, num_samples=None)) == 0
    assert results()["results"]["data"]["metrics"].keys() == {"pass@1"}


@pytest.fixture
def adapter(workdir):
    base = AutoModelForCausalLM.from_pretrained(saved_model())
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=64, init_lora_weights=False))
    adapted.save_pretrained("adapter")
    return adapted


def test_an_adapter_is_evaluated_with_its_base(adapter):
    sampling = Sampling(num_samples=4, max_new_tokens=8)
    expected = evaluate(
        adapter, ROWS, processing_class=make_tokenizer(), reward_funcs=contains_answer, sampling=sampling
    )
    assert main(flags(model_name_or_path="adapter")) == 0
    assert results()["results"]["data"]["tokens"] == expected["tokens"]
    assert main(flags(adapter_name_or_path="adapter", output_dir="named")) == 0
    named = json.loads(Path("named/results.json").read_text())
    assert named["results"]["data"]["metrics"] == results()["results"]["data"]["metrics"]
    assert named["model"]["adapter"] == "adapter"


def test_an_adapter_without_its_base_is_explained(adapter, capsys):
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "./gone"}))
    assert main(flags(model_name_or_path="adapter")) == 2
    error = capsys.readouterr().err
    assert "adapter is an adapter without its base: model_name_or_path='gone' does not exist" in error
    assert "--model_name_or_path BASE --adapter_name_or_path adapter" in error
    assert find_model(saved_model(), "adapter", revision=None).tokenizer == saved_model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "gsm8"}, "unknown data set 'gsm8'; did you mean 'gsm8k'? Data of your own is named by its path"),
        ({"dataset": "gsm9=data.jsonl"}, "unknown benchmark 'gsm9'; did you mean 'gsm8k'?"),
        ({"dataset": "chian"}, "did you mean 'chain'?"),
        ({"dataset": "./dota.jsonl"}, "did you mean 'data.jsonl'?"),
        ({"dataset": "gsm8k=./dota.jsonl"}, "did you mean 'data.jsonl'?"),
        ({"dataset": "math500=questions.jsonl"}, "unknown column 'problem'"),
        ({"dataset": "questions.jsonl"}, "needs a column 'prompt', but has question, answer. Describe"),
        ({"dataset": "questions.jsonl"}, '.rename_column("question", "prompt").to_json('),
        ({"dataset": "unanswered.jsonl", "reward_funcs": None}, "no gold answers, a column 'answer' or 'solution'"),
        ({"dataset": "nobody/no-such-data"}, "hf download nobody/no-such-data"),
        ({"dataset": "data.jsonl ./data.jsonl"}, "2 of them are called 'data'"),
        ({"dataset": "none.yaml"}, "none.yaml cannot be read"),
        ({"output_dir": "data.jsonl"}, "output_dir='data.jsonl' is a file; name a folder"),
        ({"dataset": None}, "nothing to evaluate on: pass --dataset gsm8k"),
        ({"dataset_split": "tset"}, "dataset_split: unknown split 'tset'; choose one of train."),
        ({"metrics": "pass@1 mja@4"}, "unknown metric 'mja@4'; did you mean 'maj@4'?"),
        ({"temperature": 0}, "set num_samples=1"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"max_new_tokens": 500}, "more than the model's context of 128 tokens; lower max_new_tokens to at most 124"),
        ({"max_new_tokens": "many"}, "argument --max_new_tokens: invalid int value: 'many'"),
        ({"reward_funcs": "accuracy_rewrad"}, "did you mean 'accuracy_reward'?"),
        (
            {"success_reward": "rewrad"},
            "`success_reward='rewrad'` is none of the reward functions: name one of reward",
        ),
        ({"reward_funcs": "eval_rewards.none"}, "no sample of any prompt has a reward"),
        ({"model_name_or_path": "./nowhere"}, "model_name_or_path='nowhere' does not exist"),
        ({"adapter_name_or_path": "./nowhere"}, "adapter_name_or_path='nowhere' does not exist"),
        ({"adapter_name_or_path": "."}, "is no adapter: it has no adapter_config.json"),
        ({"system_prompt": "Hello"}, "system_prompt is for benchmarks"),
        ({"temprature": 1}, "unknown flag '--temprature'; did you mean '--temperature'?"),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, "The same command continues where it stopped."),
    ],
)
def test_mistakes_are_explained_in_one_line(workdir, capsys, changes, message):
    assert main(flags(**changes)) == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert message in error and error.count("\n") == 1
    assert not Path("out/results.json").exists()


def test_results_of_other_settings_or_weights_are_refused(workdir, capsys):
    assert main(flags()) == 0
    before = results()
    assert main([*flags(), "--seed=3"]) == 2
    assert "out/data/completions.jsonl holds completions of other settings: seed=0, now 3" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(saved_model())
    model.lm_head.weight.data[3, 3] += 1e-3
    model.save_pretrained("trained")
    make_tokenizer().save_pretrained("trained")
    assert main(flags(model_name_or_path="trained", dataset="chain")) == 2
    assert "out/results.json holds results of other weights: the model was" in capsys.readouterr().err
    assert results() == before
    Path("out/results.json").write_text("[]")
    assert main(flags()) == 2
    assert "out/results.json is no file of results" in capsys.readouterr().err


def test_an_error_of_a_reward_function_says_where_it_is_from_and_keeps_the_completions(workdir, capsys):
    assert main(flags(reward_funcs="eval_rewards.wrong")) == 2
    told = "The reward function 'wrong' raised ValueError in eval_rewards.py, line 11: the reward's own mistake"
    assert capsys.readouterr().err.endswith(f"trl-explore: error: {told}\n")
    assert len(Path("out/data/completions.jsonl").read_text().splitlines()) == 13


def test_several_processes_are_refused(workdir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(flags()) == 2
    assert "--vllm_tensor_parallel_size" in capsys.readouterr().err


def test_help_names_the_benchmarks(capsys):  # and does not wait for torch: see test_cli.py
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in preset_names())


def test_the_benchmarks_are_installed():
    tree = Path(__file__).resolve().parent.parent / "trl_explore" / "evaluation" / "benchmarks"
    assert {path.name for path in FOLDER.glob("*.yaml")} == {path.name for path in tree.glob("*.yaml")}


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_killed_command_goes_on_where_it_stopped(workdir, end, code):
    rows = [{"prompt": [{"role": "user", "content": f"{i % 10}+{i // 10}="}], "answer": "1"} for i in range(24)]
    Dataset.from_list(rows).to_json("many.jsonl")
    options = flags(dataset="many.jsonl", reward_funcs=None, batch_size=1, num_samples=1, max_new_tokens=100)
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_explore.cli", *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log, path = "", Path("out/many/completions.jsonl")
    for line in process.stderr:  # each state of the progress bar is one
        log += line
        progress = re.search(r"(\d+)/24", line)
        if progress and int(progress.group(1)) > 3:
            break
    process.send_signal(end)
    assert process.wait() == code, log
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 4 <= len(kept) <= 24 and not Path("out/results.json").exists()
    assert main(options) == 0
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[: len(kept)] == kept
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(24))
    assert results()["results"]["many"]["num_prompts"] == 24

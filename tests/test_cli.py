import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import trl
import yaml
from commands import TINY_RUN, as_flags, run_example
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments
from trl import DatasetMixtureConfig, GRPOConfig, ScriptArguments
from world import saved_model

from trl_explore.cli import env, main
from trl_explore.cli.train import parse_train_arguments, resume_command
from trl_explore.compat import SEAMS
from trl_explore.methods import METHODS
from trl_explore.names import program_name
from trl_explore.runs.inputs import (
    UsageError,
    check_earlier_run,
    check_output_dir,
    find_checkpoint,
    load_reward_functions,
    load_train_and_eval,
    looks_like_path,
)
from trl_explore.saving.interrupt import InterruptCallback
from trl_explore.trainers import ExplorationConfig

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], "answer": str(2 * i)} for i in range(8)]

REWARDS = """
import time
from pathlib import Path

not_a_function = 3

def variety_reward(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]

calls = 0

def gated_reward(completions, **kwargs):
    # From the third step on, training waits for the test.
    global calls
    calls += 1
    while calls >= 3 and not Path("gate").exists():
        time.sleep(0.02)
    return variety_reward(completions)
"""


@pytest.fixture(scope="module")
def model_folder():
    return saved_model()


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with a data file and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_rewards", None)
    Path("my_rewards.py").write_text(REWARDS)
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def flags(model_folder, **fields):
    """Flags of a run of two steps."""
    settings = {
        "method": "grpo",
        "model_name_or_path": model_folder,
        "dataset_name": "data.jsonl",
        "reward_funcs": "my_rewards.variety_reward",
        "max_completion_length": 5,
    }
    return as_flags({**settings, **TINY_RUN, **fields})


def step_of(checkpoint):
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_saves_a_model(method, workdir, model_folder, capfd):
    own = {"evol_rl": dict(embedding_model="ngrams")}.get(method, {})
    assert main(["train", *flags(model_folder, method=method, **own)]) == 0
    assert step_of("out/checkpoint-2") == 2
    AutoModelForCausalLM.from_pretrained("out")
    assert "Trained 2 steps; model saved to out" in capfd.readouterr().out


def test_flags_override_the_file_and_lora_saves_an_adapter(workdir, model_folder):
    names = [text[2:] for text in flags(model_folder)[::2]]
    config = dict(zip(names, flags(model_folder)[1::2], strict=True)) | {"max_steps": 7, "use_peft": True, "lora_r": 2}
    config |= {"method": "deep_grpo", "num_branches": 2, "success_threshold": 100, "segment_delimiters": ["1", "2"]}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--config", "run.yaml", "--max_steps", "1", "--lora_r", "4"]) == 0
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert json.loads(Path("out/adapter_config.json").read_text())["r"] == 4


def test_a_run_evaluates_on_the_test_split_of_a_folder(workdir, model_folder):
    Path("data").mkdir()
    for split in ("train", "test"):
        Dataset.from_list(ROWS).to_parquet(f"data/{split}.parquet")
    run = flags(model_folder, dataset_name="data", eval_strategy="steps", eval_steps=1, max_steps=1)
    assert main(["train", *run, "--per_device_eval_batch_size", "4"]) == 0
    history = json.loads(Path("out/checkpoint-1/trainer_state.json").read_text())["log_history"]
    assert any("eval_reward" in entry for entry in history)


def write_data(kind):
    rows = Dataset.from_list(ROWS)
    if kind == "dataset on disk":
        rows.save_to_disk("data")
    elif kind == "dataset dict on disk":
        DatasetDict(train=rows, test=rows.select([0])).save_to_disk("data")
    elif kind == "folder with one file":
        Path("data").mkdir()
        rows.to_json("data/test.jsonl")
    else:
        rows.to_parquet("data.parquet")
        return "data.parquet"
    return "./data"


# A file of JSON lines is what the tests of training read.
@pytest.mark.parametrize("kind", ["dataset on disk", "dataset dict on disk", "folder with one file", "parquet"])
def test_every_kind_of_local_data_gives_the_same_rows(kind, workdir):
    arguments = ScriptArguments(dataset_name=write_data(kind))
    train, evaluation = load_train_and_eval(arguments, DatasetMixtureConfig(), needs_eval=False)
    assert [row["answer"] for row in train] == [row["answer"] for row in ROWS]
    assert evaluation is None


def test_a_mixture_of_local_files_can_be_named_in_the_file(workdir):
    mixture = DatasetMixtureConfig(datasets=[{"path": "json", "data_files": "data.jsonl"}] * 2)
    train, _ = load_train_and_eval(ScriptArguments(), mixture, needs_eval=False)
    assert len(train) == 16


def test_paths_are_told_from_hub_names():
    paths = ["./gsm8k", "/data/gsm8k", "~/gsm8k", "a/b/c", "train.jsonl"]
    names = ["openai/gsm8k", "gsm8k", "Qwen/Qwen2.5-0.5B"]
    assert [name for name in [*names, *paths] if looks_like_path(name)] == paths


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may know bfloat16")
def test_without_a_gpu_paths_are_looked_at_first_and_then_two_flags_are_named(workdir, capsys):
    asked = ["train", "--method", "deep_grpo", "--reward_funcs", "accuracy_reward"]
    assert main([*asked, "--model_name_or_path", "./nowhere", "--dataset-name", "./no.jsonl"]) == 2
    assert "model_name_or_path='nowhere' does not exist" in capsys.readouterr().err
    Path("nowhere").mkdir()
    assert main([*asked, "--model_name_or_path", "./nowhere", "--dataset-name", "./no.jsonl"]) == 2
    assert "dataset_name='no.jsonl' does not exist" in capsys.readouterr().err
    assert main([*asked, "--model_name_or_path", "a/hub-name", "--dataset_name", "another/hub-name"]) == 2
    assert "add --use_cpu --bf16 false to train on the CPU" in capsys.readouterr().err


def test_values_that_yaml_reads_differently_mean_what_they_say(workdir):
    Path("run.yaml").write_text(
        "method: grpo\nsave_strategy: no\nreward_funcs: accuracy_reward\nlearning_rate: 1e-5\nrun_name: 12\n"
        "model_init_kwargs: {use_cache: false}\nresume_from_checkpoint: true\nbf16: false\n"
        "env: {CLI_TEST_VARIABLE: 3}\n"
    )
    script, training, _, _ = parse_train_arguments(["--config=run.yaml"])
    assert os.environ.pop("CLI_TEST_VARIABLE") == "3"
    assert script.reward_funcs == ["accuracy_reward"]
    assert (training.save_strategy, training.learning_rate, training.run_name) == ("no", 1e-5, "12")
    assert training.model_init_kwargs == {"use_cache": False}
    assert not training.bf16


def test_named_rewards_come_from_this_package_and_from_trl(workdir):
    import trl_explore.rewards.answers

    ours, theirs, own, model = load_reward_functions(
        ["accuracy_reward", "think_format_reward", "my_rewards.variety_reward"], None
    ) + load_reward_functions(None, "reward-model")
    assert ours.__wrapped__ is trl_explore.rewards.answers.accuracy_reward
    assert theirs.__module__.startswith("trl.")
    assert own.__name__ == "variety_reward"
    assert model == "reward-model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "deep_gpro"}, "unknown method 'deep_gpro'; did you mean 'deep_grpo'?"),
        ({"method": None}, "no method: pass --method with one of"),
        ({"num_generation": 4}, "did you mean '--num_generations'?"),
        ({"num_processes": 2}, "accelerate launch FLAGS -m trl_explore.cli"),
        ({"shared_prefix_training": "on"}, "`shared_prefix_training` is a field of trl-explore's trainers, but"),
        ({"method": "g2rl", "num_branches": 3}, "is no field of g2rl; it belongs to deep_grpo and branpo"),
        ({"config": "foreign.yaml"}, "`node_length` is no field of grpo; it belongs to tree_grpo: leave it out, or"),
        ({"learning_rate": -1}, "`learning_rate=-1.0` must be a finite number, at least 0."),
        ({"temperature": 0}, "`temperature=0.0` must be positive"),
        ({"max_completion_length": 0}, "`max_completion_length=0` must be at least 1 token."),
        ({"top_p": 0}, "`top_p=0.0` must be in (0, 1]"),
        ({"config": "shared.yaml"}, "but --method grpo is TRL's own: leave it out, or use --method exploration,"),
        ({"max_steps": "many"}, "--max_steps/--max-steps: invalid int value: 'many'"),
        ({"num_generations": 3}, "num_generations (3)"),
        ({"config": "missing.yaml"}, "--config missing.yaml: "),
        ({"config": "typo.yaml"}, "--config: unknown field 'learning_rat'; did you mean 'learning_rate'?"),
        ({"config": "list.yaml"}, "expected lines of the form"),
        ({"reward_funcs": "accuracy_rewrad"}, "did you mean 'accuracy_reward'?"),
        ({"reward_funcs": "my_reward.variety_reward"}, "importing 'my_reward' failed (ModuleNotFoundError"),
        ({"reward_funcs": "my_rewards.varyety_reward"}, "did you mean 'variety_reward'?"),
        ({"reward_funcs": "my_rewards.not_a_function"}, "unknown function 'not_a_function'"),
        ({"reward_funcs": None}, "no reward: pass --reward_funcs"),
        ({"dataset_name": "./dota.jsonl"}, "did you mean 'data.jsonl'?"),
        ({"dataset_name": "./nowhere/data.jsonl"}, "nowhere does not exist"),
        ({"dataset_name": "my_rewards.py"}, "cannot read '.py' files, only .jsonl"),
        ({"dataset_name": "questions.jsonl"}, "needs a column 'prompt', but has question. Write a file with the"),
        ({"dataset_name": None}, "name the data once"),
        ({"dataset_train_split": "trian"}, "did you mean 'train'?"),
        ({"eval_strategy": "steps"}, "dataset_test_split: unknown split 'test'; choose one of train."),
        ({"model_name_or_path": "./tiny"}, "model_name_or_path='tiny' does not exist"),
        ({"model_name_or_path": None}, "model_name_or_path is missing"),
        ({"resume_from_checkpoint": "true"}, "no checkpoint in 'out'"),
        ({"resume_from_checkpoint": "elsewhere"}, "'elsewhere' is not a checkpoint folder"),
    ],
)
def test_mistakes_are_explained_in_one_line(changes, message, workdir, model_folder, capsys):
    Path("typo.yaml").write_text("learning_rat: 1.0\n")
    Path("list.yaml").write_text("- 1\n")
    Path("shared.yaml").write_text("packed_token_budget: 512\n")
    Path("foreign.yaml").write_text("node_length: 8\n")
    Path("questions.jsonl").write_text('{"question": "1+1="}\n')
    assert main(["train", *flags(model_folder, **changes)]) == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")  # before it: the progress bars of datasets
    assert message in error
    assert error.count("\n") == 1


OUTPUTS = {
    "quickstart": lambda path: ["quickstart", "--output_dir", path],
    "train": lambda path: ["train", *flags("nowhere", output_dir=path)],
    "compare": lambda path: ["compare", "--output_dir", path],
    "eval": lambda path: ["eval", "--model_name_or_path", "m", "--dataset", "data.jsonl", "--output_dir", path],
    "filter": lambda path: [
        *("filter", "--model_name_or_path", "m", "--dataset_name", "data.jsonl", "--reward_funcs", "accuracy_reward"),
        *("--output", f"{path}/hard.jsonl"),
    ],
}


@pytest.mark.parametrize("form", ["file", "saved", "splits"])
def test_the_line_that_renames_a_column_writes_data_with_prompts(form, workdir, model_folder, capsys):
    rows = Dataset.from_dict({"problem": ["1+1=", "2+2="], "answer": ["2", "4"]})
    if form == "file":
        rows.to_json("problems.jsonl")
    elif form == "saved":
        rows.save_to_disk("problems.jsonl")
    else:
        DatasetDict(train=rows).save_to_disk("problems.jsonl")
    assert main(["train", *flags(model_folder, dataset_name="problems.jsonl")]) == 2
    error = capsys.readouterr().err
    python, option, code = shlex.split(error[error.index("python -c") : error.index(" and pass --dataset_name")])
    assert (python, option) == ("python", "-c")
    exec(code, {})
    written = [json.loads(line) for line in Path("with_prompt.jsonl").read_text().splitlines()]
    assert written == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("data.jsonl", "'data.jsonl' is a file; name a folder with"),
        ("data.jsonl/out", "'data.jsonl/out' cannot be made, because "),
        ("/proc/out", "'/proc/out' cannot be written to (/proc: "),  # a folder in which nobody makes files
    ],
)
def test_every_command_refuses_a_folder_that_cannot_be_written(command, path, problem, workdir, capsys):
    if path.startswith("/proc") and sys.platform != "linux":
        pytest.skip("needs a folder that not even root can write to")
    assert main(OUTPUTS[command](path)) == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert f"output{'' if command == 'filter' else '_dir'}={problem}" in error
    assert error.count("\n") == 1


def test_a_folder_that_can_be_made_is_not_made_by_looking(tmp_path):
    assert check_output_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("rows.jsonl", "", "is empty: it needs at least one row"),
        ("rows.jsonl", "\n\n", "cannot be loaded: it has no rows"),
        ("rows.jsonl", '{"prompt": "a"}\n\n{"prompt" "b"}\n', "line 3 is no JSON: Expecting ':' delimiter, column 11"),
        ("rows.jsonl", '{"prompt": "a"}\n{"prom', "line 2 is no JSON: Unterminated string starting at, column 2"),
        ("rows.jsonl", '{"prompt": "a"}\n[1, 2]\n', "line 2 is no JSON object, one row with its columns by name"),
        ("rows.json", '[{"prompt": ', "cannot be loaded: Expected object or value at position 11"),
        ("rows.csv", "prompt,answer\n", "cannot be loaded: it has no rows"),
    ],
)
def test_a_file_without_rows_or_with_a_broken_line_is_explained(name, text, problem, workdir, model_folder, capsys):
    Path(name).write_text(text)
    assert main(["train", *flags(model_folder, dataset_name=name)]) == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert f"dataset_name='{name}' " in error and problem in error and error.count("\n") == 1


def test_a_saved_data_set_without_rows_is_refused(workdir, model_folder, capsys):
    Dataset.from_dict({"prompt": ["1+1="], "answer": ["2"]}).select([]).save_to_disk("rows")
    assert main(["train", *flags(model_folder, dataset_name="rows")]) == 2
    assert "dataset_name='rows' has no rows" in capsys.readouterr().err


def test_a_missing_model_names_a_few_similar_folders_only(workdir, model_folder, capsys):
    for name in ("tiny-model", "tiny-models", "tiny_model", "tinny-model", "holiday", "letters"):
        Path(name).mkdir()
    assert main(["train", *flags("./tiny-modl")]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'tiny-model' or 'tiny-models' or 'tinny-model'?" in error and "letters" not in error
    assert main(["train", *flags("./zzz")]) == 2
    assert capsys.readouterr().err.endswith(f"'zzz' does not exist (looked from {os.getcwd()})\n")


def test_an_unknown_command_gets_the_nearest_and_none_at_all_the_help(capsys):
    assert main(["comapre"]) == 2
    assert capsys.readouterr().err == "trl-explore: error: unknown command 'comapre'; did you mean 'compare'?\n"
    assert main([]) == 2
    assert "advise" in capsys.readouterr().err


def test_env_lists_versions_methods_backends_and_the_seams_that_differ(capsys, monkeypatch):
    start = "- parts of TRL and transformers that the trainers rely on: "
    assert main(["env"]) == 0
    text = capsys.readouterr().out.splitlines()
    lines = dict(line[2:].split(": ", 1) for line in text)
    assert lines["trl"].startswith(trl.__version__) and "supported: " in lines["trl"]
    assert lines["methods"] == ", ".join(METHODS)
    assert lines["sampling with transformers"] == "yes"
    assert text[-1] == f"{start}all {len(SEAMS)} are as expected"
    served = "trl.generation.vllm_client.VLLMClient._post"
    monkeypatch.setattr(env, "difference", lambda seam: "is gone" if seam.path == served else None)
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{start}1 of {len(SEAMS)} differ",
        f"  - {served} (use_vllm): is gone",
    ]


@pytest.mark.parametrize("on_path", [True, False])
def test_the_command_that_continues_is_found_by_the_shell(monkeypatch, on_path):
    monkeypatch.setattr(sys, "argv", ["/env/bin/trl-explore", "quickstart"])
    monkeypatch.setattr("shutil.which", lambda name: "/env/bin/trl-explore" if on_path else None)
    assert program_name() == ("trl-explore" if on_path else "/env/bin/trl-explore")
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert program_name() == "trl-explore"


@pytest.mark.parametrize(
    "installed,verdict",
    [
        (None, "no (--use_vllm needs pip install 'trl-explore[vllm]')"),
        ("0.25.1", "yes (--use_vllm)"),
        ("0.9.0", "not supported with vllm 0.9.0 (pip install 'trl-explore[vllm]')"),
    ],
)
def test_env_says_whether_vllm_can_be_used_here(tmp_path, monkeypatch, capsys, installed, verdict):
    if installed is None:
        if importlib.util.find_spec("vllm") is not None:
            pytest.skip("vLLM is installed")
    else:
        (tmp_path / f"vllm-{installed}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n"
        (tmp_path / f"vllm-{installed}.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(tmp_path)
    assert main(["env"]) == 0
    lines = dict(line[2:].split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["sampling with vllm"] == verdict
    assert (lines["vllm"] == "not installed") == (installed is None)


def test_help_does_not_wait_for_torch():
    commands = [[], ["env"], ["quickstart"], ["train"], ["compare"], ["eval"], ["filter"]]
    code = (
        "import sys\nfrom trl_explore.cli import main\n"
        f"for command in {commands}:\n"
        "    try:\n        main([*command, '--help'])\n    except SystemExit:\n        pass\n"
        "    if 'torch' in sys.modules:\n        sys.exit(f'{command} waits for torch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: trl-explore {command}" in done.stdout for (command,) in commands[1:])


def test_the_example_runs_offline(workdir, model_folder, monkeypatch):
    rows = [{"question": f"{i}+{i}=", "answer": f"#### {2 * i}"} for i in range(4)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = flags(model_folder, method=None, reward_funcs=None, gradient_accumulation_steps=2, num_branches=2)
    run_example("deep_grpo.py", *run, "--use_peft", folder=workdir, monkeypatch=monkeypatch)
    assert step_of("out/checkpoint-2") == 2
    assert Path("out/adapter_model.safetensors").exists()


@pytest.mark.parametrize("method", METHODS)
def test_the_help_of_a_method_is_its_fields_and_a_few_that_every_run_needs(method, capsys):
    assert main(["train", "--method", method, "--help"]) == 0
    help_text = capsys.readouterr().out
    all_own = {spec.name for spec in fields(METHODS[method].config_class)} - {spec.name for spec in fields(GRPOConfig)}
    own = all_own - ExplorationConfig.__annotations__.keys() or all_own
    shown = re.findall(r"^  --(\w+)", help_text, re.MULTILINE)
    assert own | {"dataset_name", "reward_funcs", "num_generations"} <= set(shown)
    assert not own or shown[0] in own
    assert all_own <= set(re.findall(r"\w+", help_text))
    assert len(help_text.splitlines()) <= 61 and max(map(len, help_text.splitlines())) <= 119
    assert f"trl-explore train --method {method} --help-all" in help_text


def test_a_field_has_its_default_and_all_fields_are_behind_help_all(capsys):
    main(["train", "--method", "deep_grpo", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert "  --num_branches                Number of branches per pivot (K), at least 2 [8]" in lines
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--method", "g2rl", "--help-all"])
    help_text = capsys.readouterr().out
    assert "--novelty_weight" in help_text and "--weight_decay" in help_text


@pytest.mark.slow
def test_a_run_begins_without_what_no_user_can_act_on(workdir, model_folder):
    run = flags(model_folder, method="deep_grpo", max_steps=1, save_steps=None, save_strategy="no")
    code = (
        "import sys\nfrom trl_explore.cli import main\ncode = main(sys.argv[1:])\n"
        "import logging, warnings\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('gemm_4bit_forward: later')\n"
        "warnings.warn('`gradient_checkpointing` is deprecated and will be removed in v6', FutureWarning)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "train", *run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gemm_4bit_forward") == done.stderr.count("FutureWarning: `gradient_checkpointing`") == 1
    assert "gemm_4bit_forward: later" in done.stderr  # outside the command nothing is hidden


def test_the_resume_command_replaces_an_earlier_checkpoint():
    command = resume_command(
        ["--method", "grpo", "--resume_from_checkpoint", "a", "--run_name", "b c"], "out/checkpoint-2"
    )
    assert command == "trl-explore train --method grpo --run_name 'b c' --resume_from_checkpoint out/checkpoint-2"


def test_the_last_checkpoint_is_found(workdir):
    for step in (2, 10):
        Path(f"out/checkpoint-{step}").mkdir(parents=True)
        Path(f"out/checkpoint-{step}/trainer_state.json").write_text("{}")
    assert find_checkpoint("true", "out") == "out/checkpoint-10"
    assert find_checkpoint(None, "out") is find_checkpoint("false", "out") is None


def refusal(capsys):
    """Return the one line that a refused command prints."""
    return capsys.readouterr().err.split("trl-explore: error: ")[1]


def test_a_run_is_overwritten_only_if_asked_for_and_keeps_its_checkpoints_elsewhere(workdir, model_folder, capsys):
    run = ["train", *flags(model_folder)]
    assert main(run) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(run) == 2
    said = refusal(capsys)
    assert (
        "output_dir='out' holds 2 checkpoints and a trained model of an earlier run, which this run would ov" in said
    )
    assert "add --resume_from_checkpoint true" in said and "--overwrite_output_dir" in said and said.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*") if path.is_file()} == before
    assert main(["train", *flags(model_folder, max_steps=1), "--overwrite_output_dir"]) == 0
    assert "checkpoints of an earlier run are in out/_earlier-1 now" in capsys.readouterr().err
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert sorted(path.name for path in Path("out/_earlier-1").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert step_of("out/checkpoint-1") == 1


def test_a_run_with_a_file_does_not_overwrite_a_run(workdir, model_folder):
    given = flags(model_folder, method="deep_grpo", num_branches=2, max_steps=1)
    names = [text[2:] for text in given[::2]]
    Path("run.yaml").write_text(yaml.safe_dump(dict(zip(names, given[1::2], strict=True))))
    Path("out").mkdir()
    Path("out/model.safetensors").write_text("of an earlier run")
    assert main(["train", "--config", "run.yaml"]) == 2
    assert Path("out/model.safetensors").read_text() == "of an earlier run"
    Path("again.yaml").write_text(Path("run.yaml").read_text() + "overwrite_output_dir: true\n")
    assert main(["train", "--config", "again.yaml"]) == 0


def test_a_resumed_run_goes_on_in_its_folder_only(workdir, model_folder, capsys):
    assert main(["train", *flags(model_folder, max_steps=1)]) == 0
    assert main(["train", *flags(model_folder), "--resume_from_checkpoint", "true"]) == 0
    check_earlier_run("out", checkpoint="out/checkpoint-1", model="tiny")
    elsewhere = ["train", *flags(model_folder, output_dir="other"), "--resume_from_checkpoint", "out/checkpoint-1"]
    assert main(elsewhere) == 0
    capsys.readouterr()
    assert main(elsewhere) == 2
    assert "output_dir='other' holds checkpoint-2 and a trained model of an earlier run" in refusal(capsys)


def test_a_folder_without_a_run_is_used(workdir):
    Path("out").mkdir()
    check_earlier_run("out", checkpoint=None, model="tiny")
    for name in ("README.md", ".gitattributes", "runs/events.out", "completions/completions_00001.parquet"):
        path = Path("out") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        check_earlier_run("out", checkpoint=None, model="tiny")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_model.safetensors", "holds a trained model of an earlier run, which this run would overwrite: to"),
        ("checkpoint-3/model.safetensors", "holds checkpoint-3 of an earlier run, which this run would overwrite: to"),
        ("checkpoint-3/trainer_state.json", "holds checkpoint-3 of .* to continue that run, add --resume_from_check"),
    ],
)
def test_what_an_earlier_run_is(workdir, file, said):
    path = Path("out") / file
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UsageError, match=said):
        check_earlier_run("out", checkpoint=None, model="tiny")


def test_a_model_may_be_trained_in_its_own_folder(workdir, model_folder):
    Path("out").mkdir()
    Path("out/model.safetensors").write_text("")
    check_earlier_run("out", checkpoint=None, model="./out")
    Path("out/checkpoint-1").mkdir()
    with pytest.raises(UsageError, match="holds checkpoint-1 and a trained model"):
        check_earlier_run("out", checkpoint=None, model="./out")


@pytest.mark.slow
def test_two_processes_agree_on_whether_there_is_an_earlier_run(workdir, model_folder):
    run = flags(model_folder, method="deep_grpo", num_branches=2)
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trl_explore.cli", "train"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def launched(*more):
        command = [sys.executable, "-m", *launcher, *run, *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    first = launched()
    assert first.returncode == 0, first.stderr[-3000:]
    again = launched()
    assert again.returncode != 0 and again.stderr.count("holds 2 checkpoints and a trained model") == 2
    assert launched("--overwrite_output_dir").returncode == 0
    assert sorted(path.name for path in Path("out/_earlier-1").iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_the_first_ctrl_c_stops_at_the_step_and_the_second_aborts(workdir):
    before = signal.getsignal(signal.SIGINT)
    callback, state, control = InterruptCallback(), TrainerState(), TrainerControl(should_evaluate=True)
    args = TrainingArguments("out", use_cpu=True, save_only_model=True)
    callback.on_train_begin(args, state, control)
    callback.on_step_end(args, state, control)
    assert not control.should_training_stop
    signal.raise_signal(signal.SIGINT)
    callback.on_step_end(args, state, control)
    assert callback.interrupted and control.should_save and control.should_training_stop
    assert not control.should_evaluate and not args.save_only_model
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    callback.on_train_end(args, state, control)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_resume_and_resumes_to_the_full_step_count(workdir, model_folder):
    run = flags(model_folder, max_steps=4, save_strategy="no", save_steps=None, reward_funcs="my_rewards.gated_reward")
    run += ["--method", "deep_grpo", "--num_branches", "2", "--success_threshold", "100"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "trl_explore.cli", "train", *run],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # even where a shell ignores it
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    output = []
    for line in process.stdout:
        output.append(line)
        if "'loss'" in line and len([seen for seen in output if "'loss'" in seen]) == 1:
            process.send_signal(signal.SIGINT)
        if "saving a checkpoint" in line:
            Path("gate").touch()  # only now may the run get beyond the step it waits in
    watchdog.cancel()
    assert process.wait() == 130, "".join(output)
    (checkpoint,) = Path("out").glob("checkpoint-*")
    assert step_of(checkpoint) in (1, 2, 3)
    assert not Path("out/model.safetensors").exists()
    (command,) = [line.strip() for line in output if line.strip().startswith("trl-explore train")]
    assert main([*shlex.split(command)[1:], "--save_strategy", "steps", "--save_steps", "1"]) == 0
    assert step_of("out/checkpoint-4") == 4
    AutoModelForCausalLM.from_pretrained("out")

"""
The code of the pages, run as it stands: of a block that trains nothing, or prints nothing, no reader sees that.

A tiny model takes the place of the Hub's, and options that a page leaves out make the runs small. A comment in front
of a block says what else becomes of it: `run by` another test, only `parsed`, or `not run`, and why.
"""

import contextlib
import io
import json
import random
import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest
import yaml
from commands import EXAMPLES, as_flags
from datasets import load_dataset
from peft import LoraConfig
from test_docs import blocks
from test_retrieval import OK, scripted_server
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed
from trl import GRPOTrainer
from world import CHAT_TEMPLATE, make_model, says

from trl_explore.cli import main
from trl_explore.rewards import accuracy_reward
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.trainers import ExplorationConfig, TreeGRPOTrainer

# What a page says, and what a test can afford.
SMALLER = {
    "Qwen/Qwen2.5-0.5B-Instruct": "./model",
    "Qwen/Qwen2.5-1.5B": "./model",
    "Qwen/Qwen3-4B": "./agent",
    "completions_00010": "completions_00002",
    "max_completion_length=4096": "max_completion_length=64",
    "max_completion_length=128": "max_completion_length=8",
    "max_steps=10": "max_steps=2",
}
# What makes a run tiny, unless the page says otherwise.
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "max_completion_length": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
SMALL_FLAGS = {
    "train": SMALL,
    "eval": {"num_samples": 2, "max_new_tokens": 8},
    "filter": {"max_completion_length": 8},
}
QUESTION = "What is 2+3? End with #### and the number."


# ------------------------------------------------------------------------------------------- the folder of the reader


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    """Models and data, as a reader has them before the first command."""
    folder = tmp_path_factory.mktemp("reader")
    # Some tokens of this model are marked answers, so that some of its samples are right. `Ġ` is Qwen2's space.
    letters = sorted(set(QUESTION.replace(" ", "Ġ")) - {"#"})
    tokens = ["<pad>", "<eos>", "<unk>", "<u>", "<a>", *letters, *(f"#### {digit}\n" for digit in "4567")]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder / "model")
    make_model(vocab_size=len(tokens), max_position_embeddings=512).save_pretrained(folder / "model")
    build_model(seed=0, hidden_size=16, num_layers=1).save_pretrained(folder / "agent")
    build_tokenizer(tools=True).save_pretrained(folder / "agent")
    rows = [{"prompt": QUESTION, "answer": answer} for answer in "5558"]  # the model never says 8
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    talks = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": ["5"]} for i in range(8)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    (folder / "my_module.py").write_text("from trl_explore.trainers import DeepGRPOTrainer as MyTrainer\n")
    shutil.copy(EXAMPLES / "own_advantage.py", folder)
    return folder


@pytest.fixture
def reader(data_folder, tmp_path, monkeypatch):
    """An empty folder with these, which is the working directory."""
    folder = tmp_path / "reader"
    shutil.copytree(data_folder, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # a block is a script of its own
    set_seed(0)
    return folder


def train(*flags, method="deep_grpo"):
    """A tiny run of the command line, into `out`."""
    given = dict(model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs="accuracy_reward")
    command = ["trl-explore", "train", "--method", method, *as_flags(given), *flags, "--output_dir", "out"]
    return run_line(shlex.join(command))


def run_line(line):
    """Run one `trl-explore` command of a page in this process, made small; returns what it prints."""
    words = shlex.split(local(line), comments=True)
    assert words[0] == "trl-explore", line
    name, flags = words[1], words[1:]
    if not {"--help", "--help-all"} & set(flags):
        missing = {key: value for key, value in SMALL_FLAGS.get(name, {}).items() if f"--{key}" not in flags}
        flags += as_flags(missing)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(flags) == 0, line
    return told.getvalue()


def local(text):
    for written, smaller in SMALLER.items():
        text = text.replace(written, smaller)
    return text


def run_script(text, **names):
    """Run a Python block in this process, made small; returns its names and what it prints."""
    text = re.sub("  # .*", "", local(text))  # comments may name options
    missing = [f"{name}={value!r}" for name, value in SMALL.items() if f"{name}=" not in text]
    text = text.replace('output_dir="out"', ", ".join(['output_dir="out"', *missing]))
    scope = vars(sys.modules["__main__"])  # which `reader` has emptied
    scope.update(names)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(compile(text, "block", "exec"), scope)
    return scope, told.getvalue()


def moved(model, folder):
    """Whether a model has other parameters than the one that it began as."""
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return any(not value.equal(start[name]) for name, value in model.state_dict().items())


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -------------------------------------------------------------------------------------------------------------- Python


def search_agent(text, folder):
    with scripted_server(OK) as (url, _):
        scope, _ = run_script(text.replace("http://127.0.0.1:8000/retrieve", url))
        # A random model answers nothing, so no reward differs and no parameter moves.
        assert len(losses(scope["trainer"])) == 2
        assert "A city." in scope["search"]("capital")


def walking_agent(text, folder):
    """Replace the tiny model, which calls no tools, by random walks."""

    def walk(trainer, prompt_ids, *others, **options):
        texts = [random.choice(["!step:direction=right", "!step:direction=right", "done"]) for _ in prompt_ids]
        return [trainer._tokenizer(text + "<eos>")["input_ids"] for text in texts], None

    with pytest.MonkeyPatch.context() as patch:
        says(walk, patch.setattr)
        scope, _ = run_script(text)
    trainer = scope["trainer"]
    assert any(entry.get("reward", 0) > 0 for entry in trainer.state.log_history)
    assert len(losses(trainer)) == 2 and moved(trainer.model, "agent")


def data_rows():
    return load_dataset("json", data_files=str(Path("data.jsonl").resolve()), split="train")


def trained_by(trainer_class, args):
    """A trainer of these classes, after a run that moved its model."""
    trainer = trainer_class(model="./model", reward_funcs=accuracy_reward, args=args, train_dataset=data_rows())
    trainer.train()
    assert moved(trainer.model, "model")
    return trainer


def table_of_branches(text, folder):
    train("--log_completions", "true", "--segment_length", "2", "--segmentation", "fixed")
    _, told = run_script(text)
    assert "parent" in told and re.search(r"^\d+\.0 +[01]\.\d", told, re.MULTILINE), told


def shared_prefixes(text, folder):
    scope, _ = run_script(text)
    assert trained_by(TreeGRPOTrainer, scope["args"]).args.shared_prefix_training == "on"


def own_test(text, folder):
    scope, _ = run_script(text)
    scope["test_with_weight_1_it_is_grpo_bit_for_bit"](folder / "out")


def of_own_classes(trainer_class, config_class, *metrics):
    """Train with classes that a block defines. `config_class` is a name in the block, or None."""

    def run(text, folder):
        scope, _ = run_script(text)
        config = scope[config_class] if config_class else ExplorationConfig
        trainer = trained_by(scope[trainer_class], config(output_dir="out", **SMALL))
        assert {*metrics} <= trainer.state.log_history[0].keys()

    return run


# Blocks that are a part of a run; all others must make a trainer and train it.
PARTS = {
    "BranPOTrainer(": search_agent,
    "class Walk": walking_agent,
    "pandas.read_parquet(": table_of_branches,
    'TreeGRPOConfig(output_dir="out", shared_prefix_training="on")': shared_prefixes,
    "class GuidedConfig": of_own_classes(
        "GuidedDeepGRPOTrainer", "GuidedConfig", "geometry/mean_novelty", "pivots/failure_fraction"
    ),
    "class WReinforceConfig": of_own_classes("WReinforceTrainer", "WReinforceConfig", "advantage/better_fraction"),
    "class HalfwayExplorer": of_own_classes("HalfwayTrainer", "HalfwayConfig", "explore_share"),
    "class RetryExplorer": of_own_classes("RetryTrainer", None, "branch/reward"),
    "def test_with_weight_1": own_test,
}


@pytest.mark.parametrize(("page", "note", "text"), [block for block in blocks("python") if not block.values[1]])
def test_a_python_block_trains_as_it_stands(page, note, text, reader):
    for part, run in PARTS.items():
        if part in text:
            run(text, reader)
            return
    scope, _ = run_script(text)
    trainers = [value for value in scope.values() if isinstance(value, GRPOTrainer)]
    assert trainers, "the block makes no trainer: make one, or tell this test what it is a part of"
    for trainer in trainers:
        assert len(losses(trainer)) == trainer.state.max_steps > 0
        assert moved(trainer.model, "model"), "the block trained nothing"


@pytest.mark.parametrize(("page", "note", "text"), [block for block in blocks("diff") if not block.values[1]])
@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_a_difference_train(page, note, text, side, reader):
    kept = [line[1:] for line in text.splitlines() if line[:1] in (side, " ")]
    names = {
        "accuracy_reward": accuracy_reward,
        "dataset": data_rows(),
        "lora": LoraConfig(target_modules=["q_proj"]),
    }
    scope, _ = run_script("\n".join(kept), **names)
    scope["trainer"].train()
    assert len(losses(scope["trainer"])) == 2


# --------------------------------------------------------------------------------------------------------------- shell


def bash_blocks():
    return [block for block in blocks("bash") if not block.values[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "note", "text"), bash_blocks())
def test_a_command_runs_as_it_stands(page, note, text, reader):
    if "--model_name_or_path out" in text:
        train()
    if "out/trees/" in text:
        train("--dump_trees", "trees", "--node_length", "2", method="tree_grpo")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    assert lines
    for line in lines:
        told = run_line(line)
        assert told.strip(), f"it prints nothing: {line}"
        if "trl-explore train" in line and "--help" not in line:
            words = shlex.split(line, comments=True)
            folder = words[words.index("--output_dir") + 1]
            assert moved(AutoModelForCausalLM.from_pretrained(folder), "model"), line
            assert AutoTokenizer.from_pretrained(folder)("5")
        if "--push_dry_run" in line:
            assert "Dry run: nothing was sent." in told and Path("out/_hub/README.md").is_file()
        if "--output hard.jsonl" in line:
            assert {json.loads(row)["answer"] for row in Path("hard.jsonl").read_text().splitlines()} >= {"8"}
        if "--html" in line:
            assert "<html" in Path("tree.html").read_text()


@pytest.mark.slow
def test_the_comparison_of_the_page_runs(reader):
    (text,) = [block.values[2] for block in blocks("yaml") if "dataset_name: data.jsonl" in block.values[2]]
    document = yaml.safe_load(local(text))
    document["common"] |= {name: SMALL[name] for name in ("use_cpu", "bf16", "per_device_train_batch_size")}
    document["common"] |= {"max_completion_length": 8}
    document |= {"budget": {"steps": 2}, "seeds": [0], "evaluations": 1, "num_eval": 4}
    Path("comparison.yaml").write_text(yaml.safe_dump(document))
    run_line("trl-explore compare --config comparison.yaml --output_dir out/compare")
    assert "DEEP-GRPO" in Path("out/compare/table.md").read_text()


@pytest.mark.slow
def test_the_benchmark_of_the_page_runs(reader):
    (text,) = [block.values[2] for block in blocks("yaml") if "path: ./quiz.jsonl" in block.values[2]]
    Path("quiz.yaml").write_text(text)
    Path("quiz.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "5"}) + "\n")
    train()
    run_line("trl-explore eval --model_name_or_path out --dataset quiz.yaml --output_dir out/eval")
    assert "quiz" in Path("out/eval/results.json").read_text()

"""A trainer of one's own, by its import path: the example and its page, `train`, `compare`, mistakes."""

import ast
import csv
import importlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from commands import EXAMPLES, ROOT
from trl import GRPOConfig, GRPOTrainer
from world import make_dataset, make_model, make_tokenizer, make_trainer, one_batch, trained

from trl_explore.cli import main
from trl_explore.cli.train import parse_train_arguments
from trl_explore.compare.settings import read_comparison
from trl_explore.methods import METHODS
from trl_explore.runs.methods import find_method
from trl_explore.trainers import ExplorationConfig

PAGE = (ROOT / "docs" / "own-method.md").read_text().split("## Your own explorer")[0]
SOURCE = (EXAMPLES / "own_advantage.py").read_text()
OWN = "own_advantage.WReinforceTrainer"
TRAINERS = """
from trl import GRPOTrainer
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationTrainer

class Deep(DeepGRPOTrainer):
    pass

class Theirs(GRPOTrainer):
    pass

class Named(ExplorationTrainer):
    method = "named"

class NoTrainer:
    pass

not_a_class = 3
"""

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(EXAMPLES))
    own_advantage = importlib.import_module("own_advantage")
WReinforceConfig, WReinforceTrainer = own_advantage.WReinforceConfig, own_advantage.WReinforceTrainer


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The folder of the page: model, data, rewards, and the example beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    for name in ("own_advantage", "own_trainers", "own_rewards", "my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    make_model().save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    make_dataset(conversational=True).to_json("data.jsonl")
    Path("own_trainers.py").write_text(TRAINERS)
    Path("my_rewards.py").write_text(
        "def right_digit(completions, answer, **columns):\n"
        "    return [float(gold in said[0]['content']) for said, gold in zip(completions, answer)]\n"
    )
    shutil.copy(EXAMPLES / "own_advantage.py", ".")
    return tmp_path


INPUTS = dict(model_name_or_path="./model", dataset_name="data.jsonl", reward_funcs="my_rewards.right_digit")
SHARED = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8, use_cpu="true", bf16="false")
RUN = dict(INPUTS, **SHARED, output_dir="out", max_steps=2, logging_steps=1, report_to="none", disable_tqdm="true")
TINY = dict(INPUTS, reward_funcs=["my_rewards.right_digit"], budget={"steps": 2}, metrics=["reward"])
TINY |= dict(evaluations=1, num_eval=4, common=SHARED)


def flags(**changes):
    return [text for name, value in (RUN | changes).items() for text in (f"--{name}", str(value))]


def arms(folder):
    with open(Path(folder) / "curves.csv", encoding="utf-8") as file:
        return list(dict.fromkeys(row["arm"] for row in csv.DictReader(file)))


def error_of(capsys):
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert error.count("\n") == 1
    return error


def test_with_weight_1_it_is_grpo_bit_for_bit(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    got, _ = trained(WReinforceTrainer, WReinforceConfig, tmp_path, positive_weight=1.0)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def every_fourth(completions, **columns):
    """With groups of four and no scale: advantages of 0.75, and three of -0.25."""
    return [float(i % 4 == 0) for i in range(len(completions))]


def test_what_is_better_than_its_group_counts_a_tenth(tmp_path):
    options = dict(reward_funcs=every_fourth, scale_rewards="none", shuffle_dataset=False)
    trainer = make_trainer(WReinforceTrainer, WReinforceConfig, tmp_path, **options)
    assert sorted(one_batch(trainer)["advantages"].tolist()) == pytest.approx([-0.25] * 6 + [0.075] * 2)
    assert trainer._metrics["train"]["advantage/better_fraction"] == [0.25]


def test_the_page_shows_what_the_files_say_and_the_trainer_has_at_most_twenty_lines():
    bodies = [ast.unparse(node).splitlines() for node in ast.parse(SOURCE).body if isinstance(node, ast.ClassDef)]
    assert len(bodies) == 2 and sum(map(len, bodies)) <= 20
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 2
    imports, test = shown[1].split("\n\n\n")  # tests/test_page_blocks.py runs both
    assert shown[0] in SOURCE and test in Path(__file__).read_text()


SMALLER = {
    "--max_steps 20": "--max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --report_to none",
    "--max_steps 30": "--max_steps 3 --per_device_train_batch_size 8 --num_generations 4 --report_to none",
    "--save_steps 10": "--save_steps 1",
    "--max_completion_length 80": "--max_completion_length 8",
    "--task doors --methods": "--config tiny.yaml --methods",
    "--tokens 3e4": "--tokens 1",
}
SMALL = dict(warm_start_steps=2, evaluations=1, num_eval=2)
SMALL["common"] = dict(per_device_train_batch_size=4, num_generations=2, max_steps=1)


def page_commands():
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for written, smaller in SMALLER.items():
        assert written in script
        script = script.replace(written, smaller)
    commands = [shlex.split(line) for line in script.replace("\\\n", " ").splitlines()]
    assert all(command[0] == "trl-explore" for command in commands)
    return [command[1:] for command in commands]


@pytest.mark.slow
def test_the_commands_of_the_page_run(workdir, capsys):
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    document = yaml.safe_load(settings)
    Path("own.yaml").write_text(yaml.safe_dump({**document, **SMALL}))
    Path("tiny.yaml").write_text(yaml.safe_dump({"task": "doors", **SMALL}))
    for command in page_commands():
        assert main(command) == 0, capsys.readouterr().err
    assert "  --positive_weight             Weight of advantages above 0; 1 is GRPO [0.1]" in capsys.readouterr().out
    assert Path("out/own/checkpoint-3").is_dir() and Path("out/own/model.safetensors").is_file()
    assert arms("out/doors") == ["GRPO", "WReinforceTrainer"]
    assert arms("out/weights") == ["GRPO", "a tenth", "none at all"]
    assert [arm["name"] for arm in document["arms"]] == arms("out/weights")


def test_it_trains_from_a_file_and_its_card_says_whose_it_is(workdir):
    fields = {**RUN, "trainer": OWN, "positive_weight": 0.5, "reward_funcs": [RUN["reward_funcs"]], "save_steps": 1}
    Path("run.yaml").write_text(yaml.safe_dump(fields))
    assert main(["train", "--config", "run.yaml", "--max_steps", "1"]) == 0
    card = Path("out/README.md").read_text()
    assert "with `WReinforceTrainer`, a subclass of `ExplorationTrainer` of trl-explore." in card
    assert "| `positive_weight` | `0.5` |" in card and "- trl-explore" in card
    state = torch.load("out/checkpoint-1/explore_state_0.pt", weights_only=False)
    assert state["trainer"] == "Exploration"
    assert main(["train", "--config", "run.yaml", "--resume_from_checkpoint", "true"]) == 0
    assert Path("out/checkpoint-2").is_dir()


def test_a_subclass_of_trls_own_trainer_has_grpos_fields(workdir):
    assert main(["train", "--trainer", "own_trainers:Theirs", *flags(max_steps=1)]) == 0
    for given in ("own_trainers.Theirs", "own_trainers:Theirs"):
        row = find_method(given)
        assert (row.title, row.config_class, row.tags) == ("Theirs", GRPOConfig, METHODS["grpo"].tags)


def test_a_subclass_has_what_its_parents_row_says_but_name_title_and_colour(workdir):
    row, parent = find_method("own_trainers.Deep"), METHODS["deep_grpo"]
    for name in ("card", "paper", "options", "metrics"):
        assert getattr(row, name) == getattr(parent, name)
    assert (row.name, row.title, row.style, row.plain) == ("own_trainers.Deep", "Deep", None, False)
    assert row.config_class is parent.config_class and "own_trainers.Deep" not in METHODS
    document = {"task": "chain", "budget": {"tokens": 1}, "arms": [{"method": "own_trainers.Deep"}]}
    assert read_comparison(document).arms[0].options["segment_delimiters"] == [";"]


def test_flags_go_before_the_file_in_which_trainer_it_is(workdir):
    Path("run.yaml").write_text("method: deep_grpo\n")
    script, training, _, _ = parse_train_arguments(["--config", "run.yaml", "--trainer", OWN, "--use_cpu"])
    assert script.trainer == OWN and type(training).__name__ == "WReinforceConfig"
    Path("run.yaml").write_text(f"trainer: {OWN}\n")
    script, training, _, _ = parse_train_arguments(["--config", "run.yaml", "--method", "exploration", "--use_cpu"])
    assert script.trainer is None and type(training) is ExplorationConfig


WRONG = [
    ("no_module.MyTrainer", "'no_module.MyTrainer': importing 'no_module' failed (ModuleNotFoundError: No module"),
    ("own_trainers.Deap", "'own_trainers.Deap': unknown class 'Deap'; did you mean 'Deep'? Imported from"),
    ("own_trainers.not_a_class", "'own_trainers.not_a_class': unknown class 'not_a_class'"),
    ("own_trainers.NoTrainer", "'own_trainers.NoTrainer' is no subclass of ExplorationTrainer, nor of TRL's GRPO"),
    ("own_trainers.Named", "'own_trainers.Named' has method='named', which is no method of trl-explore: leave that"),
]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *((["--trainer", path], f"trainer: {message}") for path, message in WRONG),
        (["--trainer", "deep_grpo"], "trainer='deep_grpo' is no import path, such as my_module.MyTrainer; methods"),
        (["--method", "grpo", "--trainer", OWN], f"method='grpo' and trainer={OWN!r}: give one of the two"),
        (["--config", "both.yaml"], f"method='grpo' and trainer={OWN!r}: give one of the two"),
        (["--trainer", OWN, "--positive_wait", "1"], "'--positive_wait'; did you mean '--positive_weight'?"),
        (["--trainer", OWN, "--num_branches", "2"], f"no field of {OWN}; it belongs to deep_grpo and branpo"),
        (["--trainer", "own_trainers.Theirs", "--path_cache_tokens", "0"], "but --trainer own_trainers.Theirs is TRL"),
        ([], "or --trainer my_module.MyTrainer"),
    ],
)
def test_mistakes_are_explained_in_one_line(argv, message, workdir, capsys):
    Path("both.yaml").write_text(f"method: grpo\ntrainer: {OWN}\n")
    assert main(["train", *argv, *flags()]) == 2
    assert message in error_of(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--processes", "1"]], ids=str)
def test_a_comparison_that_was_stopped_goes_on_with_a_trainer_of_ones_own(more, workdir):
    document = {**TINY, "arms": [{"method": "grpo"}, {"method": OWN}]}
    Path("run.yaml").write_text(yaml.safe_dump(document))
    command = ["compare", "--config", "run.yaml", "--output_dir", "out", *more]
    assert main(command) == 0
    assert arms("out") == ["GRPO", "WReinforceTrainer"]
    before = (Path("out") / "grpo-seed0" / "run.json").stat().st_mtime_ns
    finished = Path("out/curves.csv").read_text()
    (Path("out") / "wreinforcetrainer-seed0" / "run.json").unlink()
    sys.modules.pop("own_advantage")  # as in a new process
    assert main(["compare", "--config", "out/comparison.yaml", "--output_dir", "out", *more]) == 0
    assert (Path("out") / "grpo-seed0" / "run.json").stat().st_mtime_ns == before
    assert arms("out") == ["GRPO", "WReinforceTrainer"] and len(finished.splitlines()) == 5


def test_arms_of_one_trainer_differ_in_fields_and_have_names(workdir):
    given = [{"name": f"weight {w}", "method": OWN, "options": {"positive_weight": w}} for w in (0.1, 1.0)]
    comparison = read_comparison({**TINY, "arms": given})
    assert [(arm.name, arm.method, arm.options) for arm in comparison.arms] == [
        ("weight 0.1", OWN, {"positive_weight": 0.1}),
        ("weight 1.0", OWN, {"positive_weight": 1.0}),
    ]
    assert [arm["options"] for arm in comparison.document()["arms"]] == [entry["options"] for entry in given]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"method": WRONG[0][0]}, f"arms[0]: {WRONG[0][1]}"),
        ({"method": "expliration"}, "arms[0]: unknown method 'expliration'; did you mean 'exploration'? A trainer of"),
        ({"method": OWN, "options": {"positive_wait": 1}}, f"unknown field of {OWN} 'positive_wait'; did you mean"),
        (
            {"method": "grpo", "options": {"path_cache_tokens": 0}},
            "path_cache_tokens is a field of trl-explore's trainers, but grpo is TRL's own: make the method of GRPO",
        ),
    ],
)
def test_mistakes_in_arms_are_explained_in_one_line(arm, message, workdir, capsys):
    Path("run.yaml").write_text(yaml.safe_dump({**TINY, "arms": [arm]}))
    assert main(["compare", "--config", "run.yaml", "--output_dir", "out"]) == 2
    assert message in error_of(capsys)

"""Configuration files: each says what its example script does, and trains with it."""

import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
import yaml
from commands import EXAMPLES, ROOT, parsed
from datasets import Dataset
from world import saved_model

from trl_explore.cli import main
from trl_explore.cli.train import parse_train_arguments
from trl_explore.compare.settings import read_comparison
from trl_explore.methods import METHODS

CONFIGS = EXAMPLES / "configs"
# An agent's script is named after its agent, and its data are not on the command line.
SCRIPTS = {row.name: f"{row.name}.py" for row in METHODS.values() if not row.plain}
SCRIPTS |= {"branpo": "branpo_search_agent.py", "gigpo": "gigpo_sokoban_agent.py"}
SCRIPTS |= {"agent_tree_grpo": "agent_tree_grpo_search_agent.py"}
ON_THE_COMMAND_LINE = [name for name in SCRIPTS if not METHODS[name].needs_tools]
AGENTS = [name for name in SCRIPTS if METHODS[name].needs_tools]
PAGE = (ROOT / "docs" / "paper-runs.md").read_text()

# Made up, in the columns of the real ones.
RAW = {
    "openai/gsm8k": {"question": "1+1?", "answer": "so\n#### 2"},
    "zwhe99/DeepMath-103K": {"question": "1+1?", "final_answer": "2", "difficulty": 5.0},
    "open-r1/DAPO-Math-17k-Processed": {"prompt": "1+1?", "solution": "2", "data_source": "math"},
    "DigitalLearningGmbH/MATH-lighteval": {"problem": "1+1?", "solution": "so \\boxed{2}", "level": "Level 1"},
}


def values(config):
    return {field.name: vars(config)[field.name] for field in fields(config)}


def from_script(name, monkeypatch, *flags):
    return parsed([str(EXAMPLES / SCRIPTS[name]), *flags], monkeypatch)


def test_every_example_script_has_a_file():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == SCRIPTS.keys()


@pytest.mark.parametrize("knob", ["parallel_expansions", "parallel_sketches"])
def test_a_comparison_of_one_knob_changes_nothing_else(knob):
    arms = read_comparison(yaml.safe_load((EXAMPLES / "benchmarks" / f"{knob}.yaml").read_text())).arms
    (first, *others), grpo = arms[:-1], arms[-1]
    assert [arm.options for arm in others] == [{**first.options, knob: number} for number in (2, 4)]
    assert (first.method != "grpo", grpo.method) == (True, "grpo")


def test_credit_and_selection_differ_from_grpo_in_their_own_fields():
    """And the methods have what the regime of the same task picked for them."""
    comparison = read_comparison(yaml.safe_load((EXAMPLES / "benchmarks" / "credit_and_selection.yaml").read_text()))
    grpo, *others = comparison.arms
    rivals = [arm for arm in others if arm.method == "exploration"]
    own = [arm.options.keys() - grpo.options.keys() for arm in rivals]
    assert all(grpo.options.items() <= arm.options.items() for arm in rivals)
    advantages = [{"advantage"}, *[{"advantage", "passk_k"}] * 3, {"advantage"}]
    assert own == [*advantages, {"clip_cov"}, {"dynamic_sampling"}, {"dynamic_sampling"}]
    searches = ["deep_grpo", "deep_grpo", "tree_grpo", "tree_grpo", "sesa", "g2rl"]
    assert [arm.method for arm in others[len(rivals) :]] == searches
    regime = yaml.safe_load((EXAMPLES / "benchmarks" / "regimes" / "dead_ends.yaml").read_text())["comparison"]
    assert comparison.task.name == regime["task"] and comparison.amount == float(regime["budget"]["tokens"])


@pytest.mark.parametrize("name", ON_THE_COMMAND_LINE)
def test_the_file_says_what_the_script_does(name, monkeypatch):
    _, training, model = from_script(name, monkeypatch)
    ours, found, found_model, _ = parse_train_arguments(["--config", str(CONFIGS / f"{name}.yaml"), "--use_cpu"])
    assert type(found) is type(training)
    assert values(found) == values(training)
    assert values(found_model) == values(model)
    assert (ours.method, ours.reward_funcs) == (name, ["accuracy_reward"])


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_file_is_its_scripts_own_defaults(name, monkeypatch):
    file = CONFIGS / f"{name}.yaml"
    for expected, found in zip(
        from_script(name, monkeypatch), from_script(name, monkeypatch, "--config", str(file)), strict=True
    ):
        assert values(found) == values(expected)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_files_first_lines_say_how_to_run_it(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    command = " ".join(re.findall(r"^#   +(.*?) *\\?$", text, re.MULTILINE))
    assert f"examples/configs/{name}.yaml" in command and command in " ".join(PAGE.replace("\\\n", " ").split())
    memory = re.search(r"# Hardware: one GPU with (\d+) GB", text).group(1)
    assert re.search(rf"configs/{name}.yaml` .*\| {memory} GB", PAGE)
    if name in ON_THE_COMMAND_LINE:
        assert yaml.safe_load(text)["dataset_name"] in PAGE


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_command_on_the_page_parses(name, monkeypatch):
    lines = PAGE.replace("\\\n", " ").splitlines()
    (command,) = (line for line in lines if line.startswith(f"python examples/{SCRIPTS[name]} "))
    assert parsed(shlex.split(command)[1:], monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder with the data of all files, made by what the page shows."""
    folder = tmp_path_factory.mktemp("data")
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda name, *config, split: Dataset.from_list([RAW[name]] * 8))
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        patch.chdir(folder)
        exec(snippet, {})
    return folder


@pytest.mark.parametrize("name", ON_THE_COMMAND_LINE)
def test_every_method_trains_from_its_file(name, data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    small = dict(max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=1, num_generations=4)
    small |= dict(max_completion_length=4, save_strategy="no", report_to="none", use_cpu="true", bf16="false")
    small |= {"tree_grpo": dict(node_length=2, overlong_buffer=0), "sesa": dict(max_sketch_length=2)}.get(name, {})
    small |= {"evol_rl": dict(embedding_model="ngrams")}.get(name, {})
    small |= dict(model_name_or_path=saved_model(), output_dir=tmp_path, disable_tqdm="true")
    flags = [text for field, value in small.items() for text in (f"--{field}", str(value))]
    assert main(["train", "--config", str(CONFIGS / f"{name}.yaml"), *flags]) == 0
    assert (tmp_path / "model.safetensors").exists()


def test_the_data_have_a_prompt_and_the_answer_alone(data):
    files = sorted(Path(data).glob("*.jsonl"))
    assert [file.name for file in files] == ["dapo-math.jsonl", "deepmath.jsonl", "gsm8k.jsonl", "math.jsonl"]
    for file in files:
        row = Dataset.from_json(str(file))[0]
        assert row.keys() == {"prompt", "answer"} and row["answer"] in ("2", "so\n#### 2")
        assert "1+1?" in row["prompt"][-1]["content"]

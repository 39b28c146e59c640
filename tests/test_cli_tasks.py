"""Tasks on the command line: in `train`, `compare`, `eval` and `filter`, and the list of all tasks."""

import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import yaml
from commands import TINY_RUN, as_flags
from test_docs import page_blocks, parse
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from world import contains_answer, make_dataset, make_model, make_tokenizer

from trl_explore.cli import main
from trl_explore.cli.train import parse_train_arguments
from trl_explore.compare.settings import read_comparison
from trl_explore.environments import specs
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.runs import tasks
from trl_explore.runs.inputs import check_model
from trl_explore.tasks import AGENTS, TASKS
from trl_explore.tasks.tiny_model import build_model, build_tokenizer

SUMS, GAME = "reasoning_gym:sums", "textarena:Search-v0"


def sums_reward(completions, answer, **columns):
    return contains_answer(completions, answer)


class SumsSpec:
    """Sums of two digits, as a task of another package."""

    environment_factory = None

    def __init__(self, name, *, size=24, seed=0, eval_size=8, harder=False):
        if name != "sums":
            raise ValueError(f"unknown data set {name!r}; did you mean 'sums'?")
        self.name, self.size, self.seed, self.eval_size, self.harder = SUMS, size, seed, eval_size, harder
        self.rows = make_dataset(conversational=True).shuffle(seed=seed)
        self.options = {"max_completion_length": 6, "temperature": 0.9}
        self.reward_funcs = sums_reward

    @property
    def train_dataset(self):
        return self.rows.select(range(min(self.size, 24)))

    @property
    def eval_dataset(self):
        return self.rows.select(range(24, 24 + self.eval_size))

    def demonstration(self, row, rng):
        answer = row["answer"] if rng.random() < 0.5 else "0"
        return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": answer}]}


class SearchSpec:
    """The embedded search task, as a game of another package."""

    def __init__(self, name, *, size=16, seed=0, eval_size=8):
        task = AGENTS["multi_hop"]
        self.name = f"textarena:{name}"
        self.train_dataset = task.build_dataset(size, seed=seed + 1)
        self.eval_dataset = task.evaluation_set(eval_size)
        self.reward_funcs, self.environment_factory = task.reward, task.environment_factory
        self.options = {"max_completion_length": 40, "max_tool_calling_iterations": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder with two tiny models: `tiny` writes digits, and `agent` calls tools."""
    folder = tmp_path_factory.mktemp("models")
    make_model().save_pretrained(folder / "tiny")
    make_tokenizer().save_pretrained(folder / "tiny")
    agent = build_model(seed=0, hidden_size=16, num_layers=1)
    agent.config.max_position_embeddings = 1024  # a character is a token, and packages' prompts are long
    agent.save_pretrained(folder / "agent")
    build_tokenizer(tools=True).save_pretrained(folder / "agent")
    return folder


@pytest.fixture
def loaded(models, tmp_path, monkeypatch):
    """Calls of `load_spec`, which returns stand-ins for the tasks of packages. The working directory is empty but for
    two models."""
    calls = []

    def load(name, config=None, *, seed=0):
        calls.append((name, dict(config or {}), seed))
        spec = SumsSpec if name.startswith("reasoning_gym:") else SearchSpec
        return spec(name.partition(":")[2], **{"seed": seed, **(config or {})})

    for name in ("tiny", "agent"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(specs, "load_spec", load)
    monkeypatch.setenv("TRL_EXPLORE_CACHE", str(tmp_path / "cache"))
    tasks._spec_task.cache_clear()
    yield calls
    tasks._spec_task.cache_clear()


@pytest.fixture
def taught(monkeypatch):
    """Calls of `teach`, which returns a model without training it."""
    calls = []

    def teach(model, spec, *, steps, seed=0, cache_dir=None, progress=True, device=None):
        calls.append((model, spec.name, steps, seed, device))
        folder = Path("taught")
        if not folder.is_dir():
            make_model(seed=9).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
        return folder

    monkeypatch.setattr("trl_explore.pretrained.teaching.teach", teach)
    return calls


def train_flags(**fields):
    settings = {"method": "exploration", "model_name_or_path": "./tiny", "task": SUMS}
    settings |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    return as_flags({**settings, **TINY_RUN, **fields})


def card_of(folder):
    return " ".join(Path(folder, "README.md").read_text().split())


def logs(folder="out"):
    last = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def assert_told_in_one_line(message, capsys):
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


# --------------------------------------------------------------------------------------------------------------- train


@pytest.mark.parametrize("method", ["grpo", "exploration"])
def test_a_task_brings_data_reward_and_fields(method, loaded, capfd):
    """The rows do not depend on the seed of the run."""
    flags = train_flags(method=method, task_config='{"harder": true}', eval_strategy="steps", eval_steps=1)
    assert main(["train", *flags, "--seed", "1", "--data_seed", "1"]) == 0
    assert set(map(str, loaded)) == {str((SUMS, {"harder": True}, 0))}
    entries = logs()
    assert all("rewards/sums_reward/mean" in entry for entry in entries if "reward" in entry)
    assert any("eval_reward" in entry for entry in entries)
    assert max(entry["completions/max_length"] for entry in entries if "reward" in entry) <= 6
    if method != "grpo":
        assert f"on problems of the task `{SUMS}`" in card_of("out") and "datasets:" not in card_of("out")


def test_the_same_command_goes_on_with_the_same_rows(loaded, capfd):
    assert main(["train", *train_flags()]) == 0
    whole = AutoModelForCausalLM.from_pretrained("out").state_dict()
    Path("out").rename("whole")
    assert main(["train", *train_flags(max_steps=1)]) == 0
    assert main(["train", *train_flags(resume_from_checkpoint="true")]) == 0
    resumed = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert all(value.equal(resumed[name]) for name, value in whole.items())


def test_fields_of_a_task_hold_unless_file_or_flags_have_them(loaded):
    def arguments(flags=(), **of_file):
        Path("run.yaml").write_text(yaml.safe_dump(of_file))
        return parse_train_arguments([*train_flags(), "--config", "run.yaml", *flags])

    def config(*given, **of_file):
        return arguments(*given, **of_file)[1]

    assert (config().max_completion_length, config().temperature) == (6, 0.9)
    assert config(max_completion_length=9).max_completion_length == 9
    assert config(["--max_completion_length", "7"], max_completion_length=9).max_completion_length == 7
    assert config(["--max-completion-length", "5"]).max_completion_length == 5
    assert GRPOConfig("out", use_cpu=True, bf16=False).temperature == 1.0  # else this test would prove nothing
    script = arguments(task="chain", task_config={"size": 5, "seed": 7})[0]  # a file gives a mapping
    assert (script.task, script.task_config) == (SUMS, {"size": 5, "seed": 7})
    assert loaded[-1] == (SUMS, {"size": 5, "seed": 7}, 0)


def test_steps_of_attn_rl_end_where_the_task_says(loaded, monkeypatch):
    def fields(*flags):
        config = parse_train_arguments([*train_flags(method="attn_rl"), *flags])[1]
        return config.step_delimiters, config.influence_distance, config.fork_distance

    assert fields() == (["\n\n"], 4, 6 // 16)
    monkeypatch.setattr(SumsSpec, "step_delimiters", ["\n"], raising=False)
    assert fields() == (["\n"], 1, 0)
    assert fields("--step_delimiters", ";", ".", "--influence_distance", "2") == ([";", "."], 2, 0)
    arms = [{"method": "attn_rl"}, {"name": "other", "method": "attn_rl", "options": {"step_delimiters": [";"]}}]
    options = [arm.options["step_delimiters"] for arm in read_comparison({**COMPARISON, "arms": arms}).arms]
    assert options == [["\n"], [";"]]


def test_further_rewards_come_behind_the_tasks(loaded, capfd):
    Path("task_rewards.py").write_text("def length(completions, **columns):\n    return [2.0] * len(completions)\n")
    assert main(["train", *train_flags(reward_funcs="task_rewards.length", max_steps=1)]) == 0
    entry = logs()[0]
    assert entry["rewards/length/mean"] == 2.0 and entry["reward"] == entry["rewards/sums_reward/mean"] + 2.0


def test_a_model_is_taught_a_task_before_the_run(loaded, taught, capfd):
    assert main(["train", *train_flags(warm_start_steps=3, max_steps=1, learning_rate=0)]) == 0
    assert taught == [("tiny", SUMS, 3, 0, "cpu")]
    start, end = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in ("taught", "out"))
    assert all(value.equal(end[name]) for name, value in start.items())


def test_a_warm_start_does_not_change_the_precision_of_the_run(loaded, capfd):
    # The run's bf16 is false, and the warm start computes in bfloat16.
    assert main(["train", *train_flags(warm_start_steps=1, max_steps=1)]) == 0
    assert compare({**COMPARISON, "warm_start_steps": 2}, "--methods", "grpo", "exploration") == 0
    assert len(list(Path("cache").glob("reasoning_gym-sums-*"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("task", "length"), [("chain", 73), ("multi_hop", 113)])
def test_an_embedded_task_brings_its_tiny_model(task, length, loaded, capfd):
    changes = {"task": task, "model_name_or_path": None, "method": "deep_grpo", "warm_start_steps": 2}
    flags = train_flags(**changes, max_steps=1, eval_strategy="steps", eval_steps=1, use_cpu=None, bf16=None)
    arguments = parse_train_arguments(flags)
    assert arguments[1].max_completion_length == length and arguments[1].use_cpu
    assert arguments[1].segmentation == ("delimiter" if task == "chain" else "fixed")
    assert main(["train", *flags]) == 0
    assert len(list(Path("cache").glob(f"{task}-seed42-*"))) == 1  # of the run's seed, as in `compare`
    assert f"problems of the task `{task}`" in card_of("out")
    # The trained model is trained again instead of the tiny model.
    more = {**changes, "model_name_or_path": "out", "warm_start_steps": None, "output_dir": "more"}
    assert main(["train", *train_flags(**more, max_steps=1)]) == 0
    assert len(list(Path("cache").glob("*"))) == 1


NO_TASK = {"task": None, "dataset_name": "d.jsonl"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "d.jsonl"}, f"task='{SUMS}' and dataset_name='d.jsonl': a task brings its data; leave one"),
        ({"datasets": [{"path": "d.jsonl"}]}, "and datasets=[{'path': 'd.jsonl'}]: a task brings its data"),
        ({"task": "chian"}, "task: unknown task 'chian'; did you mean 'chain'? All: trl-explore tasks"),
        ({"task": "reasoning_gmy:sums"}, "unknown source of tasks 'reasoning_gmy'; did you mean 'reasoning_gym'?"),
        ({"task": "reasoning_gym:sumz"}, "task='reasoning_gym:sumz': unknown data set 'sumz'; did you mean 'sums'?"),
        ({"task": "textarena"}, "task='textarena' is a package with many tasks; name one of them"),
        ({"task_config": '{"hard": 1}'}, f"task='{SUMS}' with task_config={{\"hard\": 1}}: "),
        ({"task_config": "{hard: 1}"}, "task_config='{hard: 1}' is no JSON (Expecting property name"),
        ({"task_config": "3"}, "task_config='3': expected fields with values, such as --task_config '{"),
        ({"task": "chain", "task_config": '{"a": 1}'}, "task_config={'a': 1}: the task chain has no fields"),
        ({**NO_TASK, "task_config": "{}"}, "task_config='{}' belongs to a task; name one"),
        ({**NO_TASK, "warm_start_steps": 2}, "warm_start_steps=2 belongs to a task"),
        ({"warm_start_steps": 0}, "warm_start_steps=0: give at least 1"),
        (
            {"task": GAME, "warm_start_steps": 2},
            f"warm_start_steps=2: {GAME} writes no demonstrations; leave warm_start_steps out",
        ),
        ({"task": "chain", "warm_start_steps": 2}, "warm_start_steps=2 teaches chain to its tiny model, but"),
        ({"model_name_or_path": None}, f"model_name_or_path is missing: {SUMS} has no model of its own; pass"),
        ({"method": "branpo"}, f"branpo does not suit the task {SUMS}, which has no tools; use one of deep_grpo, "),
        ({"task": GAME, "method": "tree_grpo"}, f"tree_grpo does not suit the task {GAME}, which is played with"),
        ({"task": "chain", "method": "sesa"}, "sesa does not suit the task chain; it suits doors, deep_doors"),
    ],
)
def test_mistakes_are_told_in_one_line_before_anything_is_trained(changes, message, loaded, capsys):
    Path("d.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("run.yaml").write_text(yaml.safe_dump({"datasets": changes["datasets"]} if "datasets" in changes else {}))
    flags = {name: value for name, value in changes.items() if name != "datasets"}
    if changes.get("task", SUMS) is None:
        flags = {"reward_funcs": "accuracy_reward", **flags}
    assert main(["train", "--config", "run.yaml", *train_flags(**flags)]) == 2
    assert_told_in_one_line(message, capsys)
    assert not Path("out").exists()


def test_a_package_that_is_missing_is_named(loaded, monkeypatch, capsys):
    def load(name, config=None, *, seed=0):
        raise ImportError('it needs reasoning-gym: pip install "trl-explore[reasoning-gym]".')

    monkeypatch.setattr(specs, "load_spec", load)
    assert main(["train", *train_flags()]) == 2
    assert f"task='{SUMS}': it needs reasoning-gym: pip install" in capsys.readouterr().err


def test_smollm2_is_the_model_of_the_installed_package(models, monkeypatch):
    found = {"smollm2": str(models / "tiny")}
    monkeypatch.setattr("trl_explore.pretrained.smollm2.find_pretrained", lambda name: found.get(name, name))
    assert check_model("smollm2", revision=None, trust_remote_code=False) == str(models / "tiny")


# ------------------------------------------------------------------------------------------------------------- compare


COMPARISON = {
    "task": SUMS,
    "model_name_or_path": "./tiny",
    "budget": {"steps": 1},
    "evaluations": 1,
    "num_eval": 4,
    "common": dict(per_device_train_batch_size=8, num_generations=4, learning_rate=1e-2, use_cpu=True, bf16=False),
}


def compare(document, *flags):
    Path("run.yaml").write_text(yaml.safe_dump(document))
    return main(["compare", "--config", "run.yaml", "--output_dir", "out", *flags])


def runs():
    return {path.parent.name: json.loads(path.read_text()) for path in Path("out").glob("*/run.json")}


def test_all_runs_begin_with_the_model_that_was_taught_once(loaded, taught, capfd):
    # The task is named by flags, so that their reading is tested, too.
    document = {name: value for name, value in COMPARISON.items() if name not in ("task", "model_name_or_path")}
    document["metrics"] = ["reward", "pass_at_2", "maj_at_2"]
    named = ("--task", SUMS, "--task_config", '{"harder": true}', "--model_name_or_path", "./tiny")
    flags = ("--methods", "grpo", "exploration", "--seeds", "3", "4", "--warm_start_steps", "5")
    assert compare(document, *named, *flags) == 0
    assert taught == [("tiny", SUMS, 5, 0, "cpu")] and loaded[-1] == (SUMS, {"harder": True}, 0)
    starts = [run["points"][0] for run in runs().values()]
    assert len(starts) == 4 and len({point["eval/reward"] for point in starts}) == 1  # the same model, the same rows
    assert {"eval/pass_at_2", "eval/maj_at_2"} <= starts[0].keys() and len(starts[0]["correct"]) == 4
    settings = yaml.safe_load(Path("out/comparison.yaml").read_text())
    assert settings["warm_start_steps"] == 5 and settings["task_config"] == {"harder": True}
    assert settings["common"]["max_completion_length"] == 6
    assert settings.pop("fingerprints").keys() == {"training_rows", "held_out_rows", "model"}
    assert read_comparison(settings).document() == settings

    comparison = read_comparison({**COMPARISON, "warm_start_steps": 5, "seeds": [3, 4]})
    assert [comparison.warm_start_seed(seed) for seed in comparison.seeds] == [0, 0]
    embedded = read_comparison({"task": "chain", "budget": {"steps": 1}, "seeds": [3, 4]})
    assert [embedded.warm_start_seed(seed) for seed in embedded.seeds] == [3, 4]


def test_an_agents_task_is_evaluated_by_whole_games(loaded, capfd):
    document = {**COMPARISON, "task": GAME, "model_name_or_path": "./agent", "metrics": ["reward", "pass_at_2"]}
    assert compare(document, "--methods", "grpo", "branpo") == 0
    for run in runs().values():
        assert [point["step"] for point in run["points"]] == [0, 1]
        assert {"eval/reward", "eval/pass_at_2"} <= run["points"][0].keys() and len(run["points"][0]["correct"]) == 4


def test_methods_that_suit_a_task_are_those_with_or_without_tools(loaded):
    def methods(**changes):
        comparison = read_comparison({**COMPARISON, **changes})
        return [arm.method for arm in comparison.arms]

    without = [row.name for row in METHODS.values() if not row.plain and not row.needs_tools]
    assert methods() == ["grpo", *without]
    playing = methods(task=GAME)
    of_both = {"grpo", "deep_grpo", "g2rl", "auto"}  # they suit tasks with tools and tasks without
    assert {row.name for row in METHODS.values() if row.needs_tools} | of_both == set(playing)


def test_what_suits_a_task_is_filled_in(loaded, monkeypatch):
    monkeypatch.setattr("trl_explore.compare.settings.available_accelerator", lambda: None)
    comparison = read_comparison({**COMPARISON, "common": {"temperature": 0.5}})
    common = comparison.common
    assert (common["temperature"], common["max_completion_length"]) == (0.5, 6)
    assert common["use_cpu"] is True and common["bf16"] is False  # TRL's default needs a GPU, and has no flag here
    assert comparison.metrics == ("reward", "greedy_accuracy", "pass_at_1", "pass_at_8")
    whole = read_comparison({name: value for name, value in COMPARISON.items() if name != "num_eval"})
    assert whole.num_eval == 8  # all that there are
    assert read_comparison({**COMPARISON, "dtype": "float32", "use_peft": True}).subject["use_peft"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name_or_path": None}, f"model_name_or_path is missing: {SUMS} has no model of its own; give"),
        ({"dataset_name": "d"}, "dataset_name: `task` has its own data and reward; leave one of the two out"),
        ({"task": "chain"}, "model_name_or_path: `task` has its own model, data and reward"),
        ({"task": None, "task_config": {"a": 1}}, "task_config={'a': 1} belongs to a `task`; name one"),
        ({"num_eval": 9}, f"num_eval=9: {SUMS} has 8 held-out rows; lower num_eval, or set a larger eval_size"),
        ({"model_size": {"num_layers": 3}}, "only the model of an embedded `task` is built"),
        ({"arms": [{"method": "gigpo"}]}, f"arms[0]: gigpo does not suit the task {SUMS}, which has no tools"),
        ({"warm_start_steps": 0}, "warm_start_steps=0: give an integer of at least 1"),
        ({"task": GAME, "metrics": ["maj_at_2"]}, "metrics: maj_at_2 is not measured for agents"),
        ({"task": GAME, "samples_at_ends": 3}, "samples_at_ends=3: give a multiple of 4"),
    ],
)
def test_mistakes_in_a_comparison_are_told_in_one_line(changes, message, loaded, capsys):
    document = {name: value for name, value in {**COMPARISON, **changes}.items() if value is not None}
    assert compare(document) == 2
    assert_told_in_one_line(message, capsys)
    assert not Path("out").exists()


# ---------------------------------------------------------------------------------------------------------------- eval


def evaluate(*flags):
    return main(["eval", "--model_name_or_path", "./tiny", "--output_dir", "out", "--num_samples", "2", *flags])


def test_a_model_is_evaluated_on_the_held_out_rows_of_a_task(loaded, capsys):
    assert evaluate("--task", SUMS, "--task_config", '{"harder": true}', "--limit", "5") == 0
    entry = json.loads(Path("out/results.json").read_text())["results"]["reasoning_gym__sums"]
    assert entry["num_prompts"] == 5 and entry["settings"]["max_new_tokens"] == 6
    assert entry["dataset"] == {"path": SUMS, "config": '{"harder": true}', "split": "evaluation"}
    assert Path("out/reasoning_gym__sums/completions.jsonl").read_text()
    assert loaded[-1] == (SUMS, {"harder": True}, 0)
    assert "reasoning_gym__sums" in capsys.readouterr().out


def test_a_task_is_evaluated_beside_data_sets(loaded, capsys):
    make_dataset().select(range(3)).to_json("data.jsonl")
    assert evaluate("--dataset", "data.jsonl", "--task", SUMS, "--max_new_tokens", "4") == 0
    results = json.loads(Path("out/results.json").read_text())["results"]
    assert {name: entry["num_prompts"] for name, entry in results.items()} == {"data": 3, "reasoning_gym__sums": 8}


def test_an_embedded_task_is_evaluated_by_either_flag(loaded, capsys):
    values = []
    for flag in ("--task", "--dataset"):
        given = ["--model_name_or_path", "./agent", "--output_dir", f"out{flag}", "--num_samples", "2"]
        assert main(["eval", *given, flag, "doors", "--limit", "3"]) == 0
        values.append(json.loads(Path(f"out{flag}/results.json").read_text())["results"]["doors"]["metrics"])
    assert values[0] == values[1]


# -------------------------------------------------------------------------------------------------------------- filter


def keep_hard(*flags):
    return main(["filter", "--model_name_or_path", "./tiny", "--output", "hard.jsonl", "--threshold", "1", *flags])


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_training_prompts_of_a_task_are_filtered(loaded, capsys):
    assert keep_hard("--task", SUMS, "--task_config", '{"harder": true, "size": 12}') == 0
    assert loaded[-1] == (SUMS, {"harder": True, "size": 12}, 0) and "of 12 prompts" in capsys.readouterr().out
    kept = rows_of("hard.jsonl")
    rates = [row.pop("pass_rate") for row in kept]
    of_task = SumsSpec("sums", size=12).train_dataset.to_list()
    assert kept and all(row in of_task for row in kept) and max(rates) < 1
    settings = rows_of("hard.jsonl.scores.jsonl")[0]
    assert settings["max_completion_length"] == 6 and settings["reward_funcs"] == ["sums_reward"]


def test_flags_of_filter_override_what_the_task_brings(loaded, capsys):
    Path("always.py").write_text("def reward(completions, **columns):\n    return [1.0] * len(completions)\n")
    own = ("--reward_funcs", "always.reward", "--max_completion_length", "3")
    assert keep_hard("--task", SUMS, *own) == 2
    assert "no prompt is left" in capsys.readouterr().err
    settings = rows_of("hard.jsonl.scores.jsonl")[0]
    assert settings["max_completion_length"] == 3 and settings["reward_funcs"] == ["reward"]


def test_prompts_of_an_embedded_task_are_filtered(loaded, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "NUM_TRAIN", 8)
    assert keep_hard("--task", "doors", "--model_name_or_path", "./agent", "--seed", "3") == 0
    assert [row["prompt"] for row in rows_of("hard.jsonl")] == TASKS["doors"].build_dataset(8, seed=3)["prompt"][:]


def test_rows_that_a_package_cannot_generate_end_filter_in_one_line(loaded, monkeypatch, capsys):
    def fail(spec):
        raise ValueError("no problem has these fields")

    monkeypatch.setattr(SumsSpec, "train_dataset", property(fail))
    assert keep_hard("--task", SUMS) == 2
    assert capsys.readouterr().err == f"trl-explore: error: task='{SUMS}': no problem has these fields\n"


# --------------------------------------------------------------------------------------------------------------- tasks


def list_tasks(*flags):
    return main(["tasks", *flags])


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the modules of both packages."""
    gym = types.ModuleType("trl_explore.environments.reasoning_gym")
    arena = types.ModuleType("trl_explore.environments.text_arena")
    gym.list_names = lambda: ["sums", "words"]
    arena.list_names = lambda: ["Go-v0", "Go-v0-raw", "Go-v0-train", "Chess-v1-long"]
    for module in (gym, arena):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    factory = types.ModuleType("reasoning_gym.factory")
    factory.create_dataset = lambda name, size, seed: [{"question": f"Ask {name}\nabout {'x' * 200}"}]
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    return gym, arena


def test_every_task_has_one_line_with_an_example(packages, capsys):
    def shown(*flags):
        assert main(["tasks", *flags]) == 0
        return capsys.readouterr().out

    lines = shown().splitlines()
    groups = {
        "embedded": list(TASKS),
        "agents": list(AGENTS),
        "reasoning_gym": ["reasoning_gym:sums", "reasoning_gym:words"],
        "textarena": ["textarena:Go-v0", "textarena:Chess-v1-long"],
    }
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == [name for group in groups.values() for name in group]
    text = "\n".join(lines)
    assert "2a*3b*3c*3d-0e*7f*7g+1h*7i-4j+7" in text
    assert "Ask sums about xxx" in text and "3 variants, also Go-v0-raw, Go-v0-train" in text and "1 variant" in text
    assert max(map(len, lines)) <= 120
    for group, names in groups.items():
        assert [line.split()[0] for line in shown(group).splitlines() if line.startswith("  ")] == names
        found = json.loads(shown(group, "--json"))
        assert [(line["name"], line["group"]) for line in found["tasks"]] == [(name, group) for name in names]
        assert found["missing"] == {}


def test_a_missing_package_has_a_line_that_says_what_to_install(packages, capsys):
    def missing():
        raise ImportError("no such package")

    packages[0].list_names = missing
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert 'reasoning-gym is not installed: pip install "trl-explore[reasoning-gym]"' in shown
    assert "textarena:Go-v0" in shown and "chain" in shown
    assert main(["tasks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"].keys() == {"reasoning_gym"}


def test_one_task_is_shown_with_prompt_columns_and_fields(loaded, capsys):
    assert main(["tasks", SUMS, "--task_config", '{"harder": true}']) == 0
    shown = capsys.readouterr().out
    row = SumsSpec("sums").eval_dataset[0]
    assert f"  {row['prompt'][0]['content']}\n" in shown and f'answer  "{row["answer"]}"' in shown
    assert "harder     false" in shown and "eval_size  8" in shown and "max_completion_length  6" in shown
    assert loaded[-1] == (SUMS, {"size": 1, "eval_size": 1, "harder": True}, 0)

    assert main(["tasks", "multi_hop"]) == 0
    shown = capsys.readouterr().out
    assert "multi_hop (played with tools)" in shown and "task_config: none" in shown and "question" in shown

    assert main(["tasks", SUMS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fields"] == {"size": 24, "seed": 0, "eval_size": 8, "harder": False} and not found["agent"]


def test_the_example_of_a_game_has_what_the_game_says_first(loaded, monkeypatch, capsys):
    class Greets:
        def reset(self, **row):
            return f"Search for {row['question']}"

    monkeypatch.setattr(type(AGENTS["multi_hop"]), "environment_factory", Greets)
    assert main(["tasks", GAME]) == 0
    question = SearchSpec("Search-v0").eval_dataset[0]["question"]
    assert f"{question}Search for {question}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (evaluate, [], "nothing to evaluate on: pass --dataset gsm8k, or --task reasoning_gym:countdown"),
        (
            evaluate,
            ["--task", GAME],
            f"task='{GAME}' is played with tools, but eval samples completions of one turn: measure",
        ),
        (evaluate, ["--dataset", "doors", "--task_config", "{}"], "task_config='{}' belongs to a task"),
        (evaluate, ["--task", SUMS, "--system_prompt", "x"], "system_prompt is for benchmarks"),
        (evaluate, ["--task", "doors", "--dataset", "doors"], "2 of them are called 'doors'"),
        (keep_hard, [], "nothing to filter: pass --dataset_name data.jsonl, or --task reasoning_gym:countdown"),
        (
            keep_hard,
            ["--task", SUMS, "--dataset_name", "d.jsonl"],
            f"task='{SUMS}' and dataset_name='d.jsonl': a task brings its data",
        ),
        (keep_hard, ["--task", SUMS, "--dataset_train_split", "b"], "dataset_train_split='b': a task brings its data"),
        (keep_hard, ["--task", GAME], "is played with tools, but filter samples completions of one turn"),
        (keep_hard, ["--task", SUMS, "--success_reward", "other"], "name one of sums_reward"),
        (list_tasks, ["chian"], "unknown task 'chian'; did you mean 'chain'?"),
        (list_tasks, ["reasoning_gym:sumz"], "did you mean 'sums'?"),
        (list_tasks, ["--task_config", "{}"], "task_config='{}' belongs to one task"),
        (list_tasks, ["chain", "--jsn"], "unknown flag '--jsn'; did you mean '--json'?"),
    ],
)
def test_mistakes_in_eval_filter_and_tasks_are_told_in_one_line(command, flags, message, loaded, capsys):
    assert command(*flags) == 2
    assert_told_in_one_line(message, capsys)


# ------------------------------------------------------------------------------------------------------- real packages

COUNTDOWN = "reasoning_gym:countdown"
EASY = '{"min_numbers": 3, "max_numbers": 3}'


@pytest.fixture
def real(models, tmp_path, monkeypatch):
    """Skip the test if reasoning-gym is not installed. The working directory has the two tiny models."""
    pytest.importorskip("reasoning_gym")
    for name in ("tiny", "agent"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    tasks._spec_task.cache_clear()


@pytest.mark.slow
def test_countdown_is_compared_and_evaluated(real, capfd):
    common = {**COMPARISON["common"], "max_completion_length": 8}
    document = {**COMPARISON, "task": COUNTDOWN, "task_config": json.loads(EASY), "common": common}
    assert compare({**document, "model_name_or_path": "./agent"}, "--methods", "grpo", "deep_grpo") == 0
    assert {point["step"] for run in runs().values() for point in run["points"]} == {0, 1}
    given = ["--model_name_or_path", "./agent", "--num_samples", "2", "--max_new_tokens", "8", "--limit", "3"]
    assert main(["eval", *given, "--task", COUNTDOWN, "--task_config", EASY, "--output_dir", "eval"]) == 0
    (entry,) = json.loads(Path("eval/results.json").read_text())["results"].values()
    assert entry["num_prompts"] == 3


def test_countdown_is_shown(real, capsys):
    assert main(["tasks", COUNTDOWN, "--task_config", EASY]) == 0
    shown = capsys.readouterr().out
    assert "min_numbers" in shown and "max_completion_length" in shown
    assert main(["tasks", "reasoning_gym:countdwn"]) == 2
    assert "did you mean 'countdown'?" in capsys.readouterr().err


OWN_MODULES = ("my_tasks", "my_variants")


def write_own_modules():
    """Write the modules of the page's section on tasks of one's own into the working directory."""
    for name in OWN_MODULES:
        (text,) = [text for text in page_blocks("tasks.md", "python") if f"# {name}.py" in text]
        Path(f"{name}.py").write_text(text)


@pytest.fixture
def own_modules(monkeypatch):
    """Forget the modules, and the path to them, after a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def own_tasks(loaded, own_modules):
    """The modules of the page, in the working directory."""
    write_own_modules()


OWN = {"task": "my_tasks:ADDITION", "model_name_or_path": "./agent"}


def test_a_task_of_ones_own_is_trained_compared_and_shown(own_tasks, capfd):
    assert main(["train", *train_flags(**OWN, max_steps=1)]) == 0
    assert "rewards/reward/mean" in logs()[0] and "problems of the task `my_tasks:ADDITION`" in card_of("out")
    common = {**COMPARISON["common"], "max_completion_length": 4}
    document = {**COMPARISON, **OWN, "common": common, "metrics": ["reward"], "num_eval": 4}
    assert main(["train", *train_flags(**OWN, warm_start_steps=2, output_dir="taught")]) == 2
    assert "warm_start_steps=2: addition writes no demonstrations" in capfd.readouterr().err
    Path("out").rename("trained")
    assert compare(document, "--methods", "grpo") == 0
    settings = yaml.safe_load(Path("out/comparison.yaml").read_text())
    assert settings["task"] == "my_tasks:ADDITION" and "warm_start_steps" not in settings
    capfd.readouterr()
    assert main(["tasks", OWN["task"]]) == 0
    shown = capfd.readouterr().out
    words = ("my_tasks:ADDITION (one turn)", "max_completion_length", "task_config: none")
    assert all(word in shown for word in words)


@pytest.mark.slow
def test_a_task_of_ones_own_that_writes_demonstrations_has_a_tiny_model(own_tasks, capfd):
    common = {"per_device_train_batch_size": 8, "num_generations": 4}
    document = {"task": "my_variants.SHORT", "budget": {"steps": 1}, "evaluations": 1, "num_eval": 4}
    document |= {"common": common, "warm_start_steps": 2}
    assert compare(document, "--methods", "grpo", "deep_grpo", "--processes", "2") == 0
    assert len(list(Path("cache").glob("short_chain-seed0-*"))) == 1
    settings = yaml.safe_load(Path("out/comparison.yaml").read_text())
    assert settings["common"]["max_completion_length"] == 31
    assert settings["arms"][1]["options"]["segment_delimiters"] == [";"]


def test_attributes_of_a_task_of_ones_own_are_read(own_tasks):
    Path("my_variants.py").write_text(
        "from my_tasks import Addition\n"
        "from trl_explore.tasks import AGENTS\n"
        "class Few(Addition):\n"
        "    options = {'beta': 0.1, 'max_completion_length': 5}\n"
        "    metrics, num_train, num_eval, step_delimiters = ('reward',), 20, 3, ['+']\n"
        "FEW = Few()\n"
        "class Plays(Addition):\n"
        "    environment_factory, reward = AGENTS['multi_hop'].environment_factory, None\n"
        "PLAYS = Plays()\n"
    )
    few = tasks.find_run_task("my_variants:FEW")
    assert few.options == {"beta": 0.1, "max_completion_length": 5} and few.metrics == ("reward",)
    assert len(few.train_rows(3)) == 20 and few.num_eval == len(few.held_out_rows(3)) == 3
    assert METHODS["attn_rl"].options(few.task)["step_delimiters"] == ["+"]
    assert tasks.find_run_task("my_variants:FEW").task is few.task  # rows are made once
    with pytest.raises(UsageError, match="num_eval=4: addition has 3 held-out rows; .* larger num_eval in the task"):
        few.held_out_rows(4)
    plays = tasks.find_run_task("my_variants:PLAYS")
    assert plays.is_agent and plays.reward_funcs == [] and METHODS["tree_rl"].options(plays.task) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_module:MAZE", "task: 'no_module:MAZE': importing 'no_module' failed (ModuleNotFoundError: .* run from"),
        ("my_tasks:ADITION", "unknown task 'ADITION'; did you mean 'ADDITION'? Imported from"),
        ("my_tasks.Addition", "task='my_tasks:Addition' is a class; write an object of it into the module"),
        ("my_tasks:random", "task='my_tasks:random' has no name; a task has name, max_completion_length, reward,"),
        ("my_variants:LOOSE", "task='my_variants:LOOSE' writes demonstrations .* must be a dataclass"),
    ],
)
def test_wrong_import_paths_of_tasks_are_told_in_one_line(path, message, own_tasks, capsys):
    with open("my_variants.py", "a") as file:
        file.write("from my_tasks import Addition\nLOOSE = Addition()\n")
        file.write("LOOSE.sample_problem = LOOSE.demonstration = LOOSE.reward\n")
    assert main(["train", *train_flags(**{**OWN, "task": path})]) == 2
    error = capsys.readouterr().err
    assert re.search(message.replace("(", r"\(").replace("?", r"\?"), error) and error.count("\n") == 1, error
    assert main(["train", *train_flags(**OWN, task_config='{"a": 1}')]) == 2
    assert "task_config={'a': 1}: the task my_tasks:ADDITION has no fields; leave it out" in capsys.readouterr().err


def test_hard_problems_are_filtered_and_trained_on_as_the_page_tasks_md_says(real, monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (module,) = [text for text in page_blocks("tasks.md", "python") if "# countdown_reward.py" in text]
    Path("countdown_reward.py").write_text(module)
    commands = [text for text in page_blocks("tasks.md", "bash") if "hard.jsonl" in text]
    keep, train = (re.sub("Qwen/[^ ]*", "./agent", text.replace("\\\n", " ")) for text in commands)
    keep = keep.replace('"max_numbers": 3}', '"max_numbers": 3, "size": 8}')
    assert main([*shlex.split(keep)[1:], "--max_completion_length", "8"]) == 0
    assert [row["pass_rate"] for row in rows_of("hard.jsonl")] == [0.0] * 8
    assert main([*shlex.split(train)[1:], *as_flags({**TINY_RUN, "max_completion_length": 8})]) == 0
    assert "rewards/reasoning_gym_countdown/mean" in logs()[0]


@pytest.mark.slow
def test_commands_of_the_page_tasks_md_are_read_and_its_lists_printed(real, own_modules, models, tmp_path, capsys):
    write_own_modules()
    blocks = [re.sub("Qwen/[^ ]*", "./agent", text) for text in page_blocks("tasks.md", "bash")]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert {line.split()[1] for line in lines} == {"tasks", "train", "compare", "eval", "filter"}
    for line in lines:
        parse(line, tmp_path)
        if line.startswith("trl-explore tasks reasoning_gym"):
            assert main(shlex.split(line)[1:]) == 0
        if "textarena" in line:
            small = ["--max_steps", "1", "--num_generations", "2", "--per_device_train_batch_size", "2", "--use_cpu"]
            assert main([*shlex.split(line)[1:], *small, "--bf16", "false", "--max_completion_length", "64"]) == 0
    shown = capsys.readouterr().out
    assert "min_numbers" in shown and f"  {COUNTDOWN} " in shown
    (document,) = map(yaml.safe_load, page_blocks("tasks.md", "yaml"))
    tasks.find_run_task(document["task"], document["task_config"]).check_teaching(document["warm_start_steps"])

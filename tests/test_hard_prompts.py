"""The filter for hard prompts: what is kept, that it can be interrupted, and that it leaves no trace."""

import copy
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import as_flags
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import DatasetMixtureConfig, GRPOTrainer, ScriptArguments
from world import (
    assert_same,
    contains_answer,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    parameters,
    saved_model,
)

from trl_explore.cli import main
from trl_explore.evaluation.hard_prompts import filter_hard_prompts, read_pass_rates
from trl_explore.runs.inputs import load_train_and_eval

ROWS = make_dataset()


class Counter:
    """A reward function that counts its calls and can be interrupted at one of them."""

    __name__ = "counter"

    def __init__(self, interrupted_at=None, reward=contains_answer):
        self.calls, self.interrupted_at, self.reward = [], interrupted_at, reward

    def __call__(self, **kwargs):
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls.append(kwargs)
        return self.reward(**kwargs)


def graded(prompts, answer, **kwargs):
    """Of the four samples of a prompt, as many succeed as its answer says."""
    return [float(i % 4 < int(gold) % 5) for i, gold in enumerate(answer)]


def hard_prompts(model=None, dataset=ROWS, **options):
    """Five batches of eight prompts."""
    settings = {"reward_funcs": contains_answer, "max_completion_length": 8, "batch_size": 32, "progress": False}
    if model is None:
        model, settings["processing_class"] = make_model(), make_tokenizer()
    return filter_hard_prompts(model, dataset, **settings | options)


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize(("threshold", "expected"), [(0.25, {0.0}), (0.26, {0.0, 0.25}), (1.0, {0, 0.25, 0.5, 0.75})])
def test_prompts_strictly_below_the_threshold_are_kept_in_their_order(threshold, expected):
    rows = ROWS.add_column("pass_rate", ["old"] * len(ROWS)).add_column("extra", range(len(ROWS)))
    hard = hard_prompts(dataset=rows, reward_funcs=graded, threshold=threshold)
    kept = [row for row in rows if int(row["answer"]) % 5 / 4 in expected]
    assert hard.to_list() == [{**row, "pass_rate": int(row["answer"]) % 5 / 4} for row in kept]
    assert set(hard["pass_rate"]) == expected


def test_a_data_set_without_hard_prompts_gives_an_empty_one():
    empty = hard_prompts(reward_funcs=lambda prompts, **kwargs: [1.0] * len(prompts))
    assert len(empty) == 0
    assert empty.column_names == [*ROWS.column_names, "pass_rate"]


def test_the_seed_decides_and_nothing_else():
    first = hard_prompts(threshold=1.0)
    torch.manual_seed(99)
    assert hard_prompts(threshold=1.0).to_list() == first.to_list()
    assert hard_prompts(threshold=1.0, seed=1)["pass_rate"] != first["pass_rate"]
    rates = hard_prompts(dataset=Dataset.from_dict({"prompt": ["1+2="] * 36, "answer": ["3"] * 36}), threshold=1.0)
    assert len({*zip(*[iter(rates["pass_rate"])] * 8, strict=False)}) > 1  # batches do not repeat each other


def test_a_model_is_left_as_it_was():
    model = make_model(attention_dropout=0.3).train()
    twin, states, config = copy.deepcopy(model), random_states(), copy.deepcopy(model.config.to_dict())
    hard_prompts(model, processing_class=make_tokenizer(), threshold=1.0)
    assert random_states() == states
    assert_same(model.state_dict(), twin.state_dict())
    assert model.config.to_dict() == config and model.training
    assert "forward" not in vars(model)


def test_trainers_made_before_and_after_are_not_disturbed(tmp_path):
    options = {"output_dir": tmp_path, "bf16": True, "max_steps": 1}
    before, args = make_trainer(**options), make_trainer(**options).args
    forward = vars(before.model)["forward"]
    with pytest.raises(KeyboardInterrupt):
        hard_prompts(before.model, processing_class=make_tokenizer(), reward_funcs=Counter(interrupted_at=1))
    assert before.accelerator.mixed_precision == "bf16" and vars(before.model)["forward"] is forward
    assert before.is_world_process_zero()
    before.train()
    after = GRPOTrainer(make_model(), contains_answer, args, ROWS, processing_class=make_tokenizer())
    assert after.accelerator.mixed_precision == "bf16"


def test_a_trainer_is_left_as_it_was_and_lends_its_rewards_with_their_weights():
    def half(completions, **kwargs):
        return [0.5] * len(completions)

    funcs = {"reward_funcs": [contains_answer, half], "reward_weights": [2.0, 1.0]}
    trainer = make_trainer(model=make_model(attention_dropout=0.3), **funcs)
    trainer.model.train()
    trainer.model.model.layers[0].eval()
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    before, states, log = parameters(trainer), random_states(), list(trainer.state.log_history)
    hard = hard_prompts(trainer, reward_funcs=None, threshold=1.0, success_threshold=2.5)
    assert_same(parameters(trainer), before)
    assert random_states() == states and trainer.state.log_history == log
    assert {name: module.training for name, module in trainer.model.named_modules()} == modes

    options = {"processing_class": make_tokenizer(), "threshold": 1.0}
    assert hard.to_list() == hard_prompts(make_model(), **options).to_list()  # the trainer adds nothing of its own
    assert hard.to_list() == hard_prompts(make_model(), **options, **funcs, success_threshold=2.5).to_list()
    assert hard_prompts(trainer, threshold=1.0).to_list() == hard.to_list()
    assert len(hard_prompts(trainer, threshold=1.0, reward_weights=[0.5])) == len(ROWS)


def test_a_trainers_completion_length_is_used_unless_another_is_given():
    trainer, counter = make_trainer(), Counter()
    for length, expected in [(None, 8), (3, 3)]:
        hard_prompts(trainer, reward_funcs=counter, max_completion_length=length)
        assert max(len(ids) for ids in counter.calls[-1]["completion_ids"]) == expected
    assert trainer.args.max_completion_length == 8


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_functions_receive_what_they_receive_in_training(conversational):
    counter, rows = Counter(), make_dataset(conversational)
    hard_prompts(dataset=rows, reward_funcs=counter, batch_size=32, k=3)  # ten prompts at a time
    assert [len(call["prompts"]) for call in counter.calls] == [30, 30, 30, 18]
    call = counter.calls[0]
    assert call["prompts"] == [prompt for prompt in rows["prompt"][:10] for _ in range(3)]
    assert call["answer"] == [answer for answer in rows["answer"][:10] for _ in range(3)]
    assert all(isinstance(ids, list) and len(ids) <= 8 for ids in call["completion_ids"])
    texts = [completion[0]["content"] if conversational else completion for completion in call["completions"]]
    assert texts == make_tokenizer().batch_decode(call["completion_ids"], skip_special_tokens=True)


def test_prompts_without_any_reward_are_left_out_with_a_warning():
    def some(answer, **kwargs):
        return [None if gold == "3" or i % 4 == 0 else 1.0 for i, gold in enumerate(answer)]

    with pytest.warns(UserWarning, match="4 of 36 prompts .* gold"):
        hard = hard_prompts(reward_funcs=some, threshold=1.0)
    assert set(hard["pass_rate"]) == {0.75}  # a single missing reward is a failure
    assert len(hard) == 32 and "3" not in hard["answer"]


def test_an_interrupted_call_continues_with_the_same_samples(tmp_path):
    expected = hard_prompts(threshold=1.0).to_list()
    path = tmp_path / "scores.jsonl"
    stopped = Counter(interrupted_at=2)
    with pytest.raises(KeyboardInterrupt):
        hard_prompts(reward_funcs=stopped, scores_file=path)
    assert len(read_pass_rates(path)[1]) == 16
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:13]) + lines[13][:9]
    )  # as if killed while writing: the second batch is half there
    rest = Counter()
    assert hard_prompts(reward_funcs=rest, scores_file=path, threshold=1.0).to_list() == expected
    assert len(rest.calls) == 4
    assert len(path.read_text().splitlines()) == 1 + len(ROWS)

    again = Counter()
    assert hard_prompts(reward_funcs=again, scores_file=path, threshold=1.0).to_list() == expected
    easier = hard_prompts(reward_funcs=again, scores_file=path, threshold=0.25, batch_size=7)
    assert easier.to_list() == [row for row in expected if row["pass_rate"] < 0.25]
    assert not again.calls


def test_another_batch_size_continues_where_the_file_ends(tmp_path):
    path = tmp_path / "scores.jsonl"
    with pytest.raises(KeyboardInterrupt):
        hard_prompts(reward_funcs=Counter(interrupted_at=2), scores_file=path)
    first, rest = read_pass_rates(path)[1], Counter()
    hard_prompts(reward_funcs=rest, scores_file=path, batch_size=4)
    assert [call["prompts"][0] for call in rest.calls] == ROWS["prompt"][16:]
    rates = read_pass_rates(path)[1]
    assert sorted(rates) == list(range(36)) and first.items() <= rates.items()


@pytest.fixture(scope="module")
def scores_file(tmp_path_factory):
    """Pass rates of all prompts, which no test changes."""
    path = tmp_path_factory.mktemp("scores") / "scores.jsonl"
    hard_prompts(scores_file=path)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 2}, "k=4, now 2"),
        ({"seed": 5}, "seed=0, now 5"),
        ({"temperature": 0.5}, "temperature=1.0, now 0.5"),
        ({"max_completion_length": 4}, "max_completion_length=8, now 4"),
        ({"success_threshold": 0.5}, "success_threshold=1.0, now 0.5"),
        ({"reward_funcs": graded}, r"reward_funcs=\['contains_answer'\], now \['graded'\]"),
        ({"reward_weights": [2.0]}, r"reward_weights=\[1.0\], now \[2.0\]"),
        ({"dataset": ROWS.select(range(35))}, "num_prompts=36, now 35; data='"),
        ({"dataset": ROWS.remove_columns("answer").add_column("answer", ["0"] * 36)}, "settings: data='"),
        ({"model": make_model(seed=1), "processing_class": make_tokenizer()}, "settings: model='"),
    ],
)
def test_pass_rates_of_other_settings_are_refused(scores_file, changes, message):
    before = scores_file.read_bytes()
    with pytest.raises(ValueError, match=rf"scores.jsonl .*{message}.*Delete it"):
        hard_prompts(scores_file=scores_file, **changes)
    assert scores_file.read_bytes() == before


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(ValueError, match="not a file of trl-explore pass rates"):
        hard_prompts(scores_file=tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_completion_length": 0}, "max_completion_length=0"),
        ({"threshold": 0.0}, r"threshold must be in \(0, 1\], got 0.0"),
        ({"temperature": 0.0}, "temperature"),
        ({"dataset": ROWS.rename_column("prompt", "question")}, r"\['question', 'answer'\]; rename .*"),
        ({"dataset": ROWS.select([])}, "0 rows"),
        ({"dataset": ROWS.to_iterable_dataset()}, "IterableDataset"),
        ({"reward_funcs": None}, "reward_funcs is missing"),
        ({"reward_weights": [1.0, 2.0]}, "one weight per reward function, got 2 for 1"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        hard_prompts(**changes)


def test_a_trainer_brings_its_own_tokenizer():
    with pytest.raises(ValueError, match="processing_class"):
        hard_prompts(make_trainer(), processing_class=make_tokenizer())


REWARDS = """
from pathlib import Path
from world import contains_answer

def reward(prompts, **kwargs):
    with open("calls", "a") as file:
        file.write("x")
    if Path("stop").exists() and len(Path("calls").read_text()) > 2:
        raise KeyboardInterrupt
    return contains_answer(prompts=prompts, **kwargs)

def always(prompts, **kwargs):
    return [1.0] * len(prompts)"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory with a data file and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("filter_rewards", None)
    Path("filter_rewards.py").write_text(REWARDS)
    ROWS.to_json("data.jsonl")
    return tmp_path


def flags(**fields):
    settings = {
        "model_name_or_path": saved_model(),
        "dataset_name": "data.jsonl",
        "reward_funcs": "filter_rewards.reward",
        "max_completion_length": 8,
        "batch_size": 32,
        "threshold": 0.5,
        "output": "out/hard.jsonl",
    } | fields
    return ["filter", *as_flags(settings)]


def test_the_command_writes_what_the_function_returns(workdir, capsys):
    model = AutoModelForCausalLM.from_pretrained(saved_model())
    rated = hard_prompts(model, processing_class=make_tokenizer(), threshold=1.0)
    expected = [row for row in rated if row["pass_rate"] < 0.5]
    counts = [rated["pass_rate"][:].count(i / 4) for i in range(4)] + [len(ROWS) - len(rated)]
    histogram = ", ".join(f"{i}/4: {count}" for i, count in enumerate(counts) if count)
    for name in ("out/hard.jsonl", "hard.json", "hard.parquet"):
        assert main(flags(output=name, reward_weights=1.0)) == 0
        text = capsys.readouterr().out
        assert f"Kept {len(expected)} of 36 prompts" in text and f"Pass rates: {histogram}\n" in text and name in text
        written = load_dataset("parquet" if name.endswith("parquet") else "json", data_files=name, split="train")
        assert 0 < len(written) < len(ROWS) and written.to_list() == expected
        train, _ = load_train_and_eval(ScriptArguments(dataset_name=name), DatasetMixtureConfig(), needs_eval=False)
        assert train["prompt"][:] == [row["prompt"] for row in expected]
        assert not list(Path(name).parent.glob("*.part"))


def test_the_command_continues_after_ctrl_c(workdir, capsys):
    Path("stop").touch()
    assert main(flags()) == 130
    assert "Stopped after 16 of 36 prompts; the same command continues there." in capsys.readouterr().err
    assert not Path("out/hard.jsonl").exists()
    Path("stop").unlink()
    assert main(flags()) == main(flags(threshold=1.0)) == 0
    assert len(Path("calls").read_text()) == 3 + 3  # the interrupted batch twice, none a third time
    assert len(Path("out/hard.jsonl").read_text().splitlines()) > 0


def test_conversational_prompts_survive_the_file(workdir):
    rows = make_dataset(conversational=True)
    rows.to_json("data.jsonl")
    for name in ("hard.jsonl", "hard.parquet"):
        assert main(flags(output=name, threshold=1.0)) == 0
        train, _ = load_train_and_eval(ScriptArguments(dataset_name=name), DatasetMixtureConfig(), needs_eval=False)
        assert len(train) and all(row["prompt"] in rows["prompt"][:] for row in train)


def test_an_adapter_folder_is_a_model(workdir):
    base = AutoModelForCausalLM.from_pretrained(saved_model())
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=64, init_lora_weights=False))
    adapted.save_pretrained("adapter")
    expected = hard_prompts(adapted, processing_class=make_tokenizer(), threshold=1.0)
    plain = hard_prompts(adapted.unload(), processing_class=make_tokenizer(), threshold=1.0)
    assert main(flags(model_name_or_path="adapter", threshold=1.0)) == 0
    written = [json.loads(line) for line in Path("out/hard.jsonl").read_text().splitlines()]
    assert written == expected.to_list() != plain.to_list()
    make_tokenizer().save_pretrained("adapter")
    assert main(flags(adapter_name_or_path="adapter", threshold=1.0, output="named.jsonl")) == 0
    assert Path("named.jsonl").read_text() == Path("out/hard.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": "0", "batch_size": "many"}, "argument --batch_size: invalid int value: 'many'"),
        ({"k": "-1"}, "k=-1"),
        ({"output": "hard.csv"}, "output='hard.csv' must end with one of .jsonl, .json, .parquet"),
        ({"output": "./data.jsonl"}, "is the data set itself"),
        ({"output": None}, "required: --output"),
        ({"treshold": 0.3}, "did you mean '--threshold'?"),
        ({"reward_funcs": None}, "no reward: pass --reward_funcs"),
        ({"reward_funcs": "filter_rewards.rewrad"}, "did you mean 'reward'?"),
        ({"reward_weights": "1"}, None),
        (
            {"success_reward": "rewrad"},
            "`success_reward='rewrad'` is none of the reward functions: name one of reward",
        ),
        ({"dataset_name": "./dota.jsonl"}, "did you mean 'data.jsonl'?"),
        ({"model_name_or_path": "./nowhere"}, "model_name_or_path='nowhere' does not exist"),
        ({"reward_funcs": "filter_rewards.always"}, "no prompt is left"),
    ],
)
def test_mistakes_are_explained_in_one_line(workdir, capsys, changes, message):
    arguments = flags(**changes)
    if "reward_weights" in changes:
        arguments, message = [*arguments, "2"], "reward_weights: 2 weights for 1 rewards"
    assert main(arguments) == 2
    _, error = capsys.readouterr().err.split("trl-explore: error: ")
    assert message in error and error.count("\n") == 1
    assert not Path("out/hard.jsonl").exists()


def test_flags_can_be_written_with_dashes_and_progress_of_other_settings_is_refused(workdir, capsys):
    arguments = [text.replace("_", "-") if text.startswith("--") else text for text in flags()]
    assert main([*arguments, "--dataset-train-split=train"]) == 0
    assert main([*flags(), "--seed=3"]) == 2
    assert "out/hard.jsonl.scores.jsonl holds pass rates of other settings: seed=0, now 3" in capsys.readouterr().err

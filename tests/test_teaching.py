"""Supervised warm start of a pretrained model, here a tiny one: its result, its cache and its errors."""

import random

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import make_trainer, saved_model

from trl_explore.errors import UsageError
from trl_explore.pretrained import teaching
from trl_explore.pretrained.teaching import demonstrations, teach


class Sums:
    """Sums of two digits; half of the demonstrations are wrong."""

    name = "sums:small"
    environment_factory = None
    options = {}

    def __init__(self):
        self.train_dataset = Dataset.from_list([self.row(a, b) for a in range(5) for b in range(5)])

    @staticmethod
    def row(a, b):
        return {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}

    def demonstration(self, row, rng):
        said = row["answer"] if rng.random() < 0.5 else str(rng.randrange(9))
        return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": said + "."}]}


class Silent(Sums):
    def demonstration(self, row, rng):
        raise ValueError("sums:small writes no demonstrations; leave warm_start_steps out")


def test_a_taught_model_writes_the_form_and_is_found_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(teaching, "LEARNING_RATE", 1e-2)  # for a model as small as this
    source = saved_model()
    torch.manual_seed(5)
    random.seed(5)
    before = torch.random.get_rng_state(), random.getstate()
    folder = teach(source, Sums(), steps=60, cache_dir=tmp_path, progress=False)
    assert torch.equal(before[0], torch.random.get_rng_state()) and before[1] == random.getstate()

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template(
        Sums.row(2, 1)["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        start = AutoModelForCausalLM.from_pretrained(saved_model())
        digits = tokenizer.convert_tokens_to_ids([*"0123456789"])
        said, said_before = (m(**ids).logits[0, -1].softmax(-1)[digits].sum() for m in (model, start))
    assert said > 0.9 > said_before

    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert teach(saved_model(), Sums(), steps=60, cache_dir=tmp_path, progress=False) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert teach(saved_model(), Sums(), steps=1, cache_dir=tmp_path, progress=False) != folder
    assert teach(saved_model(), Sums(), steps=1, seed=1, cache_dir=tmp_path, progress=False).parent == tmp_path
    assert len(list(tmp_path.iterdir())) == 3
    assert not capsys.readouterr().out


def test_demonstrations_go_through_the_rows_in_order_and_depend_on_the_seed():
    written = demonstrations(Sums(), 60, seed=0)
    prompts = [example["prompt"][0]["content"] for example in written]
    assert prompts[:3] == ["0+0=", "0+1=", "0+2="] and prompts[25:28] == prompts[:3]
    assert written == demonstrations(Sums(), 60, seed=0) != demonstrations(Sums(), 60, seed=1)


def test_what_cannot_be_taught_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UsageError, match="warm_start_steps=0: give at least 1"):
        teach(saved_model(), Sums(), steps=0, cache_dir=tmp_path)
    with pytest.raises(UsageError, match="warm_start_steps=2: sums:small writes no demonstrations"):
        teach(saved_model(), Silent(), steps=2, cache_dir=tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="cannot be kept in .*TRL_EXPLORE_CACHE"):
        teach(saved_model(), Sums(), steps=2, cache_dir=file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_warm_start_does_not_change_the_precision_of_other_runs(tmp_path):
    before = make_trainer(output_dir=tmp_path / "before")
    for steps in (1, 2):
        teach(saved_model(), Sums(), steps=steps, cache_dir=tmp_path, progress=False)
        assert before.accelerator.mixed_precision == "no"
        assert make_trainer(output_dir=tmp_path / "out").accelerator.mixed_precision == "no"


def test_several_processes_find_a_taught_model_but_teach_none(tmp_path, monkeypatch):
    folder = teach(saved_model(), Sums(), steps=1, cache_dir=tmp_path, progress=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert teach(saved_model(), Sums(), steps=1, cache_dir=tmp_path, progress=False) == folder
    with pytest.raises(UsageError, match="warm_start_steps=2: a model is taught in one process. Run the same"):
        teach(saved_model(), Sums(), steps=2, cache_dir=tmp_path, progress=False)

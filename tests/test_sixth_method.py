"""What a new method costs: one row and one hook. Nothing else names it, and every part of the package takes it up."""

import csv
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer
from world import TINY, Tiny, assert_same, make_dataset, make_trainer, saved_model, trained

from trl_explore.cli import main
from trl_explore.compare.settings import read_comparison
from trl_explore.methods import METHODS, Method
from trl_explore.names import explain_fields
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

PAPER = {"title": "Half Is Enough", "id": "2601.00001", "citation": "@misc{half, title = {Half}}"}
SIXTH = Method(
    "halved",
    "Halved",
    "test_sixth_method:HalvedTrainer",
    "test_sixth_method:HalvedConfig",
    paper=PAPER,
    metrics={"halved/rows": "completions whose reward was halved"},
    options=lambda task: {"max_full_length": 3} if task.name == "chain" else None,
    remarks=lambda ends: [],  # pickle refuses both functions, and a worker process needs neither
)
TINY[SIXTH.name] = Tiny(dict(max_full_length=4), dict(max_full_length=1000), "halved/rows")


@explain_fields
@dataclass
class HalvedConfig(ExplorationConfig):
    max_full_length: int = field(default=6, metadata={"help": "Tokens from which on a reward counts half."})


class HalvedTrainer(ExplorationTrainer):
    """GRPO where long completions get half their reward."""

    method = "halved"
    config_class = HalvedConfig

    def shape_rewards(self, rewards_per_func):
        lengths = torch.tensor(gather_object([len(ids) for ids in self.main_completion_ids]))
        long = (lengths > self.args.max_full_length).to(rewards_per_func.device)
        self.log_metric("halved/rows", long.sum().item())
        return torch.where(long.unsqueeze(1), rewards_per_func / 2, rewards_per_func)


@pytest.fixture(autouse=True)
def sixth(monkeypatch):
    monkeypatch.setitem(METHODS, SIXTH.name, SIXTH)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_dataset().to_json("data.jsonl")
    Path("half_rewards.py").write_text(
        "def letters(completions, **kwargs):\n    return [float(len(c)) for c in completions]"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("half_rewards", None)
    return tmp_path


COMMON = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8, use_cpu=True, bf16=False)
SUBJECT = dict(model_name_or_path=saved_model(), dataset_name="data.jsonl", reward_funcs=["half_rewards.letters"])


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_it_trains_and_resumes_from_the_command_line(workdir, capsys):
    run = dict(SUBJECT, method="halved", output_dir="out", max_full_length=4, max_steps=2, report_to="none", **COMMON)
    run |= dict(save_strategy="steps", save_steps=1, logging_steps=1, disable_tqdm=True, log_completions=True)
    Path("run.yaml").write_text(yaml.safe_dump(run))
    assert "Trained 2 steps" in printed(capsys, "train", "--config", "run.yaml")
    state = torch.load("out/checkpoint-1/explore_state_0.pt", weights_only=False)
    assert state["trainer"] == "Halved"
    printed(capsys, "train", "--config", "run.yaml", "--max_steps", "3", "--resume_from_checkpoint", "true")
    assert Path("out/checkpoint-3").is_dir()
    assert len(pd.read_parquet("out/completions/completions_00003.parquet")) == 8


def test_its_card_has_its_paper_its_tags_and_its_metric(tmp_path):
    trainer = make_trainer(HalvedTrainer, HalvedConfig, tmp_path, max_full_length=4)
    trainer.train()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "completions whose reward was halved" in card and "`HalvedTrainer` of trl-explore" in card
    assert PAPER["citation"] in card and "arxiv:2601.00001" in card and "- trl-explore" in card


def test_help_environment_and_completion_name_it(capsys):
    assert ", halved (grpo is plain TRL" in printed(capsys, "train", "--help")
    assert "--max_full_length" in printed(capsys, "train", "--method", "halved", "--help")
    assert ", halved" in printed(capsys, "env")
    assert main(["train", "--method", "halvd"]) == 2 and "did you mean 'halved'?" in capsys.readouterr().err
    assert main(["train", "--method", "sesa", "--max_full_length", "2"]) == 2
    assert "`max_full_length` is no field of sesa; it belongs to halved" in capsys.readouterr().err


def test_the_shell_completes_it(capsys):
    pytest.importorskip("shtab")
    script = printed(capsys, "completion", "bash")
    assert "branpo" in script and "halved" in script and "--max_full_length" in script


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--processes", "1"]], ids=str)
def test_a_comparison_trains_it_beside_the_others(workdir, capsys, flags):
    document = dict(SUBJECT, budget={"steps": 2}, metrics=["reward"], evaluations=1, num_eval=4, common=COMMON)
    document["arms"] = [{"method": "grpo"}, {"method": "halved", "options": {"max_full_length": 1}}]
    Path("compare.yaml").write_text(yaml.safe_dump(document))
    printed(capsys, "compare", "--config", "compare.yaml", "--output_dir", "out", *flags)
    with open("out/curves.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["GRPO"] * 2 + ["Halved"] * 2


def test_a_method_without_a_row_is_named_with_the_remedy():
    class Unknown(HalvedTrainer):
        method = "mine"

    with pytest.raises(ValueError, match="Unknown has `method='mine'`, .* Leave that line out .*METHODS\\['mine'\\]"):
        _ = Unknown._tag_names


def test_a_comparison_knows_which_tasks_it_suits():
    def arms(**subject):
        return {arm.method: arm for arm in read_comparison({**subject, "budget": {"tokens": 1e3}}).arms}

    assert arms(task="chain")["halved"].options == {"max_full_length": 3}
    assert "halved" in arms(**SUBJECT, common=COMMON) and "halved" not in arms(task="doors")


def test_neutral_it_is_grpo_bit_for_bit(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    got, log = trained(HalvedTrainer, HalvedConfig, tmp_path, **TINY["halved"].neutral)
    assert_same(got, expected)
    assert log[0]["halved/rows"] == 0


def test_a_subclass_may_still_name_itself(tmp_path):
    class Mine(DeepGRPOTrainer):
        _name = "Mine"

    trainer = make_trainer(Mine, DeepGRPOConfig, tmp_path, segmentation="fixed", segment_length=2)
    assert (trainer._name, DeepGRPOTrainer._name, ExplorationTrainer._name) == ("Mine", "DEEP-GRPO", "Exploration")
    assert trainer._tag_names == ["trl", "grpo", "trl-explore", "deep-grpo"]
    assert trainer._paper["id"] == "2602.14169" and ExplorationTrainer._paper == GRPOTrainer._paper

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import TINY_RUN, as_flags
from huggingface_hub import constants
from huggingface_hub.utils import HfHubHTTPError
from world import make_dataset, make_trainer, saved_model

from trl_explore.cli import main
from trl_explore.publishing.hub import check_repo_id, clash, explain, format_size, stage, upload_command
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer


def paths(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "out"
    inside = ("trees/trees_0.jsonl", "checkpoint-1/a.bin", "_x/b", ".git/config")
    for name in ("model.safetensors", "training_args.bin", "c.part", *inside):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_what_is_sent_is_put_aside(output):
    stage(output, output / "_hub", ignore=["_*", "checkpoint-*"])
    assert paths(output / "_hub") == ["model.safetensors", "trees/trees_0.jsonl"]
    stage(output / "checkpoint-1", output / "_hub" / "last-checkpoint")
    stage(output, output / "_hub", allow=["trees/*"])
    assert paths(output / "_hub") == ["last-checkpoint/a.bin", "model.safetensors", "trees/trees_0.jsonl"]


def test_large_files_take_no_room_twice_and_small_ones_may_change_while_they_are_sent(output):
    os.truncate(output / "model.safetensors", 10 * 2**20)
    stage(output, output / "_hub", ignore=["_*"])
    assert os.path.samefile(output / "model.safetensors", output / "_hub" / "model.safetensors")
    (output / "trees/trees_0.jsonl").write_text("more")
    assert (output / "_hub/trees/trees_0.jsonl").read_text() == "trees/trees_0.jsonl"


def test_an_adapter_forgets_the_folder_of_its_base_but_not_a_name_on_the_hub(output):
    for base, published in ((str(output), "out"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), (None, None)):
        (output / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 2}))
        stage(output, output / "_hub", ignore=["_*"])
        staged = json.loads((output / "_hub" / "adapter_config.json").read_text())
        assert staged == {"base_model_name_or_path": published, "r": 2}
        assert json.loads((output / "adapter_config.json").read_text())["base_model_name_or_path"] == base


@pytest.mark.parametrize(
    "files, architectures, adapter, reason",
    [
        ([".gitattributes", "README.md"], [], False, None),
        (["config.json"], ["A"], False, None),
        (["config.json"], ["B"], False, "a B, and this is a A"),
        (["adapter_config.json"], [], True, None),
        (["adapter_config.json"], [], False, "an adapter, and this is a whole model"),
        (["config.json", "model.safetensors"], ["A"], True, "a whole model, and this is an adapter"),
    ],
)
def test_models_of_another_kind_clash(files, architectures, adapter, reason):
    assert clash(files, architectures, adapter=adapter, architecture="A") == reason


def test_names_are_checked_as_the_hub_does(tmp_path):
    assert check_repo_id("me/a-b.c_d", tmp_path) == "me/a-b.c_d"
    assert check_repo_id(None, tmp_path / "run") == "run"
    for name in ("a b", "a/b/c", "a--b", "-a", "x" * 97, "me/a.git"):
        with pytest.raises(ValueError, match="set `hub_model_id`"):
            check_repo_id(name, tmp_path)


@pytest.mark.parametrize("push", ["push_to_hub", "push_dry_run"])
def test_a_forbidden_name_is_found_by_the_configuration(push):
    with pytest.raises(ValueError, match="`hub_model_id='my model'` cannot be the name of a repository"):
        DeepGRPOConfig(**{push: True}, hub_model_id="my model", use_cpu=True, bf16=False)


def test_errors_without_an_answer_say_what_they_are():
    assert explain(OSError("disk\nfull.")) == "OSError: disk full"


def test_the_answer_is_found_behind_what_was_made_of_it():
    answer = SimpleNamespace(status_code=418, headers={}, request=None)
    error = RuntimeError("upload failed")
    error.__cause__ = HfHubHTTPError("teapot", response=answer, server_message="short and stout")
    assert explain(error) == "the Hub answered 418 (short and stout)"


def test_the_command_can_be_pasted():
    assert upload_command("me/x", "out dir/_hub", revision=None, private=False) == "hf upload me/x 'out dir/_hub' ."
    assert upload_command("me/x", "o", revision="dev", private=True) == "hf upload me/x o . --revision dev --private"


def test_checkpoints_of_an_unpublished_run_get_a_card_but_no_picture(tmp_path):
    options = dict(max_steps=1, num_branches=2, save_strategy="steps", save_steps=1)
    trainer = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path / "run", **options)
    trainer.train()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "model_name: run" in card and 'model="path/to/this/folder"' in card and "[plots]" not in card
    assert not (tmp_path / "run" / "training_curve.png").exists()
    assert "rewarded by `contains_answer`." in card and "Training took" in card and "up to step 1," in card
    trainer.create_model_card(model_name="other", dataset_name="me/data", tags="mine")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# other" in card and "- me/data" in card and "- mine" in card
    assert (tmp_path / "run" / "training_curve.png").exists()


@pytest.fixture
def no_network(monkeypatch):
    """No token, and a list of the addresses that anybody tries to reach."""
    tried = []

    def refuse(self, address):
        tried.append(address)
        raise OSError("this test has no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    # `HF_HUB_OFFLINE`, which the suite sets, would hide a call.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tried


def dry(folder, **options):
    return make_trainer(DeepGRPOTrainer, DeepGRPOConfig, folder / "out", **{"max_steps": 1, **options})


def test_a_dry_run_lists_what_a_push_would_send_and_sends_nothing(tmp_path, no_network, capsys):
    trainer = dry(tmp_path, push_dry_run=True, hub_model_id="me/x", hub_private_repo=True, hub_revision="try")
    trainer.train()
    plan = trainer.push_to_hub(dataset_name="me/sums")
    assert no_network == []
    staged = {path: (tmp_path / "out" / "_hub" / path).stat().st_size for path in paths(tmp_path / "out" / "_hub")}
    assert plan.files == staged and {"README.md", "model.safetensors", "tokenizer.json"} <= staged.keys()
    assert "training_args.bin" not in staged
    assert (plan.repo_id, plan.revision, plan.private) == ("me/x", "try", True)
    told = capsys.readouterr().out
    assert all(f"  {name}\n" in told for name in staged)
    assert "to the private repository me/x (branch try;" in told
    assert f"hf upload me/x {tmp_path / 'out' / '_hub'} . --revision try --private" in told
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# x" in card and "me/sums" in card and "push_dry_run" not in card


def test_a_single_push_can_be_tried(tmp_path, no_network):
    trainer = dry(tmp_path)
    plan = trainer.push_to_hub(dry_run=True)
    assert no_network == [] and plan.repo_id == "out" and "README.md" in plan.files
    assert "the public repository out, of the account that your token belongs to" in str(plan)


def test_a_dry_run_lists_the_checkpoints_that_a_push_would_send(tmp_path, no_network):
    saves = dict(save_strategy="steps", save_steps=1, max_steps=2, hub_strategy="all_checkpoints")
    trainer = dry(tmp_path, push_dry_run=True, hub_model_id="me/x", **saves)
    trainer.train()
    files = trainer.push_to_hub().files
    assert no_network == []
    assert {"checkpoint-1/trainer_state.json", "checkpoint-2/trainer_state.json"} <= files.keys()


def test_a_dry_run_is_refused_beside_tables_that_are_sent(tmp_path):
    with pytest.raises(ValueError, match="`log_completions_hub_repo='me/tables'` sends tables"):
        dry(tmp_path, push_dry_run=True, log_completions_hub_repo="me/tables")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_960, "1.0 MB"), (12_345_678_901, "12.3 GB")]
)
def test_sizes_are_short(size, text):
    assert format_size(size) == text


def test_the_command_line_shows_what_it_would_push(tmp_path, no_network, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    make_dataset().to_json("sums.jsonl")
    flags = {**TINY_RUN, "method": "deep_grpo", "model_name_or_path": saved_model(), "dataset_name": "sums.jsonl"}
    flags |= {"reward_funcs": "world.contains_answer", "max_completion_length": 8, "num_branches": 2}
    flags |= {"push_to_hub": "true", "push_dry_run": "true", "hub_model_id": "me/x"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the model is a folder, and that is looked up, too
    code = main(["train", *as_flags(flags)])
    told = capsys.readouterr().out
    assert code == 0 and no_network == []
    assert "Trained 2 steps; model saved to out" in told and "Pushed to" not in told
    assert "to the public repository me/x (branch main;" in told and "  README.md\n" in told

import json
import os
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import HfHubHTTPError
from world import make_trainer

from trl_explore.publishing.hub import check_repo_id, clash, explain, stage, upload_command
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer


def paths(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "out"
    for name in (
        "model.safetensors",
        "training_args.bin",
        "trees/trees_0.jsonl",
        "checkpoint-1/a.bin",
        "_x/b",
        ".git/config",
        "c.part",
    ):
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


def test_a_forbidden_name_is_found_by_the_configuration():
    with pytest.raises(ValueError, match="`hub_model_id='my model'` cannot be the name"):
        DeepGRPOConfig(push_to_hub=True, hub_model_id="my model", use_cpu=True, bf16=False)


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
    trainer = make_trainer(
        DeepGRPOTrainer,
        DeepGRPOConfig,
        tmp_path / "run",
        max_steps=1,
        num_branches=2,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "model_name: run" in card and 'model="path/to/this/folder"' in card and "[plots]" not in card
    assert not (tmp_path / "run" / "training_curve.png").exists()
    assert "rewarded by `contains_answer`." in card and "Training took" in card and "up to step 1," in card
    trainer.create_model_card(model_name="other", dataset_name="me/data", tags="mine")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# other" in card and "- me/data" in card and "- mine" in card
    assert (tmp_path / "run" / "training_curve.png").exists()

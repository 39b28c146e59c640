"""Files that are whole or absent."""

import pytest
import torch

from trl_explore.saving.checkpoints import (
    is_complete,
    last_complete_checkpoint,
    load_state,
    path_inside,
    save_state,
)


def test_state_round_trips_and_a_missing_one_is_none(tmp_path):
    assert load_state(tmp_path, rank=0, world_size=1) is None
    state = {"x": torch.arange(3), "n": 1.5, "nested": [{"a": None}, "text"]}
    save_state(state, tmp_path / "new", rank=0)
    loaded = load_state(tmp_path / "new", rank=0, world_size=1)
    assert torch.equal(loaded.pop("x"), state.pop("x")) and loaded == state


class Unknown:
    pass


def test_a_state_with_an_object_makes_no_whole_checkpoint(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({"num_processes": 1, "object": Unknown()}, tmp_path / "explore_state_0.pt")
    assert not is_complete(tmp_path)


class Unpicklable:
    def __reduce__(self):
        raise KeyboardInterrupt


def test_an_interrupted_write_leaves_the_old_state(tmp_path):
    save_state({"n": 1}, tmp_path, rank=0)
    with pytest.raises(KeyboardInterrupt):
        save_state({"n": Unpicklable()}, tmp_path, rank=0)
    assert load_state(tmp_path, rank=0, world_size=1) == {"n": 1}


def test_only_whole_checkpoints_are_resumed(tmp_path):
    for step, text in [(2, "{}"), (10, "{}"), (20, '{"cut": '), (30, None)]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    found, skipped = last_complete_checkpoint(tmp_path)
    assert found == str(tmp_path / "checkpoint-10")
    assert [s.rsplit("-")[-1] for s in skipped] == ["30", "20"]
    assert not is_complete(tmp_path / "checkpoint-30")
    assert last_complete_checkpoint(tmp_path / "nowhere") == (None, [])


def test_a_checkpoint_that_lacks_the_state_of_a_process_is_passed_over(tmp_path):
    for step in (2, 4):
        for rank in range(2):
            save_state({"num_processes": 2}, tmp_path / f"checkpoint-{step}", rank=rank)
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-4" / "explore_state_1.pt").unlink()
    assert not is_complete(tmp_path / "checkpoint-4")
    assert last_complete_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-2"), [str(tmp_path / "checkpoint-4")])


def test_a_state_that_is_cut_off_makes_no_whole_checkpoint(tmp_path):
    save_state({"num_processes": 1, "x": torch.zeros(100)}, tmp_path, rank=0)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert is_complete(tmp_path)
    path = tmp_path / "explore_state_0.pt"
    for size in (0, path.stat().st_size // 2):
        path.write_bytes(path.read_bytes()[:size])
        assert not is_complete(tmp_path)


def test_a_path_inside_the_output_folder_is_resolved_and_one_that_leaves_it_is_refused(tmp_path):
    assert path_inside(tmp_path, "a/b.jsonl", field="f") == (tmp_path / "a" / "b.jsonl").resolve()
    for name in ("../out.jsonl", "/etc/x", "a/../../b", "."):
        with pytest.raises(ValueError, match="hard_states_file"):
            path_inside(tmp_path, name, field="hard_states_file")


@pytest.mark.parametrize(
    "name, suffix, problem",
    [
        ("model.safetensors", ".jsonl", "must end in .jsonl"),
        ("checkpoint-1/trainer_state.json", ".jsonl", "must end in .jsonl"),
        ("checkpoint-1/states.jsonl", ".jsonl", "'checkpoint-1' is the name of a folder of checkpoints"),
        ("_earlier-1/states.jsonl", ".jsonl", "'_earlier-1' is the name of a folder"),
        ("model.safetensors", "", "must be the name of a folder"),
        ("checkpoint-1", "", "'checkpoint-1' is the name of a folder of checkpoints"),
    ],
)
def test_names_that_something_else_has_are_refused(tmp_path, name, suffix, problem):
    with pytest.raises(ValueError, match=problem):
        path_inside(tmp_path, name, field="f", suffix=suffix)

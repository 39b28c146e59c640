"""Files that are whole or absent, and files that only grow."""

import json

import pytest

from trl_explore.saving.whole_files import MethodFile, append_lines, whole_file


def test_a_file_is_there_once_its_block_is_left(tmp_path):
    path = tmp_path / "a.json"
    with whole_file(path) as part:
        part.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_lines_are_appended_whole_and_a_cut_line_is_removed_first(tmp_path):
    path = tmp_path / "deep" / "states.jsonl"
    append_lines(path, [{"a": 1}, {"b": "é\n"}])
    with open(path, "ab") as file:
        file.write(b'{"cut": "off')
    append_lines(path, [{"c": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"b": "é\n"}, {"c": 3}]
    append_lines(path, [])
    assert len(path.read_text().splitlines()) == 3


def test_half_a_surrogate_pair_is_written_down(tmp_path):
    append_lines(tmp_path / "x.jsonl", [{"text": "\ud800é"}])
    line = (tmp_path / "x.jsonl").read_text(encoding="utf-8")
    assert line == '{"text": "\\ud800é"}\n' and json.loads(line) == {"text": "\ud800é"}


def test_a_file_goes_back_to_the_size_that_a_checkpoint_remembers(tmp_path):
    file = MethodFile(tmp_path / "deep" / "x.jsonl")
    assert file.size == 0
    file.append([{"a": 1}])
    size = file.size
    file.append([{"b": 2}])
    file.cut_back(size)
    assert file.size == size == 9 and (tmp_path / "deep" / "x.jsonl").read_text() == '{"a": 1}\n'
    file.cut_back(size + 1)
    assert file.size == size


def test_a_run_may_go_on_with_a_file_that_has_all_its_checkpoint_knew_of(tmp_path):
    file = MethodFile(tmp_path / "x.jsonl")
    file.append([{"a": 1}])
    assert [file.may_resume(size) for size in (0, 1, 9, 10)] == [False, True, True, False]

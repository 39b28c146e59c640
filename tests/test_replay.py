"""The solution cache, its file, and which failures its solutions replace."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from world import make_tokenizer

from trl_explore.saving.fingerprints import tokenizer_fingerprint
from trl_explore.trees.replay import SolutionCache, append_solutions, read_cache, replace_failures, write_cache

EOS = 1
SETTINGS = {"solutions_per_prompt": 3, "threshold": 0.25}


def contents(cache):
    return cache.state_dict()["solutions"]


def make_cache(*pairs, **settings):
    """A cache with completions offered one by one."""
    cache = SolutionCache(**{**SETTINGS, **settings})
    for prompt, completion in pairs:
        cache.offer(prompt, [completion], 0.25)
    return cache


def test_only_hard_prompts_that_were_solved_are_kept():
    cache = SolutionCache(**SETTINGS)
    for ratio, stored in [(0.0, False), (1e-9, True), (0.25, True), (0.2500001, False), (1.0, False)]:
        assert bool(cache.offer([int(ratio * 1e9)], [[5, EOS]], ratio)) is stored, ratio
    assert len(cache) == cache.num_solutions == 2
    assert SolutionCache(solutions_per_prompt=1, threshold=0.0).offer([1], [[5, EOS]], 0.0) == []


def test_prompts_that_are_not_hard_any_more_leave():
    cache = make_cache(([7], [1, EOS]), ([8], [2, EOS]))
    for ratio in (0.0, 0.25):  # still hard; without a success there is nothing to go by
        assert cache.refilter([7], ratio) is False and cache.get([7]) == [[1, EOS]]
    assert cache.refilter((7,), 0.26) is True
    assert cache.get([7]) == [] and cache.get([8]) == [[2, EOS]] and len(cache) == 1
    assert cache.refilter([7], 1.0) is False
    assert cache.offer([7], [[3, EOS]], 0.25) == [[3, EOS]]


def test_single_solutions_can_be_dropped():
    cache = make_cache(([7], [1]), ([7], [2]), ([8], [1]))
    cache.drop([7], [3])
    cache.drop([7], [1])
    assert contents(cache) == [[[7], [2]], [[8], [1]]]
    cache.drop((7,), (2,))
    assert len(cache) == 1 and cache.get([7]) == []


def test_the_newest_solutions_of_a_prompt_are_kept():
    cache = make_cache(([7], [1]), ([8], [9, EOS]), ([7], [2]), ([7], [3]))
    assert cache.offer((7,), [[4], [5]], 0.1) == [[4], [5]]
    assert cache.get([7]) == [[3], [4], [5]]
    assert cache.offer([7], [[10], [11], [12], [13]], 0.1) == [[11], [12], [13]]  # what did not stay is not reported
    assert cache.get([7]) == [[11], [12], [13]] and cache.get([8]) == [[9, EOS]]
    assert (len(cache), cache.num_solutions) == (2, 4)


def test_a_solution_is_kept_once_and_keeps_its_place_when_found_again():
    cache = make_cache(([7], [1, EOS]), ([7], [2, EOS]))
    assert cache.offer([7], [[3, EOS], [1, EOS], [3, EOS]], 0.25) == [[3, EOS]]
    assert cache.get([7]) == [[1, EOS], [2, EOS], [3, EOS]]
    assert cache.offer([9], [], 0.25) == [] and len(cache) == 1
    cache = make_cache(([7], [2, EOS]), ([7], [2]))
    assert cache.get([7]) == [[2, EOS], [2]]  # with and without the end token are two completions


def test_callers_can_change_what_they_gave_and_got():
    cache, completion, prompt = SolutionCache(**SETTINGS), [2, EOS], [7]
    cache.offer(prompt, [completion], 0.25)[0].append(99)
    completion.append(98)
    prompt.append(97)
    cache.get([7])[0].append(96)
    cache.get([7]).append([95])
    cache.state_dict()["solutions"][0][1].append(94)
    assert contents(cache) == [[[7], [2, EOS]]]
    assert cache.get([6]) == [] and len(cache) == 1


ids = st.lists(st.integers(0, 4), min_size=1, max_size=3)
offers = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=2), st.lists(ids, max_size=5), st.sampled_from([0, 0.2, 0.5]))
)


@settings(max_examples=30, deadline=None)
@given(offers)
def test_state_and_file_give_the_same_cache_in_the_same_order(tmp_path_factory, offered):
    folder = tmp_path_factory.mktemp("cache")
    tokenizer, cache = make_tokenizer(), SolutionCache(**SETTINGS)
    write_cache(folder / "appended.jsonl", cache, tokenizer)
    for prompt, completions, ratio in offered:
        new = cache.offer(prompt, completions, ratio)
        append_solutions(folder / "appended.jsonl", [(prompt, completion) for completion in new])
        assert len(cache.get(prompt)) <= 3
    torch.save(cache.state_dict(), folder / "state.pt")
    restored = SolutionCache(**SETTINGS)
    restored.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    write_cache(folder / "whole.jsonl", cache, tokenizer)
    read = [read_cache(folder / name, tokenizer, **SETTINGS) for name in ("appended.jsonl", "whole.jsonl")]
    assert contents(restored) == contents(read[0]) == contents(read[1]) == contents(cache)


def test_loading_replaces_and_a_smaller_cache_takes_the_newest(tmp_path):
    cache = make_cache(([7], [1]), ([7], [2]), ([7], [3]))
    small = make_cache(([5], [5]), solutions_per_prompt=2)
    small.load_state_dict(cache.state_dict())
    write_cache(tmp_path / "c.jsonl", cache, make_tokenizer())
    read = read_cache(tmp_path / "c.jsonl", make_tokenizer(), solutions_per_prompt=2, threshold=0.5)
    assert contents(small) == contents(read) == [[[7], [2]], [[7], [3]]]
    assert read.threshold == 0.5


def test_the_fingerprint_is_of_what_the_ids_mean(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    same = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == same
    larger, ended, unpadded = make_tokenizer(), make_tokenizer(), make_tokenizer()
    larger.add_tokens(["<new>"])
    ended.eos_token = "<u>"
    unpadded.pad_token = None
    assert len({same, *map(tokenizer_fingerprint, (larger, ended, unpadded))}) == 4
    before = tokenizer_fingerprint(unpadded)
    unpadded.pad_token = unpadded.eos_token  # what trainers do
    assert tokenizer_fingerprint(unpadded) == before


@pytest.fixture
def path(tmp_path):
    """A file with two solutions."""
    path = tmp_path / "deep" / "solutions.jsonl"
    write_cache(path, make_cache(([7], [1, EOS]), ([8], [2, EOS])), make_tokenizer())
    return path


def test_an_unfinished_last_line_is_ignored_and_removed_by_the_next_append(path):
    with open(path, "a") as file:
        file.write('{"prompt_ids": [7], "completion_ids": [1, 2')
    expected = [[[7], [1, EOS]], [[8], [2, EOS]]]
    assert contents(read_cache(path, make_tokenizer(), **SETTINGS)) == expected
    append_solutions(path, [([9], [3, EOS])])
    assert contents(read_cache(path, make_tokenizer(), **SETTINGS)) == [*expected, [[9], [3, EOS]]]


@pytest.mark.parametrize(
    "line", ['{"prompt_ids": [7]', "", "[1, 2]", '{"prompt_ids": [7]}', '{"prompt_ids": [7], "completion_ids": ["a"]}']
)
def test_a_broken_line_elsewhere_is_named(path, line):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    with pytest.raises(ValueError, match=rf"{path.name}: line 3 .*Delete that line"):
        read_cache(path, make_tokenizer(), **SETTINGS)


def test_a_file_of_another_tokenizer_is_refused(path):
    other = make_tokenizer()
    other.add_tokens(["<new>"])
    other.name_or_path = "other/model"
    with pytest.raises(ValueError, match=r"solutions.jsonl .* tokenizer '' .* 'other/model' .*Delete it, or name"):
        read_cache(path, other, **SETTINGS)


@pytest.mark.parametrize(
    ("header", "message"),
    [({"kind": "other"}, "not a file of trl-explore solutions"), ({"format": 2}, "has format 2 .* reads format 1")],
)
def test_other_files_and_formats_are_refused(path, header, message):
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **header}), *rest, ""]))
    with pytest.raises(ValueError, match=message):
        read_cache(path, make_tokenizer(), **SETTINGS)


WITHOUT_HEADER = b'{"prompt_ids": [7], "completion_ids": [1]}\n'
UNFINISHED_HEADER = b'{"format": 1, "kind": "trl-explore solutions"'


@pytest.mark.parametrize("text", [b"", b"[]\n", b"1\n", b"\xff\xfe\n", UNFINISHED_HEADER, WITHOUT_HEADER])
def test_files_of_any_other_kind_are_refused(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ValueError, match="not a file of trl-explore solutions"):
        read_cache(tmp_path / "x", make_tokenizer(), **SETTINGS)


def test_a_write_killed_half_way_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def killed(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            write_cache(path, make_cache(([1], [1])), make_tokenizer())
    assert path.read_bytes() == before
    write_cache(path, make_cache(([1], [1])), make_tokenizer())
    assert contents(read_cache(path, make_tokenizer(), **SETTINGS)) == [[[1], [1]]]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_is_appended_to_a_file_without_its_header(tmp_path):
    with pytest.raises(FileNotFoundError, match="write_cache"):
        append_solutions(tmp_path / "new.jsonl", [([1], [2])])
    assert not list(tmp_path.iterdir())


@given(st.lists(st.booleans()), st.integers(0, 10))
def test_the_first_failures_are_replaced_in_order_and_no_solution_is_used_twice(succeeded, num_cached):
    failures = [row for row, success in enumerate(succeeded) if not success]
    assert replace_failures(succeeded, num_cached) == list(zip(failures, range(num_cached), strict=False))

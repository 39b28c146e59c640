"""Segmentation, pivot distribution, success estimator: against brute force and their limits."""

import functools
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from world import make_tokenizer

from trl_explore.pivots.choice import (
    draw_pivots,
    drop_empty_end,
    pivot_distribution,
    rows_to_branch_from,
    segment_delimiters,
    segment_fixed,
)
from trl_explore.pivots.estimator import SuccessEstimator


@given(st.integers(1, 200), st.integers(1, 60))
def test_fixed_segments_cover_the_completion_in_equal_chunks(num_tokens, length):
    starts = segment_fixed(num_tokens, length=length)
    sizes = [b - a for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)]
    assert starts[0] == 0
    assert sum(sizes) == num_tokens
    assert all(size == length for size in sizes[:-1]) and 1 <= sizes[-1] <= length


def test_delimiters_end_a_segment_and_never_start_an_empty_one():
    tokenizer = make_tokenizer()
    ids = tokenizer("ab.c;d..e.")["input_ids"]
    assert segment_delimiters(ids, tokenizer, delimiters=["."]) == [0, 3, 7, 8]
    assert segment_delimiters(ids, tokenizer, delimiters=[".", ";"]) == [0, 3, 5, 7, 8]
    assert segment_delimiters(ids, tokenizer, delimiters=["#"]) == [0]


def test_a_special_token_whose_name_holds_the_delimiter_does_not_delimit():
    tokenizer = make_tokenizer()
    assert segment_delimiters([5, 1, 6], tokenizer, delimiters=["e", "o"]) == [0]


@functools.cache
def make_byte_tokenizer(merges=()):
    """Byte-level BPE as many language models have it, with few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, *("".join(pair) for pair in merges)])}
    raw = Tokenizer(models.BPE(vocabulary, list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_a_delimiter_that_is_part_of_a_token_ends_a_segment_after_it():
    tokenizer = make_byte_tokenizer((("a", "."), ("a.", "b")))
    ids = tokenizer("a.bcd")["input_ids"]
    assert len(ids) == 3
    assert segment_delimiters(ids, tokenizer, delimiters=["."]) == [0, 1]


@given(st.text("a.\n。é🙂 ", max_size=30), st.sampled_from([".", "\n\n", "。", ".\n", "🙂", " a", ". "]))
def test_delimiters_are_found_wherever_tokens_end(text, delimiter):
    # Tokens are single bytes here: each occurrence ends with its last byte.
    tokenizer = make_byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    head, *others = text.split(delimiter)
    starts, length = [0], len(head.encode())
    for other in others:
        length += len(delimiter.encode())
        starts.append(length)
        length += len(other.encode())
    expected = [start for start in starts if start < len(ids)]
    assert segment_delimiters(ids, tokenizer, delimiters=[delimiter]) == expected


def test_bytes_that_are_no_text_hide_no_delimiter():
    tokenizer = make_byte_tokenizer()
    broken = tokenizer("中")["input_ids"][0]
    (dot,) = tokenizer(".")["input_ids"]
    assert segment_delimiters([broken, dot, dot], tokenizer, delimiters=["."]) == [0, 2]
    assert segment_delimiters([broken] * 50 + [dot, dot], tokenizer, delimiters=["."]) == [0, 51]
    assert segment_delimiters([dot, broken], tokenizer, delimiters=["."]) == [0, 1]


def test_the_space_that_a_token_begins_with_is_part_of_the_text():
    raw = Tokenizer(models.WordLevel({"▁one": 0, ".": 1, "▁two": 2}, unk_token="."))
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert tokenizer.decode([0, 1, 2, 1, 2]) == "one. two. two"
    assert segment_delimiters([0, 1, 2, 1, 2], tokenizer, delimiters=[". "]) == [0, 3]
    assert segment_delimiters([0, 1, 2, 1, 2], tokenizer, delimiters=["."]) == [0, 2, 4]


@pytest.mark.parametrize(
    "text, kept",
    [
        ("a.b.<eos>", [0, 2]),
        ("a.b<eos>", [0, 2]),  # what is left ends the completion, but says something before
        ("a. <eos>", [0]),
        ("a.", [0]),
        ("a.. .<eos>", [0, 2, 3]),
        (".<eos>", [0]),
        ("<eos>", [0]),
    ],
)
def test_where_only_the_end_follows_there_is_nothing_to_continue(text, kept):
    tokenizer = make_tokenizer()
    ids = tokenizer(text)["input_ids"]
    starts = segment_delimiters(ids, tokenizer, delimiters=["."])
    assert drop_empty_end(starts, ids, tokenizer, end_ids=[1]) == kept


def test_an_end_that_the_tokenizer_does_not_know_as_special_is_one_too():
    tokenizer = make_tokenizer()
    ids = tokenizer("a.b.=")["input_ids"]
    assert drop_empty_end([0, 2, 4], ids, tokenizer, end_ids=[ids[-1]]) == [0, 2]
    assert drop_empty_end([0, 2, 4], ids, tokenizer, end_ids=[1]) == [0, 2, 4]


@pytest.mark.parametrize("delimiters", [[], [""], [".", ""]])
def test_empty_delimiters_are_refused(delimiters):
    with pytest.raises(ValueError, match="delimiters"):
        segment_delimiters([5], make_tokenizer(), delimiters=delimiters)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30),
    st.floats(-3.0, 6.0),
)
def test_the_distribution_is_utility_normalised(probs, gamma):
    count = len(probs)
    utility = [p * ((t + 1) / count) ** gamma for t, p in enumerate(probs)]
    expected = torch.tensor([u / math.fsum(utility) for u in utility], dtype=torch.float64)
    torch.testing.assert_close(pivot_distribution(torch.tensor(probs, dtype=torch.float64), gamma=gamma), expected)


@pytest.mark.parametrize("gamma", [-20.0, 50.0])
@pytest.mark.parametrize("count", [1, 2, 100_000])
def test_extreme_gamma_neither_overflows_nor_vanishes(gamma, count):
    probs = pivot_distribution(torch.full((count,), 0.5), gamma=gamma)
    assert torch.isfinite(probs).all()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert probs.argmax().item() == (count - 1 if gamma > 0 else 0)


def test_points_that_are_ruled_out_leave_the_others_in_proportion():
    possible = torch.tensor([True, True, False, False])
    probs = pivot_distribution(torch.ones(4), gamma=2.0, possible=possible)
    assert probs.tolist() == pytest.approx([1 / 5, 4 / 5, 0, 0])  # depths stay those of the whole completion
    steep = pivot_distribution(torch.ones(1000), gamma=50.0, possible=torch.arange(1000) < 1)
    assert steep[0].item() == 1.0


def test_draws_are_without_replacement_and_follow_the_distribution():
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    first = [draw_pivots(probs, 2, generator=generator) for _ in range(4000)]
    assert all(len(set(pair)) == 2 for pair in first)
    shares = [sum(pair[0] == t for pair in first) / len(first) for t in range(3)]
    assert shares == pytest.approx([0.1, 0.2, 0.7], abs=0.03)  # 4 standard errors
    assert sorted(draw_pivots(probs, 9, generator=generator)) == [0, 1, 2]


def test_which_rows_to_branch_from():
    nan = math.nan
    rewards = torch.tensor([0.0, 1.0, nan, 0.0, 0.5, nan])  # two groups of three
    options = dict(threshold=1.0, group_size=3)
    assert rows_to_branch_from(rewards, branch_from="failures", **options).tolist() == [1, 0, 0, 1, 1, 0]
    assert rows_to_branch_from(rewards, branch_from="failed_groups", **options).tolist() == [0, 0, 0, 1, 1, 0]
    assert rows_to_branch_from(rewards, branch_from="all", **options).tolist() == [1, 1, 0, 1, 1, 0]


def filled(pairs, *, l2=1.0, buffer_size=1000, **options):
    estimator = SuccessEstimator(buffer_size=buffer_size, l2=l2, **options)
    estimator.add([d for d, _ in pairs], [y for _, y in pairs])
    return estimator


def test_every_depth_is_equal_before_both_labels_and_enough_samples():
    for pairs in ([], [(0.5, 0)] * 50, [(0.5, 1)] * 50, [(0.2, 1), (0.9, 0)] * 4):
        estimator = filled(pairs)
        estimator.fit()
        assert (estimator.weight, estimator.bias) == (0.0, 0.0)
        assert estimator.predict(torch.tensor([0.1, 0.9])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("l2", [1e-3, 1.0, 50.0])
def test_the_fit_is_the_minimum_of_the_cross_entropy_with_a_penalty_on_the_slope(l2):
    generator = torch.Generator().manual_seed(1)
    depths = torch.rand(200, generator=generator, dtype=torch.float64)
    labels = (torch.rand(200, generator=generator, dtype=torch.float64) < torch.sigmoid(2 - 4 * depths)).long()
    estimator = filled(list(zip(depths.tolist(), labels.tolist(), strict=True)), l2=l2)
    estimator.fit()

    params = torch.tensor([estimator.weight, estimator.bias], dtype=torch.float64, requires_grad=True)
    logits = params[0] * depths + params[1]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum")
    (loss + l2 / 2 * params[0] ** 2).backward()
    assert params.grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)  # convex: its only minimum
    assert estimator.weight < 0  # recoverability falls with depth here


def test_a_depth_that_never_varies_says_nothing_of_depth():
    estimator = filled([(0.5, 0)] * 90 + [(0.5, 1)] * 10)
    estimator.fit()
    assert estimator.weight == pytest.approx(0.0, abs=1e-9)
    assert estimator.predict(torch.tensor([0.5])).item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("count", [5, 200, 5000])
@pytest.mark.parametrize("l2", [1.0, 1e-6])
def test_separable_outcomes_stay_finite(count, l2):
    estimator = filled([(0.1, 1), (0.9, 0)] * count, l2=l2, buffer_size=10_000)
    estimator.fit()
    assert -100 < estimator.weight < 0 < estimator.bias < 100
    assert estimator.predict(torch.tensor([0.1, 0.9]))[1] < 0.5 < estimator.predict(torch.tensor([0.1, 0.9]))[0]


def test_a_buffer_with_one_label_keeps_the_last_fit():
    estimator = filled([(0.1, 1), (0.9, 0)] * 200)
    estimator.fit()
    fitted = estimator.weight, estimator.bias
    estimator.add([0.5] * 1000, [0] * 1000)
    estimator.fit()
    assert (estimator.weight, estimator.bias) == fitted != (0.0, 0.0)


def test_the_buffer_forgets_the_oldest():
    estimator = SuccessEstimator(buffer_size=20, l2=1.0)
    estimator.add([0.9] * 30, [1] * 30)
    estimator.add([0.9] * 19, [0] * 19)
    estimator.fit()
    assert len(estimator) == 20
    assert estimator.predict(torch.tensor([0.9])).item() == pytest.approx(1 / 20, abs=1e-6)


def test_state_restores_the_next_fit_exactly():
    generator = torch.Generator().manual_seed(2)
    pairs = [(float(d), int(d < 0.4)) for d in torch.rand(60, generator=generator)]
    estimator = filled(pairs)
    estimator.fit()
    other = SuccessEstimator(buffer_size=1000, l2=1.0)
    other.load_state_dict(estimator.state_dict())
    for e in (estimator, other):
        e.add([0.5], [1])
        e.fit()
    assert (other.weight, other.bias) == (estimator.weight, estimator.bias)


def test_a_state_of_the_first_release_is_taken():
    estimator = filled([])
    estimator.load_state_dict(
        {"weight": -1.4, "bias": -2.5, "seen": [True, True], "buffer": [[0.5, 1.0], [1.0, 0.0]] * 10}
    )
    assert (estimator.weight, estimator.bias, len(estimator)) == (-1.4, -2.5, 20)
    estimator.fit()
    assert estimator.weight < 0


@pytest.mark.parametrize("options", [dict(buffer_size=0, l2=1e-3), dict(buffer_size=5, l2=0.0)])
def test_an_estimator_that_cannot_work_is_refused(options):
    with pytest.raises(ValueError):
        SuccessEstimator(**options)


def test_an_estimator_has_what_it_fits_with_before_the_first_step(monkeypatch):
    estimator = SuccessEstimator(buffer_size=20, l2=1.0)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)  # an import would fail
    estimator.add([0.2, 0.8] * 10, [0, 1] * 10)
    estimator.fit()
    assert estimator.weight > 0

"""Rows that share prefixes as one sequence: the trie, its attention, and micro-batches that suit it."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention

from trl_explore.packing.attention import BLOCK, _TreeAttention, block_mask, masked_attention, num_compilations, spans
from trl_explore.rows.layout import (
    Segment,
    bucket,
    build_trie,
    check_fits,
    computed_tokens,
    group_rows,
    pack_rows,
    split_rows,
)


@st.composite
def forests(draw):
    """Prompts and completions whose rows start like earlier ones, up to any token."""
    tokens = st.lists(st.integers(5, 8), min_size=2, max_size=9)
    found = [draw(tokens)]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from(found))
        found.append(parent[: draw(st.integers(0, len(parent)))] + draw(tokens))
    cuts = [draw(st.integers(1, len(row))) for row in found]
    return [(row[:cut], row[cut:]) for row, cut in zip(found, cuts, strict=True)]


@given(rows=forests(), min_saved=st.integers(1, 8))
def test_a_trie_spells_its_rows_and_descendants_stand_in_one_piece(rows, min_saved):
    whole = [p + c for p, c in rows]
    trie = build_trie(whole, min_saved=min_saved)
    for i, row in enumerate(whole):
        assert [trie.tokens[position] for position in trie.positions(i)] == row
    for i, segment in enumerate(trie.segments):
        below = [s for j, s in enumerate(trie.segments) if j != i and segment in trie.chain(j)]
        positions = [position for s in below for position in range(s.start, s.stop)]
        assert sorted(positions) == list(range(segment.stop, segment.end))
        assert segment.depth == sum(s.stop - s.start for s in trie.chain(i)[:-1])


def test_a_shared_prompt_and_a_shared_branch_stand_once():
    # Both rows of the first prompt start with 9; the third row trains nothing; the last tokens predict nothing.
    ids = torch.tensor([[0, 5, 6, 9, 7, 8], [0, 5, 6, 9, 4, 0], [3, 5, 6, 9, 4, 0], [3, 5, 6, 2, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    rows = pack_rows(ids[:, :3], mask[:, :3], ids[:, 3:], mask[:, 3:], min_saved=1)
    assert rows.input_ids.tolist() == [[3, 5, 6, 5, 6, 9, 7]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert rows.trie.segments == [
        Segment(start=0, stop=3, end=3, depth=0, parent=-1),
        Segment(start=3, stop=6, end=7, depth=0, parent=-1),
        Segment(start=6, stop=7, end=7, depth=3, parent=1),
    ]
    assert rows.scored.tolist() == [0, 2, 4, 5, 5, 6] and rows.labels.tolist() == [[-100, 2, 9, 4, 7, 8]]
    assert rows.index.tolist() == [[2, 4, 5], [2, 3, 0], [0, 0, 0], [1, 0, 0]]
    assert rows.token_ratio == 16 / 7


def test_short_segments_are_repeated_rather_than_shared():
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    assert build_trie(rows, min_saved=4).tokens == [1, 2, 3, 4, 3, 5, 6]  # 1, 2 saves four tokens, 3 would save one
    assert build_trie(rows, min_saved=5).tokens == [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6]
    assert build_trie([[1, 2]] * 3, min_saved=9).tokens == [1, 2]  # nothing branches


def unique_tokens(rows):
    """Brute force: the distinct starts of rows, one token each."""
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@given(rows=forests(), num_empty=st.integers(0, 2), room=st.integers(0, 30), min_saved=st.sampled_from([1, 4, 16]))
def test_packs_hold_every_row_once_within_the_budget(rows, num_empty, room, min_saved):
    rows = [p + c for p, c in rows] + [[]] * num_empty
    budget = max(map(len, rows)) + room
    packs = split_rows(rows, budget=budget, min_saved=min_saved)
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    sizes = [len(build_trie([rows[i] for i in pack], min_saved=min_saved).tokens) for pack in packs]
    assert max(sizes) <= budget
    assert len(packs) == 1 or len(build_trie(rows, min_saved=min_saved).tokens) > budget
    if min_saved == 1:
        assert sizes == [unique_tokens([rows[i] for i in pack]) for pack in packs]
        # Sorted rows are cut where the next one would not fit.
        assert len(packs) == 1 or [rows[i] for pack in packs for i in pack] == sorted(rows)
        for pack, following in zip(packs, packs[1:], strict=False):
            assert unique_tokens([rows[i] for i in [*pack, following[0]]]) > budget


def test_a_row_longer_than_the_budget_is_refused():
    check_fits(7, 7)
    with pytest.raises(ValueError, match=r"`packed_token_budget=2` cannot hold a row of 3 tokens .*: set it to at"):
        split_rows([[1], [1, 2, 3]], budget=2)
    assert split_rows([], budget=1) == [[]]


def test_the_model_sees_all_but_padding_and_last_tokens():
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert computed_tokens(ids[:, :2], mask[:, :2], ids[:, 2:], mask[:, 2:]) == [[5, 6], [], [5, 6]]


def test_no_row_is_a_sequence_of_padding():
    ids = torch.zeros(0, 4, dtype=torch.long)
    rows = pack_rows(ids[:, :2], ids[:, :2], ids[:, 2:], ids[:, 2:], block=4)
    assert rows.input_ids.tolist() == [[0] * 8] and rows.labels.tolist() == [[-100]] and rows.token_ratio == 0
    assert rows.unpack(torch.tensor([[0.5]])).shape == (0, 2)


def test_padding_is_seen_by_no_row():
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    rows = pack_rows(ids[:, :2], mask[:, :2], ids[:, 2:], mask[:, 2:], block=4)
    assert rows.input_ids.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0]] and rows.token_ratio == 4 / 3
    assert spans(rows.trie) == [(slice(0, 3), slice(0, 3), True), (slice(3, 8), slice(3, 8), True)]


@pytest.mark.parametrize("window", [None, 3, 200])
def test_flex_attention_sees_what_masks_of_segments_show(window):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 29, (4, 400), generator=generator)
    ids[1, :150], ids[2, :300], ids[3, :302] = ids[0, :150], ids[0, :300], ids[2, :302]
    mask = torch.ones_like(ids)
    rows = pack_rows(ids[:, :50], mask[:, :50], ids[:, 50:], mask[:, 50:], min_saved=1, block=128)
    parts = [torch.randn(1, 2, rows.input_ids.size(1), 8, generator=generator) for _ in range(3)]
    blocks = block_mask(rows, window)
    expected = masked_attention(*parts, rows.trie, scale=0.5, window=window)
    got = flex_attention(*parts, scale=0.5, block_mask=blocks)  # no backward pass on a CPU, nor does it skip blocks
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    # What a GPU skips, and where it asks no mask: of all pairs of tokens.
    size = rows.input_ids.size(1)
    pairs = create_mask(blocks.mask_mod, None, None, size, size, device="cpu")[0, 0]
    pairs = pairs.view(size // 128, 128, size // 128, 128).transpose(1, 2).flatten(2)
    whole = torch.zeros(pairs.shape[:2], dtype=torch.bool)
    for i, number in enumerate(blocks.full_kv_num_blocks[0, 0]):
        whole[i, blocks.full_kv_indices[0, 0, i, :number]] = True
    asked = blocks.to_dense()[0, 0].bool()
    assert not (pairs.any(dim=2) & ~asked).any() and not (whole & ~pairs.all(dim=2)).any()
    if window is None:
        assert torch.equal(asked, pairs.any(dim=2)) and torch.equal(whole, pairs.all(dim=2)) and whole.any()
    else:
        assert asked.sum() < torch.ones_like(asked).tril().sum()


@given(length=st.integers(1, 200_000))
def test_a_bucket_adds_less_than_an_eighth_to_whole_blocks(length):
    blocks = max(-(-length // BLOCK), 2)
    size = bucket(length, BLOCK)
    assert size % BLOCK == 0 and 0 <= size - blocks * BLOCK < blocks * BLOCK / 8
    assert size == bucket(size, BLOCK)


def some_rows(number, device="cpu"):
    """Micro-batches of completions that share their prompt, of other lengths each."""
    chance = random.Random(0)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(number):
        prompt, completion = chance.randrange(20, 900), chance.randrange(20, 900)
        ids = torch.randint(5, 29, (8, prompt + completion), device=device, generator=generator)
        ids[:, :prompt] = ids[0, :prompt]
        mask = torch.ones_like(ids)
        yield pack_rows(ids[:, :prompt], mask[:, :prompt], ids[:, prompt:], mask[:, prompt:], block=BLOCK)


def test_two_hundred_batches_have_few_lengths():
    rows = list(some_rows(200))
    assert len({-(-r.num_unique // BLOCK) for r in rows}) > 50  # without buckets
    assert len({r.input_ids.size(1) for r in rows}) <= 15 + 8 + 8  # up to 2048, 4096 and 8192 tokens


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 50])
def test_new_lengths_compile_nothing(window):
    """As torch traces attention, for a backend that compiles nothing: one graph of a length, and one of any."""
    torch.compiler.reset()
    compiled, before = torch.compile(flex_attention, backend=lambda graph, inputs: graph.forward), num_compilations()
    lengths = set()
    for i, rows in enumerate(some_rows(5)):
        lengths.add(rows.input_ids.size(1))
        parts = [torch.randn(1, 1, rows.input_ids.size(1), 8) for _ in range(3)]
        compiled(*parts, scale=0.5, block_mask=block_mask(rows, window and window + i))
        assert num_compilations() - before == min(len(lengths), 2)
    assert len(lengths) > 2


def test_merging_many_parts_rounds_no_more_than_one_attention():
    trie = build_trie([[*range(4 * i), 99] for i in range(1, 25)], min_saved=1)  # twenty-four levels
    torch.manual_seed(0)
    exact = [torch.randn(1, 2, len(trie.tokens), 32, dtype=torch.float64) for _ in range(3)]
    expected = masked_attention(*exact, trie, scale=0.2)
    torch.testing.assert_close(_TreeAttention.apply(*exact, trie, 0.2), expected, rtol=0, atol=1e-12)
    rounded = [part.bfloat16() for part in exact]
    merged, whole = _TreeAttention.apply(*rounded, trie, 0.2), masked_attention(*rounded, trie, scale=0.2)
    assert (merged - expected).abs().mean() < 1.1 * (whole - expected).abs().mean()


def test_rows_of_a_prompt_go_to_one_micro_batch_and_costs_are_level():
    long, short = [1] * 90, [[i] * 10 for i in range(2, 6)]
    prompts = [short[0], long, short[1], long, short[2], short[3], long, short[0]]
    completions = [[7], [8], [9], [10], [11], [12], [13], [14]]
    order = group_rows(prompts, completions, num_batches=2)
    assert sorted(order[:4]) == [0, 2, 4, 7] and sorted(order[4:]) == [1, 3, 5, 6]
    # With room for two rows each, a prompt of three rows takes two places, and the rest the cheapest company.
    order = group_rows(prompts, completions, num_batches=4)
    assert [sorted(order[i : i + 2]) for i in range(0, 8, 2)] == [[0, 7], [1, 3], [2, 4], [5, 6]]

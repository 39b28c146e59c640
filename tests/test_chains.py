"""The maths of TreeRL and AttnRL: what completions share, what their tokens are worth, where they are forked."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import make_tokenizer

from trl_explore.chains.influence import forked_chains, forward_influence, influential_steps, step_attention
from trl_explore.chains.leaves import TreeCompletion, chain_of, completion, shared_tokens
from trl_explore.chains.uncertain import choose_forks, choose_trained, first_text_end, open_forks, uncertainty
from trl_explore.chains.values import token_advantages

NAN = math.nan


def tree(*leaves):
    """Leaves of (own tokens, parent, start, reward)."""
    return [TreeCompletion(list(range(n)), parent, start, reward=reward) for n, parent, start, reward in leaves]


def firsts(row, *tokens):
    return [round(row[token], 4) for token in tokens]


# A prefix of two tokens with leaves a and b, and a chain c of its own.
GOLDEN = tree((5, None, 0, 1.0), (3, 0, 2, 0.0), (4, None, 0, 0.0))


@st.composite
def forests(draw):
    leaves = []
    for i in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        start = 0
        if parent is not None:
            start = draw(st.integers(leaves[parent].start, leaves[parent].length - 1))
        reward = draw(st.sampled_from([0.0, 1.0, 0.25, -0.5, NAN]))
        leaves.append(TreeCompletion([0] * draw(st.integers(1, 5)), parent, start, reward=reward))
    return leaves


def identities(leaves, place):
    """Of every token of a completion, the leaf that sampled it and where it stands."""
    leaf = leaves[place]
    before = [] if leaf.parent is None else identities(leaves, leaf.parent)[: leaf.start]
    return before + [(place, token) for token in range(leaf.start, leaf.length)]


def by_enumeration(leaves, trained):
    """The formula, token by token: a node is what the same scored leaves run through."""
    paths = [identities(leaves, i) for i in range(len(leaves))]
    scored = [i for i, leaf in enumerate(leaves) if not math.isnan(leaf.reward)]

    def value(places):
        return sum(leaves[i].reward for i in places) / len(places)

    found = []
    for i, path in enumerate(paths):
        row, parent = [0.0] * len(path), scored
        for t, token in enumerate(path if i in scored else []):
            below = [j for j in scored if token in paths[j]]
            if t and below != [j for j in scored if path[t - 1] in paths[j]]:
                parent = [j for j in scored if path[t - 1] in paths[j]]
            number = max(sum(j in trained for j in below), 1)
            row[t] = (2 * value(below) - value(scored) - value(parent)) / math.sqrt(number)
        found.append(row)
    return found


# -------------------------------------------------------------------------------------------------------------- values


def test_prefix_branches_and_chain_have_the_papers_advantages():
    a, b, c = token_advantages(GOLDEN)
    assert firsts(a, 0, 1, 2, 4) == [0.2357, 0.2357, 1.1667, 1.1667] and len(a) == 5
    assert firsts(b, 0, 1, 2, 4) == [0.2357, 0.2357, -0.8333, -0.8333] and len(b) == 5
    assert firsts(c, 0, 3) == [-0.6667, -0.6667] and len(c) == 4


@settings(deadline=None)
@given(forests(), st.data())
def test_values_are_those_of_the_formula(leaves, data):
    trained = data.draw(st.lists(st.integers(0, len(leaves) - 1), unique=True))
    for found, expected in zip(token_advantages(leaves, trained), by_enumeration(leaves, trained), strict=True):
        assert found == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(forests(), st.floats(-10, 10))
def test_equal_rewards_leave_exactly_nothing(leaves, reward):
    for leaf in leaves:
        leaf.reward = reward
    assert all(value == 0.0 for row in token_advantages(leaves) for value in row)


@settings(deadline=None)
@given(forests())
def test_rows_share_what_their_paths_have_in_common(leaves):
    paths = [identities(leaves, i) for i in range(len(leaves))]
    shared = [[len(set(one) & set(other)) for other in paths] for one in paths]
    assert shared_tokens(leaves) == shared
    assert [len(completion(leaves, i)) for i in range(len(leaves))] == [leaf.length for leaf in leaves]


def test_a_prefix_has_the_tokens_of_the_leaf_that_drew_it():
    leaves = [
        TreeCompletion([1, 2, 3], logprobs=[-1, -2, -3]),
        TreeCompletion([8, 9], 0, 1, [-8, -9]),
        TreeCompletion([7], 1, 2, [-7]),
    ]
    assert completion(leaves, 2) == [1, 8, 7]
    assert [chain_of(leaves, i) for i in range(3)] == [0, 0, 0]


# --------------------------------------------------------------------------------------------------------------- forks


def generator():
    return torch.Generator().manual_seed(0)


def forks(leaves, number, *, ends=None, selection="uncertain"):
    places = open_forks(leaves, ends or [leaf.length for leaf in leaves])
    return choose_forks(leaves, places, number, selection=selection, generator=generator())


def test_the_least_likely_tokens_of_every_chain_are_forked():
    leaves = [
        TreeCompletion([0] * 4, logprobs=[-0.1, -3.0, -0.2, -2.0]),
        TreeCompletion([0] * 2, logprobs=[-0.5, None]),
    ]
    assert forks(leaves, 2) == [(0, 1), (0, 3), (1, 0), (1, 1)]
    assert [uncertainty(leaves, fork) for fork in forks(leaves, 2)] == [3.0, 2.0, 0.5, 0.0]


def test_branches_compete_with_the_chain_that_they_grow_on_but_for_their_first_token():
    chain = TreeCompletion([0] * 4, logprobs=[-0.1, -3.0, -0.2, -2.0])
    leaves = [chain, TreeCompletion([0] * 3, 0, 1, [-9.0, -2.5, -0.1])]
    assert forks(leaves, 2) == [(1, 2), (0, 3)]  # (0, 1) was forked, and (1, 1) is the same place


def test_nothing_is_forked_behind_an_end():
    leaves = [TreeCompletion([0] * 4, logprobs=[-0.1, -3.0, -0.2, -2.0])]
    assert forks(leaves, 3, ends=[1]) == [(0, 0)] and forks(leaves, 3, ends=[0]) == []


def test_the_control_draws_as_many_tokens_of_every_chain():
    leaves = [
        TreeCompletion([0] * 50, logprobs=[0.0] * 50),
        TreeCompletion([0], logprobs=[0.0]),
        TreeCompletion([0] * 9, 0, 3),
    ]
    drawn = forks(leaves, 3, selection="random")
    assert sorted({place for place, _ in drawn} & {1}) == [1] and len(set(drawn)) == len(drawn) == 4
    assert drawn == forks(leaves, 3, selection="random") != forks(leaves, 3)


def test_a_text_is_found_at_the_token_that_ends_it_in_whatever_case():
    tokenizer = make_tokenizer()
    ids = tokenizer("12ab34dcba")["input_ids"]
    options = dict(tokenizer=tokenizer, cache={})
    assert first_text_end(ids, texts=["B3", "dc"], **options) == 4
    assert first_text_end(ids, texts=["dc"], **options) == 7
    assert first_text_end(ids, texts=["cd"], **options) is None and first_text_end(ids, texts=[], **options) is None
    # A letter whose lower case has two characters does not move the position.
    cache = {1: "İ", 2: "İ", 3: "a", 4: "b"}
    assert first_text_end([1, 2, 3, 4], tokenizer, ["A"], cache=cache) == 2


@settings(deadline=None)
@given(st.integers(3, 9), st.lists(st.booleans(), min_size=9, max_size=9), st.integers(0, 99))
def test_all_chains_are_trained_and_a_success_where_no_chain_is_one(number, solved, seed):
    leaves = [TreeCompletion([0], None if i < 3 else 0, solved=solved[i]) for i in range(9)]
    drawn = choose_trained(leaves, number, generator=torch.Generator().manual_seed(seed))
    assert drawn[:3] == [0, 1, 2] and len(drawn) == len(set(drawn)) == number
    if number > 3 and any(solved):
        assert any(solved[i] for i in drawn)


@pytest.mark.parametrize("seed", range(5))
def test_leaves_that_are_masked_are_not_chosen(seed):
    leaves = []
    for i in range(9):
        leaves.append(TreeCompletion([0], None if i < 3 else 0, solved=i in (0, 6), is_trained=i in (1, 4, 5, 6)))
    assert choose_trained(leaves, None, generator=generator()) == [1, 4, 5, 6]
    drawn = choose_trained(leaves, 3, generator=torch.Generator().manual_seed(seed))
    # The successful chain is masked, so the successful branch is chosen first.
    assert len(drawn) == 3 and drawn[0] == 1 and drawn[-1] == 6 and set(drawn) <= {1, 4, 5, 6}


# ----------------------------------------------------------------------------------------------------------- influence


def test_influence_is_what_steps_four_further_on_attend_to():
    alpha = torch.zeros(1, 6, 6)
    alpha[0, 4, 0], alpha[0, 5, 0], alpha[0, 5, 1] = 0.3, 0.1, 0.25
    assert forward_influence(alpha, distance=4).tolist() == pytest.approx([0.4, 0.25, 0, 0, 0, 0])


def test_the_head_that_attends_most_counts_for_each_step():
    alpha = torch.zeros(2, 3, 3)
    alpha[0, 1, 0], alpha[0, 2, 0], alpha[1, 2, 0], alpha[1, 2, 1] = 0.2, 0.3, 0.4, 0.6
    assert forward_influence(alpha, distance=1).tolist() == pytest.approx([0.5, 0.6, 0])
    assert forward_influence(alpha, distance=2).tolist() == pytest.approx([0.4, 0, 0])


def test_attention_between_steps_is_the_mean_over_their_tokens():
    attention = torch.tensor([[[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]]])
    found = step_attention(attention, [(0, 1), (1, 3)])
    torch.testing.assert_close(found, torch.tensor([[[1.0, 0.0], [0.35, 0.325]]]))


def steps(influence, number, *, starts=None, end=10**6, quantile=0.8, distance=0):
    starts = starts or [10 * i for i in range(len(influence))]
    return influential_steps(influence, starts, number, end=end, quantile=quantile, distance=distance)


def test_steps_above_the_quantile_are_forked_in_text_order_and_never_the_first():
    influence = [0.9, 0.1, 0.8, 0.3, 0.2, 0.7, 0.0, 0.0, 0.0, 0.6]
    assert steps(influence, 2) == [20, 50] and steps(influence, 1) == [20]
    assert steps(influence, 1, quantile=1.0) == [20]


def test_where_few_are_attended_to_these_are_forked_and_the_first_ones_fill_up():
    influence = [0.5, 0, 0, 0, 0, 0, 0, 0.2, 0, 0, 0, 0]
    assert steps(influence, 1) == [70] and steps(influence, 3) == [10, 20, 70]
    assert steps([0.0] * 4, 2) == [10, 20]


def test_forks_keep_their_distance_from_each_other_and_from_the_start():
    influence = [0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert steps(influence, 2, distance=25) == [10, 30]  # the second found none so far away, and is the first left
    assert steps(influence, 2, distance=20) == [20, 40]


def test_nothing_is_forked_behind_the_thinking_and_no_more_than_there_is():
    assert steps([0, 0.1, 0.9], 2, end=20) == [10] and steps([0, 0.1, 0.9], 2, end=10) == []
    assert steps([0.4], 2) == []


@pytest.mark.parametrize("right, number", [(0, 6), (1, 6), (2, 5), (3, 4), (4, 4), (5, 3), (6, 3)])
def test_the_more_chains_are_forked_the_fewer_succeed_those_of_the_rarer_outcome_first(right, number):
    leaves = [TreeCompletion([0], solved=i < right) for i in range(6)]
    chosen = forked_chains(leaves, scored=[True] * 6, generator=generator())
    assert len(chosen) == number and chosen == sorted(set(chosen))
    rare = range(right, 6) if right >= 3 else range(right)
    assert set(rare) <= set(chosen)


def test_unscored_chains_are_neither_forked_nor_counted():
    leaves = [TreeCompletion([0], solved=i == 0) for i in range(4)]
    assert forked_chains(leaves, scored=[True, True, False, False], generator=generator()) == [0, 1]
    assert forked_chains(leaves, scored=[False] * 4, generator=generator()) == []

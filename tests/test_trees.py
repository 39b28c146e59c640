"""Tree search: golden trees, replayed and hand-checked; the rules one by one; invariants of any search."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_explore.rows.rollouts import Continuation
from trl_explore.trees.credit import first_appearance, is_uniform, overlong_penalty, tree_advantages
from trl_explore.trees.records import tree_record
from trl_explore.trees.rules import mean_entropy, scaled_outcomes
from trl_explore.trees.search import (
    ROOT,
    Limits,
    Tree,
    Verdict,
    backup,
    backup_value,
    best_child,
    choose_terminal,
    exchange,
    expand,
    frontier,
    frontier_score,
    judge,
    search,
    select,
    select_random,
    select_uct,
    terminal_outcome,
    uct_score,
    with_virtual_loss,
)

GOLDEN = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "golden_trees").glob("*.json")}
EOS = 0


class Script:
    """Hands out written continuations in order."""

    def __init__(self, trees):
        self.left = {}
        for tree in trees:
            for entry in tree["script"]:
                known = entry.get("entropies", [None] * len(entry["sampled"]))
                queue = self.left.setdefault((*tree["prompt_ids"], *entry["after"]), [])
                queue += zip(entry["sampled"], known, strict=True)

    def __call__(self, prefixes, num_samples, max_new_tokens):
        sampled = []
        for prefix, number, budget in zip(map(tuple, prefixes), num_samples, max_new_tokens, strict=True):
            queue = self.left[prefix]
            part, self.left[prefix] = queue[:number], queue[number:]
            assert len(part) == number and all(len(ids) <= budget for ids, _ in part)
            sampled.append([Continuation(ids, finished=ids[-1] == EOS, entropies=known) for ids, known in part])
        return sampled


def judged_by(golden, trees, *, scaled=False):
    def value_fn(leaves):
        verdicts = []
        for leaf in leaves:
            reward = float(leaf.completion_ids in trees[leaf.tree]["correct"])
            outcome = terminal_outcome(
                reward,
                finished=leaf.finished,
                success_threshold=1.0,
                incomplete_score=golden.get("incomplete_score", -1.0),
            )
            verdicts.append(Verdict(outcome, reward=reward if scaled else None))
        return verdicts

    return value_fn


def grow(golden, trees, *, scaled=False):
    """The finished trees."""
    script = Script(trees)
    roots = [tree["prompt_ids"] for tree in trees]
    grown = search(roots, script, judged_by(golden, trees, scaled=scaled), limits=Limits(**golden["limits"]))
    assert not any(script.left.values())
    return grown


def check(tree, expected):
    nodes = tree.nodes
    assert [node.index for node in nodes] == list(range(len(nodes)))
    assert [node.parent for node in nodes] == expected["parents"]
    assert list(tree.results) == expected["results"]
    assert tree.reason == expected["reason"]
    assert tree.iterations == len(expected["visited"])
    assert tree.generated_tokens == expected["generated_tokens"]
    assert [node.outcome for node in nodes] == expected["outcomes"]
    assert [node.visits for node in nodes] == expected["visits"]
    assert [node.value for node in nodes] == pytest.approx(expected["values"], abs=1e-6)
    grown_in = {node.iteration: node.parent for node in nodes[1:] if not node.direct}
    assert all(expected["visited"][iteration - 1] == parent for iteration, parent in grown_in.items())
    for row, wanted in zip(tree_advantages(tree), expected["advantages"], strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trees_grow_as_written(name, scaled):
    """Their rewards are 0 and 1, which are the paper's outcomes on either scale."""
    golden = GOLDEN[name]
    for tree, written in zip(grow(golden, golden["trees"], scaled=scaled), golden["trees"], strict=True):
        check(tree, written["expected"])


# ---------------------------------------------------------------------------------------------- rules, one by one


@pytest.mark.parametrize(
    "value, reward, step, length, expected",
    [
        (0.0, 1.0, 1, 4, 0.25),
        (0.0, 1.0, 4, 4, 1.0),
        (0.0, -1.0, 1, 20, -0.1),  # the decay has a floor
        (0.5, 1.0, 2, 4, 1.0),  # equal signs add up
        (-0.5, -1.0, 2, 4, -1.0),
        (-3.0, 1.0, 2, 4, 0.5),  # a success clears a penalty
        (0.5, -1.0, 2, 4, 0.5),  # a failure leaves a credit
        (0.5, 0.0, 2, 4, 0.5),
        (-0.5, 0.0, 2, 4, -0.5),
    ],
)
def test_backup_value(value, reward, step, length, expected):
    assert backup_value(value, reward, step=step, length=length, decay_min=0.1) == pytest.approx(expected)


def test_uct_score():
    assert uct_score(0.5, 2, 8, coef=2.0) == pytest.approx(0.5 + 2 * math.sqrt(math.log(8) / 2))
    assert uct_score(0.5, 0, 8, coef=2.0) == uct_score(0.5, 3, 0, coef=2.0) == 0.5
    assert uct_score(0.5, 1, 1, coef=2.0) == 0.5


def test_frontier_score():
    weights = dict(max_depth=16, quality_weight=0.4, entropy_weight=0.2, depth_weight=0.01)
    assert frontier_score(0.5, 1.5, 4, **weights) == pytest.approx(0.4 * math.tanh(0.5) + 0.3 + 0.01 * 0.5)
    assert frontier_score(0.5, 0.0, 4, **weights, depth_bonus="linear") == pytest.approx(0.4 * math.tanh(0.5) + 0.04)
    log = 0.4 * math.tanh(0.5) + 0.01 * math.log(5)
    assert frontier_score(0.5, 0.0, 4, **weights, depth_bonus="log") == pytest.approx(log)


@pytest.mark.parametrize(
    "reward, finished, expected",
    [
        (1.0, True, 1.0),
        (2.5, False, 1.0),
        (0.9, True, -1.0),
        (0.9, False, -0.3),
        (None, True, None),
        (math.nan, False, None),
    ],
)
def test_terminal_outcome(reward, finished, expected):
    assert terminal_outcome(reward, finished=finished, success_threshold=1.0, incomplete_score=-0.3) == expected


@pytest.mark.parametrize(
    ("rewards", "outcomes", "scaled"),
    [
        ([0.2, 0.3, 0.6], [-1.0, -1.0, -1.0], [-1.0, -0.5, 1.0]),
        ([0.0, 1.0, 0.0], [-1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]),
        ([3.0, 8.0], [1.0, 1.0], [-1.0, 1.0]),  # also if all of them count as correct
        ([0.3, 0.3], [-1.0, -1.0], None),
        ([1.0, 0.99999994], [1.0, 1.0], None),  # float32's rounding is no contrast
        # Completions that a limit cut off are worth at least the incomplete score.
        ([0.0, 0.1, 1.0], [-0.3, -0.3, 1.0], [-0.3, -0.3, 1.0]),
        ([0.0, 0.8, 1.0], [-0.3, -0.3, 1.0], [-0.3, 0.6, 1.0]),
        ([0.0, 0.1, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]),
    ],
)
def test_outcomes_are_scaled_to_the_rewards_of_a_tree(rewards, outcomes, scaled):
    found = scaled_outcomes(rewards, outcomes)
    assert found is None if scaled is None else found == pytest.approx(scaled)


def test_entropy_is_the_mean_of_what_is_known():
    assert mean_entropy(Continuation([1, 2], entropies=[0.2, 0.4], logprobs=[-5.0, -5.0])) == pytest.approx(0.3)
    assert mean_entropy(Continuation([1, 2], logprobs=[-0.5, -1.5])) == pytest.approx(1.0)
    assert mean_entropy(Continuation([1, 2])) == 0.0


LIMITS = Limits(num_results=4, width=2, max_depth=4, node_length=2, max_completion_length=8, max_iterations=99)


def sampled(*rows, entropies=None):
    known = entropies or [0.0] * len(rows)
    return [
        Continuation(list(r), finished=r[-1] == EOS, entropies=[h] * len(r)) for r, h in zip(rows, known, strict=True)
    ]


def outcomes(tree, **by_node):
    return judge(tree, {int(name[1:]): Verdict(value) for name, value in by_node.items()})


def test_what_makes_a_child_terminal():
    tree = expand(Tree.plant([9]), ROOT, sampled([1, 2], [3, EOS]), LIMITS)
    # An end-of-sequence token in the very last slot of a chunk is one.
    assert [n.terminal for n in tree.nodes] == [False, False, True] and tree.nodes[2].finished
    for limit in (dict(max_depth=1), dict(max_completion_length=2)):
        child = expand(Tree.plant([9]), ROOT, sampled([1, 2]), replace(LIMITS, **limit)).nodes[1]
        assert child.terminal and not child.finished


def test_the_terminal_node_to_back_up():
    limits = replace(LIMITS, width=6, max_depth=1)
    rows = [1, EOS], [2, 2], [3, EOS], [4, EOS], [5, 5], [6, EOS]
    tree = expand(Tree.plant([9]), ROOT, sampled(*rows, entropies=[0.5, 0.1, 0.4, 0.9, 0.2, 0.9]), limits)
    tree = outcomes(tree, n1=-1.0, n2=-1.0, n3=-1.0, n4=1.0, n5=-1.0, n6=1.0)
    order = []
    for _ in range(6):
        order.append(choose_terminal(tree, tree.candidates))
        tree = backup(tree, order[-1], decay_min=0.1)
    # Correct ones (equal entropy: the older), then finished ones by entropy, then incomplete ones by entropy.
    assert order == [4, 6, 3, 1, 2, 5]


def test_entropy_is_that_of_the_whole_trajectory():
    tree = expand(Tree.plant([9]), ROOT, sampled([1, 2], [3, 4], entropies=[0.1, 0.9]), LIMITS)
    tree = expand(tree, 1, sampled([5, EOS], entropies=[0.6]), LIMITS)
    tree = expand(tree, 2, sampled([EOS], entropies=[0.0]), LIMITS)
    assert tree.trajectory_entropy(3) == pytest.approx((2 * 0.1 + 2 * 0.6) / 4)
    assert tree.trajectory_entropy(4) == pytest.approx((2 * 0.9 + 0.0) / 3)
    assert choose_terminal(outcomes(tree, n3=-1.0, n4=-1.0), [3, 4]) == 3


def small_tree():
    """Two nodes below the root, and below the first of them an open and an ended one, 3 and 4."""
    tree = expand(Tree.plant([9]), ROOT, sampled([1, 1], [2, 2]), LIMITS)
    return expand(tree, 1, sampled([3, 3], [4, EOS]), LIMITS)


def test_frontier_selection_looks_at_the_whole_tree():
    tree = expand(Tree.plant([9]), ROOT, sampled([1, 1], [2, 2]), LIMITS)
    assert best_child(tree, (2, 1), coef=2.0) == select(tree, LIMITS) == 1  # ties go to the oldest
    tree = small_tree()
    assert frontier(tree, LIMITS) == [2, 3]
    lucky = backup(outcomes(tree, n4=1.0), 4, decay_min=0.1)
    unlucky = backup(outcomes(tree, n4=-1.0), 4, decay_min=0.1)
    assert select(lucky, LIMITS) == 3 and select(unlucky, LIMITS) == 2
    # Weights and bonuses decide: depth alone, entropy alone.
    assert select(unlucky, LIMITS, quality_weight=0.0) == 3
    assert select(unlucky, LIMITS, depth_weight=10.0) == 3
    unsure = expand(Tree.plant([9]), ROOT, sampled([1, 1], [2, 2], entropies=[0.2, 0.8]), LIMITS)
    assert select(unsure, LIMITS, entropy_weight=0.4) == 2 and select(unsure, LIMITS, entropy_weight=-0.4) == 1


def test_after_a_failure_the_search_tries_another_beginning():
    limits = replace(LIMITS, max_depth=64, node_length=1, max_completion_length=64)
    tree, here = Tree.plant([9]), ROOT
    for _ in range(20):
        tree = expand(tree, here, sampled([1], [2]), limits)
        here = tree.nodes[here].children[0]
    tree = expand(tree, here, sampled([EOS], [3]), limits)
    end = tree.nodes[here].children[0]
    assert select(backup(outcomes(tree, **{f"n{end}": -1.0}), end, decay_min=0.1), limits) == 2  # below the root
    success = backup(outcomes(tree, **{f"n{end}": 1.0}), end, decay_min=0.1)
    assert select(success, limits) == end + 1  # as near to the success as can be


def test_uct_selection_walks_from_the_root():
    tree = small_tree()
    lucky = backup(outcomes(tree, n4=1.0), 4, decay_min=0.1)
    assert select_uct(lucky, LIMITS, coef=0.0) == 3  # 1 is full and better than 2
    assert select_uct(lucky, LIMITS, coef=10.0) == 2  # 2 is visited less
    both = expand(tree, 2, sampled([5, EOS], [6, EOS]), LIMITS)
    both = backup(outcomes(both, n4=-1.0, n5=1.0, n6=-1.0), 5, decay_min=0.1)
    assert select_uct(both, LIMITS, coef=0.0) == 2  # a terminal child is left over there
    assert select_uct(expand(Tree.plant([9]), ROOT, sampled([EOS], [EOS]), LIMITS), LIMITS) is None


def test_random_selection_takes_every_node_of_the_frontier_equally_often():
    tree = backup(outcomes(small_tree(), n4=1.0), 4, decay_min=0.1)
    assert frontier(tree, LIMITS) == [2, 3] and select(tree, LIMITS) == 3
    tree = expand(tree, 3, sampled([5, 5], [6, 6]), replace(LIMITS, max_depth=9))
    assert frontier(tree, LIMITS) == [2, 5, 6]
    torch.manual_seed(0)
    counts = Counter(select_random(tree, LIMITS) for _ in range(3000))
    assert set(counts) == {2, 5, 6}
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 13.8  # chi-squared, one in a thousand
    # The draws are the global state's, which checkpoints hold.
    torch.manual_seed(0)
    assert Counter(select_random(tree, LIMITS) for _ in range(3000)) == counts


def test_width_can_shrink_with_depth():
    limits = replace(LIMITS, width=8, max_depth=64, max_completion_length=128, min_width=3, width_decay=2)
    assert [limits.width_at(depth) for depth in (0, 7, 8, 16, 24, 60)] == [8, 8, 6, 4, 3, 3]


@pytest.mark.parametrize(
    ("width", "max_depth", "node_length", "max_completion_length", "most"),
    [(2, 3, 4, 12, 8), (2, 64, 4, 5, 4), (1, 64, 1, 64, 1), (8, 64, 1, 64, 9)],
    ids=["depth", "two levels at most", "width", "results"],
)
def test_how_many_completions_a_tree_can_end_with(width, max_depth, node_length, max_completion_length, most):
    limits = Limits(9, width, max_depth, node_length, max_completion_length, max_iterations=9)
    assert limits.most_results == most


def test_completions_that_cannot_be_scored_count_for_nothing():
    limits = replace(LIMITS, num_results=2, max_depth=1, max_completion_length=2)
    (tree,) = search(
        [[9]],
        lambda prefixes, n, budgets: [sampled(*[[1, EOS]] * k) for k in n],
        lambda leaves: [Verdict(None) for _ in leaves],
        limits=limits,
    )
    assert len(tree.results) == 2 and all(tree.nodes[row].direct for row in tree.results)
    assert [node.value for node in tree.nodes] == [0.0] * 5 and tree.nodes[0].visits == 1
    assert tree_advantages(tree) == [[0.0, 0.0], [0.0, 0.0]]


def test_a_completion_that_takes_the_place_of_a_rollout_has_its_own_value():
    limits = replace(LIMITS, num_results=3, width=3, max_depth=9, node_length=1, max_completion_length=4)

    def grown(second, *order, **outcome_of):
        """Three rollouts, backed up in this order."""
        rows = sampled([1, EOS], second, [3, EOS])
        tree = expand(Tree.plant([9])._replace(reason="replayed"), ROOT, rows, limits, direct=True)
        tree = outcomes(tree, n1=-1.0, n3=1.0, **outcome_of)
        for row in order:
            tree = backup(tree, row, decay_min=0.1)
        return tree

    tree = grown([2, 2, 2, 2], 1, 2, 3, n2=-0.5)
    other = exchange(tree, 2, [4, 5], finished=False)
    assert other.results == (1, 3) and other.nodes[ROOT].visits == 3
    other = backup(outcomes(other, n2=1.0), 2, decay_min=0.1)
    fresh = grown([4, 5], 1, 3, 2, n2=1.0)  # what a tree with this rollout from the start is
    unknown = [node._replace(logprobs=None) for node in fresh.nodes]
    assert list(other.nodes) == unknown and other.results == fresh.results
    assert [(node.visits, node.value) for node in other.nodes] == [(4, 0.0), (1, -1.0), (1, 1.0), (1, 1.0)]
    unscored = backup(outcomes(exchange(tree, 1, [6], finished=False), n1=None), 1, decay_min=0.1)
    assert unscored.nodes[1].value == unscored.nodes[1].visits == 0 and unscored.nodes[ROOT].visits == 3


# -------------------------------------------------------------------------------------------------- advantages


def failed_tree():
    golden = GOLDEN["all_failed"]
    return grow(golden, golden["trees"])[0]


def mixed_tree():
    golden = GOLDEN["success_clears_penalty"]
    return grow(golden, golden["trees"])[0]


@pytest.mark.parametrize("incomplete", [-1.0, -0.5, 0.0])
def test_failures_that_were_cut_off_are_no_contrast_to_others(incomplete):
    limits = replace(LIMITS, max_depth=1, width=3)
    tree = outcomes(expand(Tree.plant([9]), ROOT, sampled([1, EOS], [2, 2], [3, EOS]), limits), n1=-1.0, n2=incomplete)
    failed = tree._replace(results=(1, 2))
    assert is_uniform(failed) and tree_advantages(failed, skip_uniform=True) == [[0.0, 0.0], [0.0, 0.0]]
    solved = outcomes(tree, n3=1.0)._replace(results=(1, 2, 3))
    assert not is_uniform(solved) and is_uniform(solved._replace(results=(3,)))
    assert tree_advantages(solved, skip_uniform=True) == tree_advantages(solved)


def test_normalisation_by_the_standard_deviation():
    plain, scaled = tree_advantages(mixed_tree()), tree_advantages(mixed_tree(), normalization="mean_std")
    std = math.sqrt(8 / 9) + 1e-6  # of -1, -1, 1
    for row, other in zip(plain, scaled, strict=True):
        assert other == pytest.approx([a / std for a in row])
    # Trees without contrast are not divided by theirs, although inner nodes have values other than the mean outcome.
    plain = tree_advantages(failed_tree())
    assert tree_advantages(failed_tree(), normalization="mean_std") == plain and any(any(row) for row in plain)


def test_the_credit_of_outcomes_is_that_of_grpo():
    tree = mixed_tree()
    outcomes = [tree.nodes[row].outcome for row in tree.rows]
    mean = sum(outcomes) / len(outcomes)
    for row, outcome, advantages in zip(tree.rows, outcomes, tree_advantages(tree, credit="outcome"), strict=True):
        assert advantages == pytest.approx([outcome - mean] * len(tree.completion_ids(row)))
    assert tree_advantages(tree, credit="outcome") != tree_advantages(tree)


def test_clip_of_intermediate_values():
    rows = tree_advantages(mixed_tree(), q_temperature=0.5, q_max=0.3)
    assert rows[2] == pytest.approx([0.3 * math.tanh(2 / 3) + 1 / 3, 0.3 * math.tanh(4 / 3) + 1 / 3, 4 / 3])


def test_overlong_penalty_reaches_every_token_and_the_baseline():
    penalty = partial(overlong_penalty, max_completion_length=10, buffer=4, penalty=2.0)
    assert [penalty(length) for length in (5, 6, 7, 10)] == [0.0, 0.0, -0.5, -2.0]
    assert overlong_penalty(10, max_completion_length=10, buffer=0, penalty=2.0) == 0.0
    rows = tree_advantages(mixed_tree(), max_completion_length=3, overlong_buffer=2, overlong_penalty_weight=1.0)
    # Lengths 3, 2, 3: penalties 1, 1/2, 1.
    baseline = (-2.0 - 1.5 + 0.0) / 3
    assert rows[0][-1] == pytest.approx(-2.0 - baseline) and rows[1][-1] == pytest.approx(-1.5 - baseline)
    assert rows[2][0] == pytest.approx(math.tanh(1 / 3) - 1 - baseline)


def test_shared_nodes_can_be_trained_once():
    assert first_appearance(mixed_tree()) == [[1, 1, 1], [1, 1], [0, 1, 1]]
    # The first row is masked, so the shared node is trained in the last row.
    assert first_appearance(mixed_tree(), [False, True, True])[1:] == [[1, 1], [1, 1, 1]]


def test_a_record_is_plain_json_with_outcomes_on_the_scale_of_the_rewards():
    tree = mixed_tree()
    first = tree.nodes[6]._replace(scaled=0.25)
    tree = tree._replace(nodes=(*tree.nodes[:6], first, *tree.nodes[7:]))
    record = tree_record(tree, step=4, index=1, decode=str, reward_weights=[1.0], q_temperature=1.0, q_max=1.0)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["results"] == [6, 7, 9] and record["success_ratio"] == pytest.approx(1 / 3)
    assert record["nodes"][9]["result"] == 2 and record["nodes"][9]["text"] == "[0]"
    assert record["nodes"][1]["credit"] == pytest.approx(math.tanh(1 / 3))
    assert (record["nodes"][6]["outcome"], record["nodes"][6]["worth"]) == (first.outcome, 0.25)


# --------------------------------------------------------------------------------------------------- invariants


@st.composite
def worlds(draw, *selections):
    """Limits, a way of selecting, and a random world in which a prefix decides what follows it."""
    width, depth = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    node_length = draw(st.integers(1, 3))
    limits = Limits(
        num_results=draw(st.integers(1, 6)),
        width=width,
        max_depth=depth,
        node_length=node_length,
        max_completion_length=draw(st.integers(node_length, 12)),
        max_iterations=draw(st.integers(1, 25)),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 60))),
        min_width=draw(st.integers(1, 2)),
        width_decay=draw(st.integers(0, 1)),
        parallel=draw(st.integers(1, 3)),
    )
    return dict(
        limits=limits,
        select_fn=draw(
            st.sampled_from([select, select_uct, partial(select, entropy_weight=0.5, depth_bonus="log"), *selections])
        ),
        seed=draw(st.integers(0, 10**6)),
        end=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        success=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        incomplete=draw(st.sampled_from([-1.0, -0.5, 0.0])),
        num_trees=draw(st.integers(1, 3)),
        skip=draw(st.booleans()),
    )


def grow_world(world, prompts=None, *, graded=False):
    calls = []

    def sample_fn(prefixes, num_samples, budgets):
        calls.append((list(map(tuple, prefixes)), list(num_samples), list(budgets)))
        rows = []
        for prefix, number, budget in zip(prefixes, num_samples, budgets, strict=True):
            rng = random.Random(f"{world['seed']} {prefix} {number}")
            group = []
            for _ in range(number):
                ids = []
                while len(ids) < budget and (not ids or ids[-1] != EOS):
                    ids.append(EOS if rng.random() < world["end"] else rng.randrange(1, 4))
                entropies = [rng.choice([0.1, 0.5, 1.0]) for _ in ids]
                group.append(Continuation(ids, finished=ids[-1] == EOS, entropies=entropies))
            rows.append(group)
        return rows

    def value_fn(leaves):
        assert all(len(leaf.completion_ids) <= world["limits"].max_completion_length for leaf in leaves)
        verdicts = []
        for leaf in leaves:
            drawn = random.Random(f"{world['seed']} {leaf.completion_ids}").random()
            reward = float(drawn < world["success"])
            if graded and reward == 0.0:
                reward = round(0.4 * (1 - drawn), 1)
            outcome = terminal_outcome(
                reward, finished=leaf.finished, success_threshold=1.0, incomplete_score=world["incomplete"]
            )
            verdicts.append(Verdict(outcome, reward=reward if graded else None))
        return verdicts

    prompts = prompts or [[100 + i] for i in range(world["num_trees"])]
    skip = [world["skip"] and i == 0 for i in range(len(prompts))]
    trees = search(prompts, sample_fn, value_fn, limits=world["limits"], select_fn=world["select_fn"], skip=skip)
    return trees, calls


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_values_are_those_of_outcomes_on_the_scale_of_the_whole_tree(world):
    """The scale changes while a tree grows; in the end each value is as if it had been known from the start."""
    for tree in grow_world(world, graded=True)[0]:
        rows = [tree.nodes[row] for row in tree.results]
        scaled = scaled_outcomes([row.reward for row in rows], [row.outcome for row in rows])
        assert [row.worth for row in rows] == (scaled or [row.outcome for row in rows])
        assert is_uniform(tree) == (scaled is None)
        values = [0.0] * len(tree.nodes)
        for row in rows:
            path = tree.path(row.index)
            for step, index in enumerate(path, start=1):
                values[index] = backup_value(values[index], row.worth, step=step, length=len(path), decay_min=0.1)
        assert [node.value for node in tree.nodes] == values


@settings(max_examples=200, deadline=None)
@given(worlds(select_random))
def test_invariants_of_any_search(world):
    torch.manual_seed(world["seed"])
    limits, (trees, calls) = world["limits"], grow_world(world)
    for tree in trees:
        rows = [tree.nodes[row] for row in tree.results]
        searched = [node for node in tree.nodes[1:] if not node.direct]
        assert len(rows) == len(set(tree.results)) == limits.num_results
        assert all(row.terminal for row in rows)
        assert tree.iterations <= limits.max_iterations
        # At most one terminal node is backed up per visit of a node, while the search goes on.
        assert tree.reason != "complete" or len(rows) <= tree.iterations * limits.parallel
        # Nothing that was sampled and scored waits while more is sampled.
        assert not (any(row.direct for row in rows) and tree.candidates)
        if limits.max_tokens is not None:
            assert sum(len(node.token_ids) for node in searched) <= limits.max_tokens
        assert tree.generated_tokens == sum(len(node.token_ids) for node in tree.nodes)
        on_correct_path = {n for row in tree.results if (tree.nodes[row].outcome or 0) > 0 for n in tree.path(row)}
        for node in tree.nodes:
            children = [tree.nodes[child] for child in node.children]
            assert all(child.parent == node.index and child.depth == node.depth + 1 for child in children)
            assert all(node.visits >= child.visits for child in children)
            assert sum(not child.direct for child in children) <= limits.width_at(node.depth)
            assert node.index not in on_correct_path or node.value > 0
            assert not (node.terminal and children) and node.depth <= limits.max_depth
            assert node.direct or len(node.token_ids) <= limits.node_length
            assert EOS not in node.token_ids[:-1] and node.finished == (node.token_ids[-1:] == [EOS])
    # One call per iteration for all trees, one more where rows are missing.
    fillers = any(node.direct for tree in trees for node in tree.nodes)
    assert len(calls) == max(tree.iterations for tree in trees) + fillers


def test_several_nodes_of_a_tree_are_expanded_in_one_call():
    limits = replace(LIMITS, num_results=8, max_depth=9, node_length=1, max_completion_length=9)
    world = dict(select_fn=select, seed=0, end=0.1, success=0.3, incomplete=-1.0, num_trees=4, skip=False)
    calls = {k: grow_world({**world, "limits": replace(limits, parallel=k)})[1] for k in (1, 2, 4)}
    assert len(calls[1]) > 1.5 * len(calls[2]) and len(calls[2]) > 1.2 * len(calls[4])
    assert calls[1][0] == calls[4][0]  # there is only the root


def test_nodes_that_are_visited_now_count_as_failed_for_the_choice_of_others():
    tree = expand(Tree.plant([1]), ROOT, sampled([1], [2]), LIMITS)
    tree = expand(expand(tree, 1, sampled([3], [4]), LIMITS), 2, sampled([5], [6]), LIMITS)
    first = select(tree, LIMITS)
    beside = with_virtual_loss(tree, first)
    second = select(beside, LIMITS)
    assert (tree.nodes[first].parent, tree.nodes[second].parent) == (1, 2)  # another branch, not the sibling
    assert (beside.nodes[1].visits, beside.nodes[1].value) == (tree.nodes[1].visits + 1, tree.nodes[1].value - 1)
    assert select(tree, LIMITS) == first  # the tree itself is as it was


@settings(max_examples=30, deadline=None)
@given(worlds())
def test_the_same_seed_gives_the_same_tree_whatever_grows_beside_it(world):
    world["skip"] = False
    trees, _ = grow_world(world)
    assert grow_world(world)[0] == trees
    assert grow_world(world, [[100]])[0] == trees[:1]

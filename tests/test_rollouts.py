"""Rows and the scripted sampler."""

import math

import pytest

from trl_explore.rows.rollouts import Continuation, Rows, per_request


def make_rows(**changes):
    fields = dict(
        examples=[{"answer": "1"}] * 4,
        prompt_ids=[[5, 6]] * 4,
        completion_ids=[[7, 1], [7, 8, 1], [9], [9, 1]],
        loss_mask=[[0, 1], [0, 1, 1], [1], [1, 1]],
        group_size=2,
    )
    return Rows(**{**fields, **changes})


def test_padding_rows_train_nothing_and_count_as_unscorable():
    padded = make_rows().padded(8, example={"answer": "2"}, token_id=1, num_rewards=3)
    assert len(padded) == 8
    assert padded.loss_mask[4:] == [[0]] * 4 and padded.completion_ids[4:] == [[1]] * 4
    assert padded.known_rewards[:4] == [None] * 4
    assert all(len(r) == 3 and all(math.isnan(x) for x in r) for r in padded.known_rewards[4:])
    assert padded.examples[4] == {"answer": "2"} and padded.examples[4] is not padded.examples[5]


def test_rows_that_disagree_in_number_are_refused():
    with pytest.raises(ValueError, match="prompt_ids"):
        make_rows(prompt_ids=[[5]])
    with pytest.raises(ValueError, match="whole groups of 3"):
        make_rows(group_size=3)


def test_a_number_per_call_or_per_request():
    assert per_request(4, 2, name="n") == [4, 4]
    assert per_request([1, 2], 2, name="n") == [1, 2]
    with pytest.raises(ValueError, match="`n` has 1 entries for 2"):
        per_request([1], 2, name="n")
    with pytest.raises(ValueError, match="at least 1"):
        per_request([1, 0], 2, name="n")


class ScriptedSampler:
    """Replays written continuations: for each prefix, the suffixes to hand out in order, and no more."""

    def __init__(self, script, eos_token_id=0):
        self.script = {prefix: list(suffixes) for prefix, suffixes in script.items()}
        self.eos_token_id = eos_token_id

    def __call__(self, prefixes, num_samples, max_new_tokens):
        counts = per_request(num_samples, len(prefixes), name="num_samples")
        budgets = per_request(max_new_tokens, len(prefixes), name="max_new_tokens")
        groups = []
        for prefix, count, budget in zip(prefixes, counts, budgets, strict=True):
            queue = self.script.get(tuple(prefix), [])
            if len(queue) < count:
                raise ValueError(f"the script holds {len(queue)} suffixes for prefix {prefix}, {count} were asked for")
            suffixes = [queue.pop(0)[:budget] for _ in range(count)]
            groups.append([Continuation(ids, finished=ids[-1] == self.eos_token_id) for ids in suffixes])
        return groups


def test_the_scripted_sampler_hands_out_its_script_once_and_cuts_to_the_budget():
    sampler = ScriptedSampler({(1,): [[2, 3, 0], [4, 0], [5, 5]], (2,): [[6, 0]]})
    groups = sampler([[1], [2]], [2, 1], [2, 5])
    assert [[c.token_ids for c in group] for group in groups] == [[[2, 3], [4, 0]], [[6, 0]]]
    assert [[c.finished for c in group] for group in groups] == [[False, True], [True]]
    assert sampler([[1]], 1, 9)[0][0].token_ids == [5, 5]
    with pytest.raises(ValueError, match="holds 0 suffixes"):
        sampler([[1]], 1, 9)

"""Hints and replay: which completions replace a row of a failed group, their credit, their loss, and errors."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from test_serving import Local
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    differ,
    make_dataset,
    make_tokenizer,
    make_trainer,
    never,
    one_batch,
    parameters,
    text_of,
    trained,
)

from trl_explore.auto.hints import read_hints
from trl_explore.auto.joined import joined_advantages
from trl_explore.auto.replay import SuccessStore
from trl_explore.rows.rollouts import Continuation
from trl_explore.rows.streams import loss_mask, row_tokens
from trl_explore.sampling.sampler import Sampler
from trl_explore.serving import backend as vllm_backend
from trl_explore.trainers import (
    AutoExploreConfig,
    AutoExploreTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
)

OURS = ExplorationTrainer, ExplorationConfig
AUTO = AutoExploreTrainer, AutoExploreConfig
TOKENIZER = make_tokenizer()
GROUP = 4


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def texts(ids):
    return [TOKENIZER.decode(row, skip_special_tokens=True) for row in ids]


def grpo(rewards, scale=True):
    """GRPO's advantages of one group, by its formula."""
    mean = sum(rewards) / len(rewards)
    if not scale:
        return [reward - mean for reward in rewards]
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


# ---------------------------------------------------------------------------------------------- the joined advantages

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=2, max_size=6)


@given(REWARDS, st.integers(1, 6), st.booleans())
def test_new_rows_take_the_place_of_the_first_rows_of_their_group(main, number, scaled):
    number = min(number, len(main))
    args = ExplorationConfig("out", use_cpu=True, scale_rewards="group" if scaled else "none")
    kept, new = joined_advantages(args, [(reward, reward) for reward in main], [(1.0, 1.0)] * number)
    expected = grpo([1.0] * number + main[number:], scaled)
    if number == len(main):
        expected = [0.0] * number
    assert kept[:number] == [0.0] * number
    assert new + kept[number:] == pytest.approx(expected, abs=1e-4)


def test_rows_without_a_reward_do_not_count():
    args = ExplorationConfig("out", use_cpu=True)
    kept, new = joined_advantages(args, [(0.0, 0.0), (math.nan, math.nan), (0.0, 0.0)], [(1.0, 1.0)])
    assert kept == [0.0, 0.0, pytest.approx(-new[0])] and new[0] == pytest.approx(grpo([1.0, 0.0])[0], abs=1e-4)


def test_the_group_is_credited_by_the_field_advantage():
    def advantages(name):
        args = ExplorationConfig("out", use_cpu=True, advantage=name, passk_k=2)
        kept, new = joined_advantages(args, [(0.0, 0.0)] * 4, [(1.0, 1.0)])
        assert kept[0] == 0.0
        return new + kept[1:]

    # One success of four: its reward over the mean is 4.
    assert advantages("maxrl") == pytest.approx([3.0, -1.0, -1.0, -1.0], abs=1e-3)
    assert advantages("unlikeliness") == pytest.approx(grpo([1.0, 0.0, 0.0, 0.0]), abs=1e-3)
    # The sign and the zero sum are what matters here; the formula has tests of its own.
    new, *kept = advantages("passk")
    assert new > 0 > kept[0] == kept[1] == kept[2] and new + sum(kept) == pytest.approx(0, abs=1e-5)


# -------------------------------------------------------------------------------------------------------------- hints


def hint_data(hints, column="hint", conversational=False):
    """The sums of the small world, with hints."""
    data = make_dataset(conversational)
    values = [hints[i % len(hints)] for i in range(len(data))]
    return data.add_column(column, values)


class Told:
    """
    Stands for a model that does what a hint says, and fails otherwise.

    It notes the prefixes of extra samples. A prefix that has `b` in it is continued by `bc`, a success. Any other one
    by `aa`, a failure.
    """

    def __init__(self):
        self.asked = []

    def __call__(self, sampler, prefixes, num_samples, max_new_tokens, begun=None, **options):
        self.asked.append((texts(prefixes), num_samples, max_new_tokens, begun))
        found = []
        for prefix in prefixes:
            said = tokens("bc" if tokens("b")[0] in prefix else "aa")
            found.append([Continuation([*said, 1]) for _ in range(num_samples)])
        return found


def has_c(completions, **columns):
    """Only completions with a `c` succeed."""
    return [float("c" in text_of(completion)) for completion in completions]


@pytest.fixture
def told(monkeypatch):
    """Plain completions are `aa`, and hints are followed."""
    model = Told()
    monkeypatch.setattr(Sampler, "__call__", lambda sampler, *args, **options: model(sampler, *args, **options))

    def plain(trainer, prompt_ids, *others, **options):
        return [[*tokens("aa"), 1] for _ in prompt_ids], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", plain)
    return model


def hinted(folder, hints, *, explore="hints", conversational=False, own=None, **options):
    own = {"hint_samples": 2, **(own or {})}
    data = hint_data(hints, own.get("hint_column", "hint"), conversational)
    options = dict(train_dataset=data, reward_funcs=has_c, explorer_options={"hints": own}) | options
    return make_trainer(*OURS, folder, explore=explore, max_completion_length=8, **options)


def test_a_hint_makes_a_failed_prompt_solvable_and_replaces_one_row(told, tmp_path):
    trainer = hinted(tmp_path, ["b"])
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    assert texts(found.branches.rows.completion_ids) == ["bc", "bc"] and found.scored.rewards.tolist() == [1.0, 1.0]
    # Each group: the first row is replaced, the others have GRPO's advantages over the group with the success.
    expected = grpo([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(output["advantages"], torch.tensor([0.0, *expected[1:]] * 2), atol=1e-4, rtol=0)
    prompts, _ = row_tokens(found.scored.rows)
    assert texts(prompts) == texts(found.branches.rows.prompt_ids) and all("b" not in text for text in texts(prompts))
    assert [parent // GROUP for parent in found.branches.rows.parents] == [0, 1]
    assert trainer.branch_explorer.estimates.sums["hints"].contrast == 2.0
    metrics = trainer._metrics["train"]
    assert metrics["hints/solved_fraction"] == [1.0] and metrics["hints/mean_level"] == [0.0]
    assert metrics["explore/solved/hints"] == [1.0] and metrics["explore/share/hints"] == [1.0]
    # The samples of failed prompts, and no others, are the cost: two prompts, two samples, three tokens.
    assert len(told.asked) == 1


def test_the_weakest_sufficient_hint_is_used_and_the_stronger_ones_are_not_asked(told, tmp_path):
    trainer = hinted(tmp_path, [["d", "e", "bb", "bbb"]])
    one_batch(trainer)
    (found,) = trainer.branching.results
    assert len(found.branches.rows) == 2
    shown = [prefix for asked, *_ in told.asked for prefix in asked]
    assert [text[-2:].strip() for text in shown] == ["d", "d", "e", "e", "bb", "bb"]
    assert trainer._metrics["train"]["hints/mean_level"] == [2.0]

    trainer = hinted(tmp_path, ["d"])  # a hint that does not help changes nothing
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.scored is None and not output["advantages"].any() and found.num_prompts == 2
    assert trainer._metrics["train"]["hints/solved_fraction"] == [0.0]
    assert "hints/mean_level" not in trainer._metrics["train"]


def test_solved_prompts_and_prompts_without_a_hint_are_not_explored(told, tmp_path):
    trainer = hinted(tmp_path, ["b"], reward_funcs=always)
    one_batch(trainer)
    assert trainer.branching.results == [] and told.asked == []

    data = Dataset.from_dict({"prompt": ["1+1=", "2+2="], "hint": ["b", None]})
    trainer = hinted(tmp_path, ["b"], train_dataset=data)
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.num_prompts == 1 and len(found.branches.rows) == 1
    (text,) = texts(found.branches.rows.prompt_ids)
    assert "1+1=" in text
    groups = output["advantages"].view(2, GROUP)
    assert groups.any(dim=1).tolist() == ["1+1=" in text for text in texts(row_tokens(output)[0])[::GROUP]]


@pytest.mark.parametrize("number", [2, 4])
def test_several_rows_are_replaced_if_so_many_succeed(told, tmp_path, number):
    trainer = hinted(tmp_path, ["b"], own=dict(hint_rows=number, hint_samples=3))
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    replaced = min(number, 3)
    assert len(found.branches.rows) == 2 * replaced
    expected = grpo([1.0] * replaced + [0.0] * (GROUP - replaced))
    main = torch.tensor([0.0] * replaced + expected[replaced:])
    torch.testing.assert_close(output["advantages"], main.repeat(2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("conversational", [False, True])
def test_with_the_hinted_loss_a_row_is_trained_under_the_prompt_with_the_hint(told, tmp_path, conversational):
    """The template and the column are those of the options. In a conversation, the hint is in the last message."""
    own = dict(hint_loss="hinted", hint_column="clue", hint_template="{problem};{hint}")
    trainer = hinted(tmp_path, ["b"], own=own, conversational=conversational)
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    prompts, completions = row_tokens(found.scored.rows)
    assert texts(prompts) == told.asked[0][0] and texts(completions) == ["bc", "bc"]
    assert all(text.endswith("=;b") for text in texts(prompts))
    expected = grpo([1.0, 0.0, 0.0, 0.0])[0]
    assert found.scored.rows["advantages"].tolist() == pytest.approx([expected] * 2, abs=1e-4)
    assert output["advantages"].dim() == 1


@pytest.mark.parametrize("cap", [1.0, 1e9])
def test_with_the_plain_loss_the_ratio_of_each_token_is_capped(told, tmp_path, cap):
    template = "{problem};{hint}"
    trainer = hinted(tmp_path, ["b"], own=dict(hint_ratio_cap=cap, hint_template=template))
    one_batch(trainer)
    (found,) = trainer.branching.results
    rows, advantage = found.branches.rows, grpo([1.0, 0.0, 0.0, 0.0])[0]
    ratios = []
    for prompt, ids, context in zip(rows.prompt_ids, rows.completion_ids, told.asked[0][0], strict=True):
        own = logprobs(trainer.model, prompt, ids)
        shown = logprobs(trainer.model, tokens(context), ids)
        ratios.append((own - shown).exp())
    expected = torch.stack(ratios)
    assert (expected > 1).any() and (expected < 1).any()  # otherwise a cap of 1 is not tested
    found_ratios = found.scored.rows["advantages"] / advantage
    torch.testing.assert_close(found_ratios, expected.clamp(max=cap), rtol=1e-3, atol=1e-3)


def logprobs(model, prompt, ids):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_shares_of_a_solution_are_shown_and_not_trained(told, tmp_path):
    """The solution has six tokens. The first share without `b` fails, and the second one succeeds."""
    own = dict(hint_fractions=[0.3, 0.5, 0.9])
    trainer = hinted(tmp_path, ["ddbddd"], own=own)
    output = one_batch(trainer)
    calls = [call for call in told.asked if call[0]]  # a process without prompts calls the sampler, too
    assert [asked[0].split("=")[1] for asked, *_ in calls] == ["dd", "ddb"]
    assert [(budgets, begun) for *_, budgets, begun in calls] == [([6, 6], [2, 2]), ([5, 5], [3, 3])]
    (found,) = trainer.branching.results
    prompts, completions = row_tokens(found.scored.rows)
    assert texts(completions) == ["ddbbc"] * 2 and all(text.endswith("=") for text in texts(prompts))
    assert loss_mask(found.scored.rows).tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    # They were sampled behind the tokens with which they are trained, so there is no ratio.
    assert found.scored.rows["advantages"].tolist() == pytest.approx([grpo([1.0, 0, 0, 0])[0]] * 2, abs=1e-4)
    assert output["advantages"].dim() == 1
    assert trainer._metrics["train"]["hints/mean_level"] == [1.0]


def test_shares_leave_room_for_a_token_and_are_not_shown_twice(told, tmp_path):
    own = dict(hint_fractions=[0.1, 0.2, 0.99])
    trainer = hinted(tmp_path, ["ddddddddddddd"], own=own)  # longer than a completion
    one_batch(trainer)
    assert [begun[0] for *_, begun in told.asked] == [2, 3, 7]
    assert [budgets[0] for *_, budgets, begun in told.asked] == [6, 5, 1]
    # All shares of two tokens show one token, and a solution of one token shows none.
    for solution, number in (("dd", 1), ("d", 0)):
        told.asked.clear()
        trainer = hinted(tmp_path, [solution], own=own)
        one_batch(trainer)
        assert [begun for *_, begun in told.asked] == [[1, 1]] * number
        assert len(trainer.branching.results) == number


@pytest.mark.parametrize("own", [{}, dict(hint_loss="hinted"), dict(hint_fractions=[0.5])], ids=str)
def test_a_run_with_hints_learns_what_plain_samples_never_show(told, tmp_path, own):
    fields = dict(log_completions=True, drop_zero_advantage=True, scale_rewards="none", beta=0.1) if own else {}
    trainer = hinted(tmp_path, ["bb"], own=dict(own, hint_ratio_cap=4.0), max_steps=8, **fields)
    start, prompt = parameters(trainer), tokens("1+1=")
    before = logprobs(trainer.model, prompt, tokens("bbc"))
    trainer.train()
    after = logprobs(trainer.model, prompt, tokens("bbc"))
    if own.get("hint_loss") != "hinted":
        assert after[-1] > before[-1] + 0.1
    assert differ(start, parameters(trainer))
    assert all(entry["explore/solved/hints"] == 1.0 for entry in trainer.state.log_history[:-1])


@pytest.mark.parametrize("kind", ["filter", "refill"])
def test_a_failed_group_that_a_hint_solves_is_not_removed(told, tmp_path, kind):
    """The failed rows are the negative half of the credit."""
    expected = hinted(tmp_path, ["b"], max_steps=2)
    expected.train()
    trainer = hinted(tmp_path, ["b"], max_steps=2, dynamic_sampling=kind)
    trainer.train()
    assert_same(parameters(trainer), parameters(expected))
    assert trainer.state.log_history[0]["selection/kept_groups"] == 1.0


def test_real_hints_are_sampled_with_the_model(tmp_path):
    """Without stand-ins: every completion of the right first token succeeds."""

    def begins(completions, **columns):
        return [float(completion.startswith("a")) for completion in completions]

    own = dict(hint_fractions=[0.5], hint_samples=2)
    trainer = hinted(tmp_path, ["ab"], own=own, reward_funcs=begins, save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    solved = [entry["explore/solved/hints"] for entry in trainer.state.log_history if "explore/solved/hints" in entry]
    assert solved and set(solved) == {1.0}
    again = hinted(tmp_path, ["ab"], own=own, reward_funcs=begins, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(trainer))


MANY = dict(hint_samples=16)
SHORT_SKETCHES = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    solve_template="{problem};{sketch}",
)
SERVED = {
    "hints": dict(explore="hints", explorer_options=dict(hints=MANY)),
    "the hinted loss": dict(explore="hints", explorer_options=dict(hints=dict(MANY, hint_loss="hinted"))),
    "shares of a solution": dict(explore="hints", explorer_options=dict(hints=dict(MANY, hint_fractions=[0.5]))),
    "replay": dict(explore="replay", train_dataset=make_dataset().select(range(2)), max_steps=12),
    "sketches": dict(explorers=["sketches"], explorer_options=dict(sketches=SHORT_SKETCHES)),
}


@pytest.mark.parametrize("case", SERVED)
def test_with_vllm_a_row_is_corrected_only_for_the_policy_that_sampled_it(tmp_path, monkeypatch, case):
    """The sampler is the model in training, so that every ratio to it is 1."""
    monkeypatch.setattr(vllm_backend, "ServedGeneration", Local)

    def some(completion_ids, **columns):
        return [float(sum(ids) % 7 == 0) for ids in completion_ids]

    options = dict(explore_min_share=1.0, train_dataset=hint_data(["bb"]), max_steps=6) | SERVED[case]
    cls, config = OURS if "explore" in options else AUTO
    trainer = make_trainer(cls, config, tmp_path, reward_funcs=some, use_vllm=True, vllm_mode="server", **options)
    before = parameters(trainer)
    trainer.train()
    assert differ(before, parameters(trainer))
    stream = f"explored_{options.get('explore', 'sketches')}"
    log = [entry for entry in trainer.state.log_history if f"{stream}/reward" in entry]
    assert log
    for entry in log:
        ratios = [value for name, value in entry.items() if "importance_sampling_ratio" in name]
        assert ratios and all(abs(ratio - 1) < 1e-4 for ratio in ratios)
        assert all(value == value for name, value in entry.items() if "sampling_logp" not in name)


@pytest.mark.parametrize("explore", ["hints", "replay"])
def test_exploring_does_not_change_what_grpo_samples_next(tmp_path, explore):
    sampled = []
    for cls, config, own in ((GRPOTrainer, GRPOConfig, {}), (*OURS, dict(explore=explore))):
        seen = []

        def noted(completion_ids, seen=seen, **columns):
            seen.append(completion_ids)
            return [float(sum(ids) % 5 == 0) for ids in completion_ids]

        data = hint_data(["bb"]).select(range(2))
        options = dict(reward_funcs=noted, train_dataset=data, learning_rate=0.0, max_steps=6)
        make_trainer(cls, config, tmp_path, **options, **own).train()
        sampled.append(seen)
    plain, explored = sampled
    assert len(explored) > len(plain) == 6
    assert [batch for batch in explored if batch in plain] == plain


# ------------------------------------------------------------------------------------------------------------- replay


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=40), st.integers(1, 9), st.integers(1, 4))
def test_the_store_is_bounded_and_keeps_the_newest(added, size, per_prompt):
    store = SuccessStore(size=size, per_prompt=per_prompt)
    model = []  # (prompt, completion), by the time at which it was stored
    for prompt, completion in added:
        before = [*model]
        store.add((prompt,), [completion], [0.0])
        if (prompt, completion) not in before:
            model.append((prompt, completion))
            own = [one for one in model if one[0] == prompt]
            if len(own) > per_prompt:
                model.remove(own[0])
            while len(model) > size:  # the prompt whose newest completion is oldest makes room
                newest = {}
                for place, (owner, _) in enumerate(model):
                    newest[owner] = place
                oldest = min(newest, key=newest.get)
                model.remove(next(one for one in model if one[0] == oldest))
        assert len(store) == len(model) <= size
        for owner in range(5):
            own = [[number] for name, number in model if name == owner]
            assert [ids for ids, _ in store.newest((owner,), 9, longest=8)] == own[::-1]


def test_the_newest_completions_that_fit_are_replayed():
    store = SuccessStore(size=10, per_prompt=4)
    for ids in ([1], [2, 2], [3, 3, 3]):
        store.add((7,), ids, [0.0] * len(ids))
    assert [ids for ids, _ in store.newest((7,), 2, longest=3)] == [[3, 3, 3], [2, 2]]
    assert [ids for ids, _ in store.newest((7,), 2, longest=2)] == [[2, 2], [1]]
    assert store.newest((8,), 2, longest=3) == []


class Remembered:
    """The first row of each group succeeds, unless it is told to fail; what succeeded before succeeds again."""

    __name__ = "remembered"

    def __init__(self):
        self.fails, self.right = False, set()

    def __call__(self, completion_ids, prompts, **columns):
        found = []
        for i, (ids, prompt) in enumerate(zip(completion_ids, prompts, strict=True)):
            key = prompt, tuple(ids)
            if not self.fails and i % GROUP == 0:
                self.right.add(key)
            found.append(float(key in self.right))
        return found


def replayed(folder, reward, *, explore="replay", own=None, **options):
    options = {"train_dataset": make_dataset().select(range(2)), "explorer_options": {"replay": own or {}}, **options}
    return make_trainer(*OURS, folder, explore=explore, reward_funcs=reward, **options)


@pytest.mark.parametrize(("cap", "number"), [(1.0, 1), (1e9, 2)])
def test_an_unsolved_prompt_trains_its_stored_success(tmp_path, cap, number):
    reward = Remembered()
    trainer = replayed(tmp_path, reward, own=dict(replay_ratio_cap=cap, replay_rows=number))
    rounds = number + 1  # so many successes of each prompt
    for _ in range(rounds):
        one_batch(trainer)
        assert trainer.branching.results == []
    store = trainer.branch_explorer.explorers["replay"].store
    stored = {prompt: [*kept] for prompt, kept in store.stored.items()}
    assert len(stored) == 2 and len(store) == sum(map(len, stored.values())) >= 2
    for prompt, kept in stored.items():
        for ids, before in kept:
            assert before == pytest.approx(logprobs(trainer.model, [*prompt], ids).tolist(), abs=1e-4)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # other probabilities than those of the stored completions
            parameter += 0.3 * torch.randn_like(parameter)
    reward.fails = True
    count = trainer.sample.tokens.own
    output = one_batch(trainer)
    main_tokens = sum(map(len, trainer.main_completion_ids))
    assert trainer.sample.tokens.own - count == main_tokens
    (found,) = trainer.branching.results
    assert found.num_tokens == 0 and found.num_prompts == 2
    rows, ratios, place = found.branches.rows, [], 0
    expected_main = []
    for group in range(2):
        prompt = trainer.branch_explorer.forks.trajectories[group * GROUP].prompt_ids
        newest = stored[tuple(prompt)][::-1][:number]
        values = grpo([1.0] * len(newest) + [0.0] * (GROUP - len(newest)))
        expected_main += [0.0] * len(newest) + values[len(newest) :]
        for ids, before in newest:
            assert rows.completion_ids[place] == ids and rows.prompt_ids[place] == prompt
            ratio = (logprobs(trainer.model, prompt, ids) - torch.tensor(before)).exp()
            ratios.append(ratio)
            credited = found.scored.rows["advantages"][place, : len(ids)]
            torch.testing.assert_close(credited, values[0] * ratio.clamp(max=cap), rtol=1e-3, atol=1e-3)
            place += 1
    assert place == len(rows) and output["advantages"].tolist() == pytest.approx(expected_main, abs=1e-4)
    assert (torch.cat(ratios) > 1).any()  # otherwise the cap is not tested
    # No token was generated. Training the stored ones is what replay costs.
    sums = trainer.branch_explorer.estimates.sums["replay"]
    assert sums.tokens == sum(map(len, rows.completion_ids)) and sums.contrast == 2.0
    assert trainer._metrics["train"]["explore/solved/replay"] == [1.0]
    assert trainer._metrics["train"]["explore/sampled_tokens/replay"] == [0.0]


def test_prompts_without_a_stored_success_are_not_explored(tmp_path):
    trainer = replayed(tmp_path, never)
    one_batch(trainer)
    assert trainer.branching.results == [] and trainer._metrics["train"]["replay/stored"] == [0.0]
    found, _ = trained(*OURS, tmp_path, explore="replay", reward_funcs=never)
    assert_same(found, trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=never)[0])


def test_a_stored_success_that_now_fails_gives_no_credit(tmp_path):
    reward = Remembered()
    trainer = replayed(tmp_path, reward)
    one_batch(trainer)
    reward.fails = True
    reward.right.clear()
    output = one_batch(trainer)
    (found,) = trainer.branching.results
    assert not output["advantages"].any() and not found.scored.rows["advantages"].any()
    assert trainer.branch_explorer.estimates.sums["replay"].contrast == 0


def test_successes_are_stored_while_other_explorers_work(tmp_path):
    reward = Remembered()
    options = dict(explorers=["resample", "replay"], explore_min_share=1.0)
    trainer = replayed(tmp_path, reward, explore="auto", **options)
    one_batch(trainer)
    store = trainer.branch_explorer.explorers["replay"].store
    assert len(store) == 2
    reward.fails = True
    used = set()
    for _ in range(12):
        one_batch(trainer)
        used |= {found.explorer.name for found in trainer.branching.results}
    assert used == {"resample", "replay"} and len(store) == 2


def test_the_store_is_restored_and_a_resumed_run_is_exact(tmp_path):
    def some(completion_ids, **columns):
        return [float(sum(ids) % 7 == 0) for ids in completion_ids]

    options = dict(max_steps=8, own=dict(replay_size=3, replay_per_prompt=2))
    whole = replayed(tmp_path, some, save_strategy="steps", save_steps=4, **options)
    whole.train()
    store = whole.branch_explorer.explorers["replay"].store
    assert 0 < len(store) <= 3 and any("explored_replay/reward" in entry for entry in whole.state.log_history)
    again = replayed(tmp_path, some, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(parameters(again), parameters(whole))
    state = whole.branch_explorer.state_dict()
    torch.testing.assert_close(again.branch_explorer.state_dict(), state, rtol=0, atol=0)


def test_a_large_store_is_a_few_tensors_in_a_checkpoint():
    store = SuccessStore(size=100, per_prompt=4)
    for prompt, ids in (((1,), [5, 6]), ((2, 3), []), ((1,), [7]), ((2, 3), [8, 9, 10])):
        store.add(prompt, ids, [-0.5] * len(ids))
    state = store.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    again = SuccessStore(size=100, per_prompt=4)
    again.load_state_dict(state)
    assert again.stored == store.stored and [*again.stored] == [*store.stored]
    again.load_state_dict(SuccessStore(size=1, per_prompt=1).state_dict())
    assert again.stored == {}


def only_truncated(completion_ids, **columns):
    return [float(ids[-1] != 1 and sum(ids) % 3 == 0) for ids in completion_ids]


@pytest.mark.parametrize("explore", ["hints", "replay"])
def test_a_success_that_trl_masks_replaces_no_row(tmp_path, explore):
    """Otherwise the failed rows of its group would be pushed down, and no row up."""
    options = dict(train_dataset=hint_data(["a"]).select(range(4)), reward_funcs=only_truncated, max_steps=6)
    found = []
    for masks in (True, False):
        trainer = make_trainer(*OURS, tmp_path, explore=explore, mask_truncated_completions=masks, **options)
        trainer.train()
        found.append(any(f"explored_{explore}/reward" in entry for entry in trainer.state.log_history))
    assert found == [False, True]


def test_a_hinted_completion_that_ends_with_padding_is_trained_as_in_trl(told, monkeypatch, tmp_path):
    ids = [*tokens("bc"), 0]
    answer = Continuation(ids, finished=False)
    monkeypatch.setattr(Sampler, "__call__", lambda sampler, prefixes, *args, **options: [[answer] for _ in prefixes])
    trainer = hinted(tmp_path, ["b"], own={"hint_samples": 1}, mask_truncated_completions=True)
    one_batch(trainer)
    (found,) = trainer.branching.results
    assert found.branches.rows.completion_ids == [ids, ids]
    assert found.scored.rows["completion_mask"].sum(dim=1).tolist() == [3, 3]


@pytest.mark.parametrize("method", [OURS, (G2RLTrainer, G2RLConfig)], ids=["grpo", "g2rl"])
def test_replay_can_begin_in_the_middle_of_a_run(tmp_path, method):
    """A checkpoint without an explorer is resumed with `explore`, also by a method that changes credit."""
    options = dict(reward_funcs=Remembered())
    make_trainer(*method, tmp_path, save_strategy="steps", save_steps=2, max_steps=2, **options).train()
    trainer = make_trainer(*method, tmp_path, explore="replay", max_steps=4, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4 and trainer.branch_explorer.num_batches == 2
    assert len(trainer.branch_explorer.explorers["replay"].store) > 0


def test_a_budget_of_rows_is_one_clear_error(tmp_path):
    with pytest.raises(
        ValueError, match="`budget='vip'` .* `explore='replay'` compares groups of one size: leave one"
    ):
        make_trainer(*OURS, tmp_path, explore="replay", budget="vip")


def test_other_data_need_hints_too(tmp_path, told):
    trainer = hinted(tmp_path, ["b"], max_steps=1)
    trainer.train()
    trainer.train_dataset = make_dataset()
    with pytest.raises(ValueError, match="`hint_column='hint'` is no column of the data"):
        trainer.train()


def test_other_data_empty_the_store(tmp_path):
    trainer = replayed(tmp_path, Remembered())
    one_batch(trainer)
    trainer.forget_data()
    assert len(trainer.branch_explorer.explorers["replay"].store) == 0


# ------------------------------------------------------------------------------------------------------------- errors

BAD_HINTS = {
    "rows": (dict(hint_rows=0), "`hint_rows=0` must be at least 1"),
    "more rows than a group": (dict(hint_rows=5), "`hint_rows=5` is more than `num_generations=4`"),
    "samples": (dict(hint_samples=0), "`hint_samples=0` must be at least 1"),
    "samples of the wrong type": (dict(hint_samples="4"), "`hint_samples='4'` has the wrong type: .* `int`"),
    "loss": (dict(hint_loss="plane"), "`hint_loss`: unknown value 'plane'; did you mean 'plain'"),
    "cap": (dict(hint_ratio_cap=0.0), "`hint_ratio_cap=0.0` must be a positive number"),
    "no slot": (dict(hint_template="{problem}"), r"`hint_template='{problem}'` must contain {hint}"),
    "order of shares": (dict(hint_fractions=[0.5, 0.25]), "must be ascending shares between 0 and 1"),
    "a whole solution": (dict(hint_fractions=[0.5, 1.0]), "must be ascending shares between 0 and 1"),
    "texts as shares": (dict(hint_fractions=["a"]), r"`hint_fractions=\['a'\]` must be ascending shares"),
    "no shares": (dict(hint_fractions=[]), r"`hint_fractions=\[\]` must be ascending shares"),
    "an unknown field": (dict(hint_colum="h"), "unknown field 'hint_colum'; did you mean 'hint_column'"),
    "a missing column": (
        dict(hint_column="clue"),
        "`hint_column='clue'` is no column of the data, which has prompt, answer, hint: .*`explorer_options",
    ),
}


BAD_REPLAY = {
    "rows": (dict(replay_rows=0), "`replay_rows=0` must be at least 1"),
    "more rows than a group": (dict(replay_rows=5), "`replay_rows=5` is more than `num_generations=4`"),
    "size": (dict(replay_size=0), "`replay_size=0` must be at least 1"),
    "of a prompt": (dict(replay_per_prompt=0), "`replay_per_prompt=0` must be at least 1"),
    "cap": (dict(replay_ratio_cap=-1.0), "`replay_ratio_cap=-1.0` must be a positive number"),
}


@pytest.mark.parametrize(
    ("explorer", "own", "message"),
    [*(("hints", *case) for case in BAD_HINTS.values()), *(("replay", *case) for case in BAD_REPLAY.values())],
)
def test_wrong_options_of_hints_and_replay_are_one_clear_error(tmp_path, explorer, own, message):
    options = dict(explorer_options={explorer: own}, train_dataset=hint_data(["b"]), model="there-is/no-such-model")
    for explore in (dict(explore=explorer), dict(explore="auto", explorers=["tree", explorer])):
        with pytest.raises(ValueError, match=message):
            make_trainer(*OURS, tmp_path, **explore, **options)


COLUMNS = {
    "numbers": ([3], "`hint_column='hint'` must hold a text or a list of texts.*one row has '3'"),
    "lists of numbers": ([[1, 2]], r"one row has '\[1, 2\]'"),
    "nothing": ([""], "`hint_column='hint'` has no hint in the first 36 rows"),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_without_hints_is_one_clear_error(tmp_path, case):
    values, message = COLUMNS[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(*OURS, tmp_path, explore="hints", train_dataset=hint_data(values))


def test_a_column_that_trl_takes_away_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="`hint_column='hint'` cannot be read with `remove_unused_columns=True`"):
        hinted(tmp_path, ["b"], remove_unused_columns=True)


def test_hints_of_a_stream_are_checked_when_they_are_read(tmp_path, told):
    stream = hint_data(["b"]).to_iterable_dataset()
    trainer = hinted(tmp_path, ["b"], train_dataset=stream, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["explore/solved/hints"] == 1.0
    trainer = hinted(tmp_path, ["b"], train_dataset=hint_data([3]).to_iterable_dataset(), max_steps=1)
    with pytest.raises(ValueError, match="must hold a text or a list of texts"):
        trainer.train()


def test_hints_are_a_text_or_texts():
    assert read_hints(None, "hint") == read_hints("", "hint") == read_hints([], "hint") == []
    assert read_hints("b", "hint") == read_hints(("b",), "hint") == ["b"]
    assert read_hints(["b", "", None, "c"], "hint") == read_hints(np.array(["b", "c"]), "hint") == ["b", "c"]

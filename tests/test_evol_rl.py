"""EVOL-RL: votes, novelty and bands by hand, reductions to GRPO, what is shaped and logged, its errors."""

import json
import math
import sys
import warnings

import pytest
import torch
from commands import run_example
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer
from world import (
    assert_same,
    contains_answer,
    differ,
    make_trainer,
    one_batch,
    parameters,
    saved_model,
    says,
    some_letter,
    trained,
)

from trl_explore.label_free.embedding import make_embedder, reasoning
from trl_explore.label_free.novelty import band_rewards, novelties, shuffled_in_classes, similarities
from trl_explore.label_free.vote import majority_answer
from trl_explore.rewards import answered_reward
from trl_explore.rewards.answers import answer_key
from trl_explore.trainers import EvolRLConfig, EvolRLTrainer

NAN = math.nan
JUDGED = dict(embedding_model="ngrams", correctness="reward")
VOTED = dict(embedding_model="ngrams")


def test_the_majority_is_the_answer_of_most_rows_and_the_earliest_of_equals():
    assert majority_answer(["7", "3", "7", None]) == "7"
    assert majority_answer(["3", "7", "7", "3"]) == "3"
    assert majority_answer([None, None, "5"]) == "5"
    assert majority_answer([None, None]) is None


def symmetric(pairs, size):
    matrix = torch.eye(size, dtype=torch.float64)
    for (i, j), value in pairs.items():
        matrix[i - 1, j - 1] = matrix[j - 1, i - 1] = value
    return matrix


def test_novelty_and_rewards_of_three_right_rows_and_a_wrong_one():
    """Of row 1: mean similarity to its class 0.7, largest 0.9, so 0.2; then 0.25 and 0.5, from 0.5 to 1."""
    similarity = symmetric({(1, 2): 0.9, (1, 3): 0.5, (2, 3): 0.3, (1, 4): 0.2, (2, 4): 0.4, (3, 4): 0.6}, 4)
    right = [True, True, True, False]
    found = novelties(similarity, right)
    assert found[:3] == pytest.approx([0.2, 0.25, 0.5])
    assert found[3] == pytest.approx(1 - 0.5 * 0.4 - 0.5 * 0.6)  # alone in its class: compared with all
    assert band_rewards(found, right, width=0.5) == pytest.approx([0.5, 0.5 + 0.5 / 6, 1.0, -0.5])


def test_bands_at_their_edges():
    assert band_rewards([0.3], [True], width=0.5) == [1.0]
    assert band_rewards([0.3], [False], width=0.5) == [-0.5]
    assert band_rewards([0.3, 0.3, 0.3, 0.3], [True, True, False, False], width=0.5) == [0.75, 0.75, -0.75, -0.75]
    assert band_rewards([NAN, 0.1, 0.4], [False, True, True], width=0.5) == [-1.0, 0.5, 1.0]
    assert band_rewards([0.1, 0.4, 0.2], [True, True, False], width=0.0) == [1.0, 1.0, -1.0]
    assert band_rewards([NAN] * 3, [False] * 3, width=0.5) == [-1.0] * 3


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=8), st.floats(0, 0.9))
def test_right_rows_are_above_wrong_ones_and_the_more_novel_are_higher(rows, width):
    novelty, right = [value for value, _ in rows], [own for _, own in rows]
    found = band_rewards(novelty, right, width=width)
    for i, (own, reward) in enumerate(zip(right, found, strict=True)):
        low, high = (1 - width, 1.0) if own else (-1.0, -1 + width)
        assert low - 1e-9 <= reward <= high + 1e-9
        for j in range(len(rows)):
            if right[j] == own and novelty[j] > novelty[i] + 1e-6:
                assert found[j] >= reward - 1e-9


def test_similarity_is_the_cosine_cut_at_zero():
    found = similarities(torch.tensor([[1.0, 0.0], [2.0, 2.0], [-1.0, 0.0], [0.0, 0.0]]))
    expected = torch.tensor([[1.0, 0.5**0.5, 0, 0], [0.5**0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(found, expected.double())


def test_the_control_keeps_the_scores_of_each_class():
    novelty, right = [0.1, 0.2, NAN, 0.3, 0.4, 0.5], [True, True, False, True, False, False]
    mixed = shuffled_in_classes(novelty, right, generator=torch.Generator().manual_seed(1))
    assert sorted(mixed[i] for i in (0, 1, 3)) == [0.1, 0.2, 0.3] and sorted(mixed[i] for i in (4, 5)) == [0.4, 0.5]
    assert math.isnan(mixed[2]) and mixed != novelty


def test_what_is_compared_stands_behind_the_thoughts():
    assert reasoning("<think>long</think> the answer is 4") == "the answer is 4"
    assert reasoning("no thoughts") == "no thoughts"
    assert reasoning("never ended </think> ") == "never ended </think> "


def test_counts_of_characters_tell_alike_from_different():
    embed = make_embedder("ngrams", device="cpu", batch_size=2)
    found = similarities(embed(["add two and two", "add two and three", "zzzzzz", ""]))
    assert found[0, 1] > 0.5 > found[0, 2] and not found[3].any()


def test_a_model_of_sentence_transformers_is_asked(sentence_model):
    embed = make_embedder(sentence_model, device="cpu", batch_size=2)
    found = embed(["one text", "another text", "one text"])
    assert found.dtype == torch.float32 and found.shape == (3, 16)
    torch.testing.assert_close(found[0], found[2])
    assert differ({"a": found[0]}, {"a": found[1]})


def test_answers_are_read_as_votes_read_them():
    completions = [r"\boxed{4}", "17", "no answer", [{"role": "assistant", "content": "#### 3"}]]
    assert answered_reward(completions) == [1, 1, 0, 1]


SETTINGS = {
    "plain": {},
    "beta": dict(beta=0.1),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "rewards with None": dict(reward_funcs=[contains_answer, some_letter]),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_judged_by_rewards_without_bands_it_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(EvolRLTrainer, EvolRLConfig, tmp_path, **options, correctness="reward", novelty_band=0.0)
    assert_same(got, expected)
    assert not any(key.startswith(("votes", "novelty")) for entry in log for key in entry)


def even_length(completions, **columns):
    return [float(len(text) % 2) for text in completions]


def test_without_bands_the_majority_is_what_remains(tmp_path):
    """GRPO on rewards of 1 for the majority's answer and -1 for all else; one answer alone is no majority."""

    def voted(completions, **columns):
        rewards = []
        for g in range(0, len(completions), 4):
            said = [answer_key(text) for text in completions[g : g + 4]]
            most = max((answer for answer in said if answer is not None), key=said.count, default=None)
            enough = sum(answer is not None for answer in said) > 1
            rewards += [1.0 if answer is not None and answer == most and enough else -1.0 for answer in said]
        return rewards

    short = dict(max_completion_length=2, per_device_train_batch_size=32, num_generations=4)
    expected, log = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=voted, **short)
    assert any(entry.get("reward_std", 0) > 0 for entry in log)
    own = dict(short, novelty_band=0.0, reward_funcs=even_length)
    trainer = make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **own)
    known, right = trainer._classes(["7", None, None, None, "8", "8", "9", None], torch.zeros(8))
    assert known == [True, False, False, False, True, True, True, False]
    assert right == [False] * 4 + [True, True, False, False]
    trainer.train()
    assert_same(parameters(trainer), expected)
    log = trainer.state.log_history
    assert 0 < log[0]["votes/right_fraction"] <= log[0]["votes/answered_fraction"] < 1


def test_shaped_rewards_are_those_of_the_formulas(tmp_path):
    trainer = make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **JUDGED, novelty_band=0.4, reward_funcs=even_length)
    output = one_batch(trainer)
    texts = trainer._tokenizer.batch_decode(output["completion_ids"], skip_special_tokens=True)
    embed = make_embedder("ngrams", device="cpu", batch_size=8)
    expected = []
    for g in (0, 4):
        right = (trainer.scorer.totals()[g : g + 4] >= 1).tolist()
        expected += band_rewards(novelties(similarities(embed(texts[g : g + 4])), right), right, width=0.4)
    torch.testing.assert_close(trainer.shaped_rewards[:, 0], torch.tensor(expected))
    group = torch.tensor(expected).view(2, 4)
    advantages = (group - group.mean(dim=1, keepdim=True)) / (group.std(dim=1, keepdim=True) + 1e-4)
    torch.testing.assert_close(output["advantages"], advantages.flatten(), atol=1e-4, rtol=0)
    logged = trainer._metrics["train"]
    assert logged["reward"] == [pytest.approx(trainer.scorer.totals().mean().item())]  # raw
    assert logged["votes/right_reward"] == [1.0]


def test_rows_without_a_reward_are_left_out(tmp_path):
    def some(completions, **columns):
        return [None if i % 4 == 1 else float(i % 4 > 1) for i in range(len(completions))]

    trainer = make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **JUDGED, reward_funcs=some)
    output = one_batch(trainer)
    unknown = [i % 4 == 1 for i in range(8)]
    assert trainer.shaped_rewards.isnan().flatten().tolist() == unknown
    assert (output["advantages"][unknown] == 0).all() and (output["advantages"][[0, 2, 3]] != 0).all()


def test_each_knob_changes_what_is_learned(tmp_path):
    batch = dict(JUDGED, per_device_train_batch_size=32, reward_funcs=even_length, max_steps=2)
    usual, _ = trained(EvolRLTrainer, EvolRLConfig, tmp_path, **batch)
    for options in (
        dict(novelty_band=0.0),
        dict(novelty_band=0.1),
        dict(novelty_scores="shuffled"),
        dict(correctness="majority"),
    ):
        got, log = trained(EvolRLTrainer, EvolRLConfig, tmp_path, **{**batch, **options})
        assert differ(got, usual), options
        assert all(torch.isfinite(value).all() for value in got.values())
        assert 0 <= log[0].get("novelty/mean_similarity", 0) <= 1


def says_nothing(monkeypatch, tokens):
    """The model says one letter, or, in the first `tokens` rows of a prompt, one digit."""

    def speak(trainer, prompt_ids, *others, **options):
        digit, letter = trainer._tokenizer("5a")["input_ids"]
        return [[digit if row % 4 < tokens else letter, 1] for row in range(len(prompt_ids))], None

    says(speak, monkeypatch.setattr)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_first_batch_without_a_majority_is_warned_of_once(tmp_path, monkeypatch, answers):
    says_nothing(monkeypatch, answers)
    trainer = make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **VOTED)
    with pytest.warns(UserWarning, match="found in .* no prompt has two answers.*`correctness='reward'`") as found:
        trainer.train()
    assert len([one for one in found if "no prompt has two answers" in str(one.message)]) == 1
    assert f"in {2 * answers} of the 8 completions" in str([one.message for one in found])
    assert all(entry["loss"] == 0 for entry in trainer.state.log_history if "loss" in entry)


def test_votes_are_those_of_what_was_said_whatever_a_reward_function_makes_of_it(tmp_path, monkeypatch):
    def rewrites(completions, **columns):
        for completion in completions:
            completion[0]["content"] = "rewritten"
        return [0.0] * len(completions)

    says_nothing(monkeypatch, 2)
    options = dict(conversational=True, reward_funcs=rewrites, max_steps=1, log_completions=True)
    trainer = make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **VOTED, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*two answers")  # there is a majority
        trainer.train()
    columns = trainer.completion_columns()
    assert columns.keys() == {"answer", "novelty", "shaped_reward"}
    assert columns["answer"] == ["5", "5", "", ""] * 2 and len(columns["shaped_reward"]) == 8
    assert [math.isnan(value) for value in columns["novelty"]] == [False, False, True, True] * 2


def test_reward_functions_need_no_warning(tmp_path, monkeypatch):
    says_nothing(monkeypatch, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*two answers")
        make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, **JUDGED, max_steps=1).train()


def test_without_sentence_transformers_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"trl-explore\[dense\].*or set `embedding_model='ngrams'`"):
        make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="`embedding_model='no/such-model'` cannot be loaded"):
        make_trainer(EvolRLTrainer, EvolRLConfig, tmp_path, embedding_model="no/such-model")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(correctness="vote"), "`correctness`: .*'vote'"),
        (dict(novelty_scores="random"), "`novelty_scores`: .*'random'"),
        (dict(novelty_band=1.0), r"`novelty_band=1.0` must be in \[0, 1\)"),
        (dict(novelty_band=-0.1), "`novelty_band=-0.1` must"),
        (dict(embedding_batch_size=0), "`embedding_batch_size=0` must be at least 1"),
        (dict(advantage="maxrl"), "EVOL-RL's can be negative"),
        (dict(explore="auto"), "`explore='auto'` asks the reward functions which prompts are unsolved"),
        (dict(dynamic_sampling="filter"), "`dynamic_sampling='filter'` asks .*: set `correctness='reward'`, or leave"),
        (dict(dynamic_sampling="refill"), "`dynamic_sampling='refill'` asks the reward functions which groups"),
        (dict(explore_threshold=0.5), "`explore_threshold=0.5` asks the reward functions which prompts are solved"),
    ],
)
def test_bad_values_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        EvolRLConfig(str(tmp_path), use_cpu=True, **options)


def test_the_example_trains_offline(tmp_path, monkeypatch):
    rows = [{"problem": f"{i}+{i}", "solution": f"\\boxed{{{2 * i}}}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--dataset_name", "data.jsonl", "--model_name_or_path", saved_model(), "--use_cpu", "--bf16", "false"]
    options += ["--max_steps", "1", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    options += ["--num_generations", "4", "--max_completion_length", "4", "--embedding_model", "ngrams"]
    options += ["--output_dir", "out", "--report_to", "none"]
    run_example("evol_rl.py", *options, folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file()

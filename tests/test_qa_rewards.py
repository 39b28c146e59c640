r"""Short answers: normalisation, words in common, tags, and what a search agent must write."""

import inspect
import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_explore.rewards.questions import (
    exact_match,
    exact_match_reward,
    extract_tagged_answer,
    f1_reward,
    f1_score,
    make_search_reward,
    normalize_answer,
    search_reward,
)
from trl_explore.runs.inputs import load_reward_functions


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The  Eiffel-Tower, (Paris)!", "eiffeltower paris"),
        ("Beyoncé", "beyoncé"),
        ("Beyonce\u0301", "beyoncé"),
        ("ÅNGSTRÖM", "ångström"),
        ("東京 Tower", "東京 tower"),
        ("don\u2019t", "don\u2019t"),  # SQuAD's punctuation is ASCII's
        ("\u00a0a\tb\n", "b"),
    ],
)
def test_normal_forms(text, form):
    assert normalize_answer(text) == form


def squads_form(text):
    """The official script's function, its steps kept."""

    def remove_articles(text):
        return re.sub(r"\b(a|an|the)\b", " ", text)

    def remove_punctuation(text):
        return "".join(character for character in text if character not in set(string.punctuation))

    return " ".join(remove_articles(remove_punctuation(text.lower())).split())


ASCII = st.text(st.characters(max_codepoint=126))
WORDS = st.lists(st.sampled_from(["the", "a", "Cat", "cat.", "dog", "yes", "No", "no answer", "7"]), max_size=4)
ANSWERS = st.one_of(WORDS.map(" ".join), ASCII)


@given(ANSWERS)
def test_the_normal_form_is_squads(text):
    assert normalize_answer(text) == squads_form(text)


@given(st.text())
def test_normal_forms_stay(text):
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)
    assert exact_match(text, text) == f1_score(text, text) == float(bool(text.split()))


def hotpots_f1(prediction, gold):
    """HotpotQA's function for texts that keep words; SQuAD's 2.0 for others, which are right or wrong as a whole."""
    prediction, gold = squads_form(prediction), squads_form(gold)
    if not prediction or not gold:
        return int(prediction == gold)
    if prediction in ["yes", "no", "noanswer"] and prediction != gold:
        return 0
    if gold in ["yes", "no", "noanswer"] and prediction != gold:
        return 0
    common = sum((Counter(prediction.split()) & Counter(gold.split())).values())
    if common == 0:
        return 0
    precision, recall = common / len(prediction.split()), common / len(gold.split())
    return 2 * precision * recall / (precision + recall)


@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3))
def test_scores_are_hotpots_and_the_best_over_golds(prediction, golds):
    if prediction.strip():
        assert f1_score(prediction, golds) == pytest.approx(max(hotpots_f1(prediction, gold) for gold in golds))
        assert exact_match(prediction, golds) == (squads_form(prediction) in map(squads_form, golds))
    assert 0 <= exact_match(prediction, golds) <= f1_score(prediction, golds) <= 1


@pytest.mark.parametrize(
    ("prediction", "golds", "f1", "em"),
    [
        ("Paris Paris", "Paris", 2 / 3, 0.0),
        ("3.5", "35", 1.0, 1.0),  # SQuAD's form does that
        ("", "Paris", 0.0, 0.0),
        ("", "", 0.0, 0.0),
        ("", "the", 0.0, 0.0),
        (" ", "A", 0.0, 0.0),  # an empty answer, which SQuAD's script would take for an article
        ("the", "a", 1.0, 1.0),
        ("A", "a", 1.0, 1.0),
        ("(a)", "A", 1.0, 1.0),
        ("the A", "A", 1.0, 1.0),
        ("The The", ["The Who", "The The."], 1.0, 1.0),
    ],
)
def test_scores_by_hand(prediction, golds, f1, em):
    assert f1_score(prediction, golds) == pytest.approx(f1)
    assert exact_match(prediction, golds) == em


def test_no_gold_answer_is_an_error():
    for score in (f1_score, exact_match):
        with pytest.raises(ValueError, match="no gold answer"):
            score("a", [])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer>2</answer>", "1"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<Answer>1</Answer>", None),
        ("", None),
        ("<answer>" * 50_000, None),
    ],
)
def test_the_last_complete_tag_counts(text, answer):
    assert extract_tagged_answer(text) == answer


def test_other_tags_can_be_read():
    assert extract_tagged_answer("<search>who?</search><answer>1</answer>", tag="search") == "who?"


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def calls(content="", **more):
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "q"}}}
    return says(content, tool_calls=[call], **more)


SHOWN = {"role": "tool", "name": "search", "content": "Doc 1 <answer>trap</answer> <search>trap</search>"}


def test_both_rewards_read_texts_and_messages():
    completions = [
        "I think <answer>the Paris</answer>",
        [calls("<answer>trap</answer>"), SHOWN, says("So <answer>Paris France</answer>")],
        [calls(), SHOWN],
        [says([{"type": "text", "text": "<answer>Paris</answer>"}])],
        "Paris",
        [],
        "<search>q</search><information><answer>Paris</answer></information> <answer>Rome</answer>",
        "<search>q</search><information>cut off <answer>Paris</answer>",
        "<answer>Paris</answer>",
        "<answer>42</answer>",
    ]
    answer = ["Paris"] * 3 + [["Lutetia", "Paris"]] + ["Paris"] * 4 + [None, 42]
    f1 = [1.0, pytest.approx(2 / 3), 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, None, 1.0]
    assert f1_reward(completions, answer, prompts=["?"] * 10) == f1
    em = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, None, 1.0]
    assert exact_match_reward(completions=completions, answer=answer) == em


@pytest.mark.parametrize("reward", [f1_reward, exact_match_reward, search_reward])
def test_a_missing_gold_column_is_an_error_that_names_it(reward):
    with pytest.raises(ValueError, match="column `answer`"):
        reward(["a"], solution=["a"])


T, S = "<thinking>t</thinking>", "<search>q</search>"
A, INFO = "<answer>Paris</answer>", "<information>i</information>"
OK, BAD = 1.0, -0.5


# For each trajectory its reward by default, without the need to search, and with the need to think.
@pytest.mark.parametrize(
    ("turns", "default", "no_search", "thinking"),
    [
        ([T + S, T + A], OK, OK, OK),
        ([f" {T}\n{S} ", f"\n{T} {A}\n"], OK, OK, OK),
        ([T + S, T + S, T + A], OK, OK, OK),
        ([S, A], OK, OK, BAD),
        ([T + A], BAD, OK, BAD),
        ([T + S], BAD, BAD, BAD),
        ([T + S, T + "<answer>Paris"], BAD, BAD, BAD),
        ([T + S, "<thinking></thinking>" + A], BAD, BAD, BAD),
        ([T + S, T + A + A], BAD, BAD, BAD),
        ([T + A, T + S], BAD, BAD, BAD),
        ([T + S + A], BAD, BAD, BAD),
        ([S + T, A], BAD, BAD, BAD),
        ([T + S, "so " + T + A], BAD, BAD, BAD),
        ([T + S, "<thinking>" + A + "</thinking>" + A], BAD, BAD, BAD),
        ([T + S, T + "<answer>Rome</answer>"], 0.0, 0.0, 0.0),
        (["", ""], BAD, BAD, BAD),
    ],
)
def test_tags_must_follow_the_format(turns, default, no_search, thinking):
    shown = {"role": "user", "content": INFO}
    messages = [message for turn in turns for message in (says(turn), shown)][:-1]
    rewards = [
        make_search_reward(trust_information=True, **rules)
        for rules in ({}, {"require_search": False}, {"require_thinking": True})
    ]
    for completion in (INFO.join(turns), messages):
        # Messages without any search are judged as those of an agent with tools, which may write prose.
        got = [reward([completion], ["Paris"])[0] for reward in rewards]
        if isinstance(completion, str) or any("<search>" in turn for turn in turns):
            assert got == [default, no_search, thinking]


def test_information_of_the_model_breaks_the_format():
    assert search_reward([[says(S), SHOWN, says(INFO + A)]], ["Paris"]) == [BAD]
    text = T + S + INFO + T + A
    assert search_reward([text], ["Paris"]) == make_search_reward(require_search=False)([text], ["Paris"]) == [BAD]
    trusting = make_search_reward(trust_information=True)
    assert trusting([text], ["Paris"]) == [OK] and trusting([S + "<information>cut off"], ["Paris"]) == [BAD]
    assert make_search_reward(require_search=False)([T + A], ["Paris"]) == [OK]


def test_calls_of_tools_that_do_not_exist_break_the_format():
    unknown = {"role": "tool", "name": "seek", "content": str({"error": "Tool seek not found."})}
    failed = {"role": "tool", "name": "search", "content": str({"error": "timeout"})}
    assert search_reward([[calls(), unknown, says(A)]], ["Paris"]) == [BAD]
    assert search_reward([[calls(), SHOWN, calls(), unknown, says(A)]], ["Paris"]) == [BAD]
    assert search_reward([[calls(), failed, says(A)]], ["Paris"]) == [OK]


@pytest.mark.parametrize(
    ("messages", "default", "no_search", "thinking"),
    [
        ([calls(), SHOWN, says(A)], OK, OK, BAD),
        ([calls(T), SHOWN, says(T + A)], OK, OK, OK),
        ([calls(reasoning_content="t"), SHOWN, says(A, thinking="t")], OK, OK, OK),
        ([calls(reasoning_content=" "), SHOWN, says(T + A)], OK, OK, BAD),
        ([calls("let me see"), SHOWN, SHOWN, calls(), SHOWN, says(f"It is {A}.")], OK, OK, BAD),
        ([calls(None), SHOWN, says(A)], OK, OK, BAD),
        ([says(A)], BAD, OK, BAD),
        ([calls(), SHOWN, says(A + A)], BAD, BAD, BAD),
        ([calls(), SHOWN, says("Paris")], BAD, BAD, BAD),
        ([calls(), SHOWN, calls()], BAD, BAD, BAD),
        ([calls(), SHOWN, calls(A)], BAD, BAD, BAD),
        ([calls(), SHOWN], BAD, BAD, BAD),
        ([calls(), SHOWN, says("hm"), says(A)], BAD, BAD, BAD),
        ([calls(), SHOWN, {"role": "assistant"}], BAD, BAD, BAD),
        ([says("hm"), says(A)], BAD, BAD, BAD),
        ([], BAD, BAD, BAD),
    ],
)
def test_tool_calls_are_searches(messages, default, no_search, thinking):
    rewards = make_search_reward(), make_search_reward(require_search=False), make_search_reward(require_thinking=True)
    assert [reward([messages], ["Paris"])[0] for reward in rewards] == [default, no_search, thinking]


def test_score_and_penalty_can_be_chosen():
    completions = [[calls(), SHOWN, says("<answer>in Paris</answer>")], "Paris", "Paris"]
    answer = [["Rome", "Paris"], "Paris", None]
    assert search_reward(completions, answer) == [pytest.approx(2 / 3), -0.5, None]
    assert make_search_reward(score="em", format_penalty=-1.0)(completions, answer) == [0.0, -1.0, None]
    with pytest.raises(ValueError, match="score='bleu' must be one of f1, em"):
        make_search_reward(score="bleu")


def test_the_rewards_have_names_and_are_found_by_them():
    assert make_search_reward(score="em").__name__ == "search_reward"
    path = "trl_explore.rewards.questions.search_reward"
    assert [inspect.unwrap(found) for found in load_reward_functions([path], None)] == [search_reward]


TAGS = ["<thinking>", "</thinking>", "<search>", "</search>", "<answer>", "</answer>", "<information>"]
PIECES = [T, S, A, INFO, *TAGS, "x"]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.booleans(), st.booleans())
def test_a_text_is_well_formed_exactly_when_the_grammar_says_so(text, require_search, require_thinking):
    body = r"(?:(?!</?(?:thinking|search|answer|information)>).)+"
    thought = rf"(?:<thinking>{body}</thinking>)" + ("" if require_thinking else "?")
    search = rf"{thought}<search>{body}</search><information>(?:(?!</information>).)*</information>"
    grammar = rf"(?:{search}){'+' if require_search else '*'}{thought}<answer>{body}</answer>"
    rules = {"require_search": require_search, "require_thinking": require_thinking}
    reward = make_search_reward(trust_information=True, **rules)
    assert (reward([text], ["Paris"])[0] >= 0) == bool(re.fullmatch(grammar, text))

r"""Which answers count: marks, numbers, formulas, and text that no one should trust."""

import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_explore.rewards.answers import (
    accuracy_reward,
    answer_key,
    answers_match,
    choice_letter,
    completion_text,
    extract_answer,
    format_reward,
    multiple_choice_reward,
    parse_number,
    think_format_reward,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then #### 2", "2"),
        ("#### 2\nno: \\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} and no more", r"\frac{1}{2}"),
        ("####   42 \nbye", "42"),
        (r"#### \boxed{42}", "42"),
        # Boxes that are not closed and hashes with nothing behind them are no marks.
        (r"\boxed{\frac{1}{2}", None),
        ("####\n42", None),
        (r"\boxed{7} hence \boxed{1", "7"),
        # Lines that are no headings.
        ("#### 42 apples\nbye", "42 apples"),
        ("#### x = 42\nbye", "x = 42"),
        ("#### sqrt(2)\nbye", "sqrt(2)"),
        ("so #### Paris\nbye", "Paris"),
        ("#### Step 1\nthink\n#### Paris\n", "Paris"),
    ],
)
def test_the_last_mark_holds_the_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "heading", ["#### Step 1: Add", "#### **Step 1**", "#### 1. Add", "##### Step 1", "#### Check"]
)
def test_a_heading_is_no_answer(heading):
    completion = f"{heading}\n2 + 5 = 7\n\n#### Conclude\nSo it is $\\boxed{{7}}$."
    assert format_reward([completion]) == [1.0]
    assert accuracy_reward([f"{heading}\n2 + 5 = 7\n#### Conclude\nThe total is 7."], answer=["7"]) == [1.0]
    assert answer_key(f"It is $\\boxed{{7}}$.\n\n{heading}\n7 - 5 = 2") == 7
    assert multiple_choice_reward([f"{heading}\nIt is warm.\nThe answer is (B)."], answer=["B"]) == [1.0]


@pytest.mark.parametrize(
    "text, value",
    [
        ("1000", 1000),
        ("1,000", 1000),
        ("1{,}000", 1000),
        (r"1,\!000", 1000),
        ("1000.0", 1000),
        ("$1,234,567.50", Fraction("1234567.5")),
        (r"\$42", 42),
        ("$42$", 42),
        ("-$5", -5),
        ("$-5", -5),
        ("€7.", 7),
        ("\u22123", -3),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("-1/2", Fraction(-1, 2)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
    ],
)
def test_one_number_is_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text", ["", "-", ".", "e5", ".e5", "1,00", "3 4", "x", "42%", "42 apples", "1/0", "1e9999", "9" * 101, "1.2.3"]
)
def test_other_texts_are_no_number(text):
    assert parse_number(text) is None


@given(st.integers(-(10**12), 10**12))
def test_a_whole_number_matches_itself_in_every_spelling_and_not_its_neighbour(value):
    completions = [f"#### {value}", f"#### {value:,}", rf"\boxed{{{value}.0}}", f"#### ${value}", f"{value}"]
    assert accuracy_reward(completions, answer=[f"so\n#### {value:,}"] * 5) == [1.0] * 5
    assert accuracy_reward([f"#### {value + 1}"], solution=[rf"\boxed{{{value}}}"]) == [0.0]


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000))
def test_decimals_match_fractions_within_the_tolerance(value):
    gold = f"{value.numerator}/{value.denominator}"
    assert answers_match(f"#### {float(value):.12f}", gold) is (abs(Fraction(f"{float(value):.12f}") - value) <= 1e-6)
    if value and value.denominator > 1:
        assert answers_match(f"#### {float(value) * (1 + 1e-4):.12f}", gold) is False


@pytest.mark.parametrize(
    "completion, gold, reward",
    [
        (r"\boxed{\frac{2}{6}}", r"\frac{1}{3}", 1.0),
        (r"so $\frac{2}{6}$", r"\boxed{\frac{1}{3}}", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{x-1}", "x+1", 0.0),
        ("#### (1, 2)", "(1,2)", 1.0),
        (r"\boxed{\text{Monday}}", r"\boxed{\text{Monday}}", 1.0),
        (r"\boxed{42\%}", "42", 1.0),
        (r"\boxed{42\%}", "0.42", 1.0),
        ("#### 42 apples", "#### 42", 1.0),
        ("The answer is **42**.", "42", 1.0),
        ("First 42, then 43", "42", 0.0),
        (r"\boxed{42} or rather \boxed{41}", "42", 0.0),
        ("", "42", 0.0),
        ("42", "no idea", None),
        (r"\boxed{10^{10^{10}}}", r"\boxed{10^{10^{10}}}", 1.0),
        ("It is $12345!$", "12345", 0.0),
        ("Since 7^{100000} = (7^4)^{25000}, it ends with 1. The answer is 1.", "1", 1.0),
        ("The answer is 2^{100000}.", "2", 0.0),
    ],
)
def test_what_counts_as_right(completion, gold, reward):
    assert accuracy_reward([completion], solution=[gold]) == [reward]


@pytest.mark.parametrize(
    "gold, right, wrong",
    [
        ("2x+1", r"\boxed{1+2x}", r"\boxed{2}"),
        (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", r"\boxed{3}"),
        ("3*sqrt(2)", r"\boxed{\sqrt{18}}", r"\boxed{3}"),
        ("2 ln 3", r"\boxed{2\ln 3}", r"\boxed{3}"),
        ("x**2 + 1", "#### 1 + x^2", r"\boxed{1}"),
        ("6 - 5i", r"\boxed{-5i+6}", r"\boxed{5}"),
        ("1,-2", r"\boxed{-2,1}", r"\boxed{1}"),
        (r"1\frac{4}{5}", r"\boxed{1.8}", r"\boxed{0.8}"),
        ("5:30", "#### 5:30", r"\boxed{5}"),
        (r"6\sqrt{2} \text{ inches}", r"\boxed{\sqrt{72}}", r"\boxed{6}"),
        (r"2\pi square units", r"#### 2\pi", r"\boxed{2}"),
        (r"$2\pi$", r"#### 2\pi", "#### 2"),
        ("2", "#### 2", "#### **2x+1**."),
        ("1", "#### 1", "#### 1+√2"),
        ("9^{9^9}", "#### 9^{9^9}", r"\boxed{9}"),
        ("5i", r"\boxed{5i}", r"\boxed{5}"),
        ("2xy + 1", r"\boxed{1+2yx}", r"\boxed{1}"),
        ("1 or 2", r"\boxed{2,1}", r"\boxed{2}"),
        ("2 pi cm", r"\boxed{2\pi}", r"\boxed{2}"),
        ("(1,250)", r"\boxed{(1,250)}", r"\boxed{1250}"),
        ("f'(x) = 2x", r"\boxed{2x}", r"\boxed{2}"),
        ("42x", r"\boxed{x \cdot 42}", r"\boxed{43}"),
    ],
)
def test_a_formula_without_a_box_is_not_one_of_its_numbers(gold, right, wrong):
    assert accuracy_reward([right, wrong], answer=[gold, gold]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        ("1250", ["x = 1,250", "1,000 + 250 = 1,250", "5 * 250 = 1,250", "T = 1,250 km", "1,250 N", "1,250 GB"]),
        ("42", ["42 GB", "Rs 42", "It's 42", "42 a day", "42 N", "6 * 7 is 42", "42x", "42!", "x: 42"]),
        ("42", ["12 + 30 = 42", "6*7=42", r"6 \times 7 = 42", "f(2) = 42", r"42 \pmod{50}", "42 m / s"]),
        ("5", ["5L", "5km/h", "5mL", "5 Hz", "5 ft-lb", "5 (cm)", "5 (m)", "5k", "5m^2", "5 p.m.", "5~m"]),
        ("5.5", [r"5.5\%"]),
        ("2.5", ["2.5L"]),
        ("5/6", ["5/6 of the cake"]),
    ],
)
def test_a_number_with_a_unit_or_after_an_equals_sign_is_the_answer(number, texts):
    for text in texts:
        assert answers_match(f"#### {text}", number) is True, text
        assert answers_match(rf"\boxed{{{number}}}", text) is True, text


def test_signs_words_and_units_around_a_number_do_not_change_it():
    texts = ["42%", r"42\%", "$42", "**42**.", "42 ✓", "x = 42", "Tom has 42 apples", "42 dollars in total"]
    texts += ["42 oz", "42 L", "42 m^2", "42 °C", "42 km/h", r"42\text{ cm}^2"]
    assert accuracy_reward([f"#### {text}" for text in texts], answer=["42"] * len(texts)) == [1.0] * len(texts)
    assert accuracy_reward(["#### 1 234", "#### 1,234 km"], answer=["1234"] * 2) == [1.0] * 2


@pytest.mark.parametrize("smiley", [":)", ";)", ":-)", ":))"])
def test_a_smiley_after_an_answer_does_not_change_it(smiley):
    texts = [f"#### 42 {smiley}", f"#### **42** {smiley}\n", f"#### 42 apples  {smiley}"]
    assert accuracy_reward([*texts, f"#### 41 {smiley}"], answer=["42"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert [answer_key(text) for text in texts] == [42, "**42**", "42apples"]
    assert accuracy_reward([f"#### 2x+1 {smiley}"] * 2, answer=["1+2x", "2"]) == [1.0, 0.0]
    assert extract_answer(f"#### {smiley}") == smiley


def test_both_completion_forms_and_both_column_names_are_read():
    plain = [r"\boxed{1}", r"\boxed{2}"]
    messages = [[{"role": "assistant", "content": text}] for text in plain]
    assert accuracy_reward(plain, solution=["1", "1"]) == [1.0, 0.0]
    assert accuracy_reward(messages, answer=["... #### 1", "... #### 1"], prompts=["a", "b"]) == [1.0, 0.0]
    assert accuracy_reward(plain, answer=[1, None]) == [1.0, None]
    assert accuracy_reward(plain, solution=["1", "2"], answer=["5", "5"]) == [1.0, 1.0]


def test_a_missing_gold_column_is_an_error_that_names_the_columns():
    with pytest.raises(ValueError, match="`solution` or `answer`"):
        accuracy_reward(["1"])


def test_the_last_message_is_the_completion():
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert completion_text([call, {"role": "assistant", "content": "4"}]) == "4"
    assert completion_text([{"role": "assistant", "content": [{"type": "text", "text": "5"}]}]) == "5"
    assert completion_text([call]) == completion_text([]) == ""


GARBAGE = [
    "#### 42" + 80_000 * " " + "x",  # the search for a smiley at the end must be linear
    r"\boxed{9^{9^{9^{9}}}}",
    "9 ** 9 ** 9 ** 9",
    "7^{100000} " * 180,
    "{(1" * 700,
    r"\boxed{(10^{9})!}",
    r"\boxed{123456789!}",
    r"\boxed{2^{99999999999}}",
    r"\boxed{1e999999999}",
    r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    r"\boxed{\frac{1}{0}}",
    "#### 1/0",
    "\x00\ud800\uffff",
    "\\boxed{" * 2000,
    "####" * 2000,
    "{" * 100_000,
    "$" * 10_000,
    "#### " + "-" * 400,
    "#### " + "(" * 499,
    "9" * 10_000,
    r"\boxed{" + "9" * 499 + "}",
]


def test_garbage_is_wrong_and_neither_raises_nor_hangs():
    start = time.process_time()
    assert accuracy_reward(GARBAGE, solution=["42"] * len(GARBAGE)) == [0.0] * len(GARBAGE)
    assert format_reward(GARBAGE)[-1] == 1.0
    assert time.process_time() - start < 20  # usually 3 seconds of CPU time; a hang takes minutes


def test_rewards_work_outside_the_main_thread_where_signals_do_not():
    results = []
    completions = [*GARBAGE, r"\boxed{\frac{2}{4}}"]
    thread = threading.Thread(
        target=lambda: results.append(accuracy_reward(completions, solution=[r"\frac{1}{2}"] * len(completions))),
        daemon=True,
    )
    thread.start()
    thread.join(timeout=120)  # ends a hang; a busy machine takes a while
    assert results == [[0.0] * len(GARBAGE) + [1.0]]


PIECES = [*"0123456789.,$%#{}()\\^_+-*/=! \nabx", "\\boxed{", "#### ", "\\frac{", "^{9"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_makes_a_reward_raise(text):
    assert set(accuracy_reward([text, text], answer=["#### 42", r"\frac{1}{3}"])) <= {0.0, 1.0}
    assert format_reward([text])[0] in (0.0, 1.0)
    assert answers_match("42", text) in (True, False, None)
    hash(answer_key(text))


def test_equal_answers_vote_for_the_same_key():
    assert answer_key(r"\boxed{1,000}") == answer_key("#### 1000.0") == answer_key("$1000") == 1000
    assert answer_key(r"\boxed{x + 1}") == answer_key("#### x+1") == "x+1"
    assert answer_key("thinking of 5 things") is None


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("Thus\n#### 42", 1.0),
        (r"It is $\boxed{42}$.", 1.0),
        ("It is \\[\\boxed{\\frac{1}{2}}\\]\n", 1.0),
        (r"#### \boxed{42}", 1.0),
        ("It is 42.", 0.0),
        (r"\boxed{42} I hope", 0.0),
        (r"\boxed{41} or \boxed{42}", 0.0),
        ("#### 41\n#### 42", 0.0),
        ("#### 42\nmore", 0.0),
        ("#### Rome\n#### Paris", 0.0),
        ("#### Step 1\nthink", 0.0),
        ("\\boxed{7}\n#### Check\n7", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{42", 0.0),
        ("", 0.0),
    ],
)
def test_the_format_is_one_mark_at_the_end(completion, reward):
    assert format_reward([completion]) == [reward]
    assert format_reward([[{"role": "assistant", "content": completion}]], solution=["42"]) == [reward]


def test_trls_think_format_reward_is_at_hand():
    assert think_format_reward([[{"content": "<think>\na\n</think>\nb"}], [{"content": "b"}]]) == [1.0, 0.0]


def test_importing_the_rewards_loads_neither_torch_nor_math_verify():
    modules = "trl_explore.rewards.answers, trl_explore.rewards.questions, trl_explore.evaluation.metrics"
    code = f"import sys, {modules}; print({{'torch', 'math_verify'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{C}", "C"),
        (r"\boxed{\text{c}}", "C"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\mathbf{J}}", "J"),
        (r"\boxed{(C)}", "C"),
        (r"\boxed{C. the third one}", "C"),
        (r"\boxed{A}, no: \boxed{B}", "B"),
        (r"The answer is (A). \boxed{B}", "B"),
        ("#### D", "D"),
        ("The answer is (B).", "B"),
        ("**Answer:** D", "D"),
        ("the correct answer is option E, I think", "E"),
        ("Answer: A\nAnswer: B", "B"),
        (r"Final answer: $\text{F}$", "F"),
        (r"\boxed{A, B}", None),
        (r"\boxed{AB}", None),
        (r"\boxed{A bicycle}", None),
        (r"\boxed{42}", None),
        (r"\boxed{", None),
        ("I take A", None),
        ("Answer: And then", None),
        ("", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert choice_letter(text) == letter


def test_the_multiple_choice_reward_compares_letters():
    completions = [r"\boxed{b}", [{"role": "assistant", "content": "Answer: C"}], "no idea"]
    assert multiple_choice_reward(completions, answer=["B ", "d", "A"], prompts=[""] * 3) == [1.0, 0.0, 0.0]
    assert multiple_choice_reward(["A", "A"], answer=[None, "A"]) == [None, multiple_choice_reward(["A"], ["A"])[0]]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="\\boxed{}() ABansweri:\n#", max_size=200))
def test_no_text_makes_the_choice_raise(text):
    assert choice_letter(text) in {None, *"ABNSWERIOXD"}

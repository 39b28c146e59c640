"""Reward functions for tasks with one final answer, on plain and conversational completions, beside two of TRL's."""

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trl.rewards import think_format_reward as think_format_reward

# Without any answer mark only the end of a completion can hold the answer; the limit also bounds the parsing time.
TAIL_LENGTH = 2000
# No sane final answer is longer; sympy can need minutes for a long random formula.
MAX_ANSWER_LENGTH = 500
TIMEOUT_SECONDS = 4

BOXED = re.compile(r"\\boxed\s*\{")
HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
NUMBER = re.compile(r"[-+]?((\d{1,3}(,\d{3})+|\d+)(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)
FRACTION = re.compile(r"([-+]?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))", re.ASCII)
# A word of three letters that is no LaTeX command: prose or a unit, not a formula.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# The choice inside a mark, such as `C`, `(C)`, `\text{C}` or `C. Some words`, and in prose.
STYLE = r"(?:\\(?:text|mathrm)(?:bf)?\s*\{|\\mathbf\s*\{)?"
MARKED_CHOICE = re.compile(rf"[(\s]*{STYLE}[(\s]*([A-Za-z])\s*(?:[.:)}}].*)?", re.DOTALL)
SAID_CHOICE = re.compile(rf"\b[Aa]nswer(?:\s+is)?\s*:?[\s*$(]*(?:(?:option|choice)\s+)?\(?{STYLE}([A-Z])(?![A-Za-z])")
# 9^{9^9}, 2^123456, 123456!, \binom{10^9}{9}: a few characters that keep sympy busy for ever.
EXPLOSIVE = re.compile(
    r"(\^|(?<=[\d)}])\s*\*\*)[\s{(]*(\d+[\s)}]*(\^|\*\*)[\s{(]*\d|[-+]?\d[\d,]{4,})"
    r"|(\d{5,}|[({][\d\s^*{}!]*[\d!}][)}])\s*!"
    r"|binom\{[^{}]*(\d{5}|\^)"
)


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Text of a completion as TRL hands it to reward functions."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


def _marks(text: str) -> list[tuple[int, int, str, str]]:
    """Marks of final answers, in order: `(start, end, answer, source)`, `source` being what math-verify reads."""
    marks = []
    for match in HASHES.finditer(text):
        answer = match.group(1).strip()
        marks.append((match.start(), match.end(), answer, answer))
    for match in BOXED.finditer(text):
        depth = 1
        for position in range(match.end(), min(len(text), match.end() + MAX_ANSWER_LENGTH + 1)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                answer = text[match.end() : position].strip()
                marks.append((match.start(), position + 1, answer, rf"\boxed{{{answer}}}"))
                break
    return sorted(marks)


def _answer_and_source(text: str) -> tuple[str, str] | None:
    marks = _marks(text)
    return marks[-1][2:] if marks else None


def extract_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or after the last `#### `, whichever comes last, stripped; `None` without
    a mark. A `\boxed{` that is never closed (truncation) and a `####` at the end of its line do not count."""
    return (_answer_and_source(text) or (None,))[0]


def parse_number(text: str) -> Fraction | None:
    r"""Exact value of a text that is one number and nothing else: `1000`, `1,000`, `1{,}000`, `-0.5`, `.5`, `1e3`,
    `1/2`, `\frac{1}{2}`, also with a currency sign, dollar signs around it or a full stop. No percentages: they can
    mean two."""
    if len(text) > 100:
        return None
    text = re.sub(r"^(?:[\s$€£]|\\\$)+|(?:[\s.$€£]|\\\$)+$", "", text.replace("\u2212", "-"))
    text = re.sub(r"^([-+])\s*(\\?\$|[€£])?\s*", r"\1", text)  # -$5
    text = re.sub(r",\\!|\{,\}|\\[,!]", ",", text)  # LaTeX's thousands separators
    if NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    fraction = FRACTION.fullmatch(text)
    if fraction:
        sign, numerator, denominator = [group for group in fraction.groups() if group is not None]
        return Fraction(int(sign + numerator), int(denominator)) if int(denominator) else None
    return None


def answer_key(text: str) -> Fraction | str | None:
    """Final answer for majority votes: a number, else the marked answer without spaces, else `None`."""
    answer = extract_answer(text)
    number = parse_number(text if answer is None else answer)
    if number is not None or answer is None:
        return number
    return re.sub(r"\s+", "", answer)


def choice_letter(text: str) -> str | None:
    r"""Letter that a completion chooses, upper case; `None` if nothing was chosen."""
    answer = extract_answer(text)
    if answer is not None:
        marked = MARKED_CHOICE.fullmatch(answer)
        return marked.group(1).upper() if marked else None
    said = SAID_CHOICE.findall(text[-TAIL_LENGTH:])
    return said[-1].upper() if said else None


def _timeout() -> int | None:
    # math-verify's timeouts are signal.alarm, which raises outside the main thread.
    return TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None


def _expressions(answer: str, source: str) -> list:
    """What math-verify reads in `source`; empty where it reads nothing."""
    from math_verify import parse

    expressions = parse(source, parsing_timeout=_timeout())
    # A bare formula such as `(1, 2)` or `x + 1` is only read as LaTeX; prose would be read as a product of letters.
    if not expressions and answer and not WORD.search(answer):
        expressions = parse(f"${answer}$", parsing_timeout=_timeout())
    return expressions


def answers_match(prediction: str, gold: str, *, rel_tol: float = 1e-6) -> bool | None:
    r"""Whether a completion's final answer (see [`extract_answer`], else the whole text) equals the gold one; `None`
    where the gold one cannot be read. Whole numbers are compared exactly, others up to `rel_tol`, the rest by
    math-verify, for which `42\%` equals `42` and `0.42`; without a mark it searches the last 2,000 characters.
    Predictions over 500 characters, or that keep sympy busy for ever (`9^{9^9}`), are only right when they repeat the
    gold text."""
    gold_answer, gold_source = _answer_and_source(gold) or (gold.strip(), gold)
    gold_number = parse_number(gold_answer)
    marked = _answer_and_source(prediction)
    answer, source = marked or (prediction[-TAIL_LENGTH:].strip(), prediction[-TAIL_LENGTH:])
    number = parse_number(answer)
    if gold_number is not None and number is not None:
        if gold_number.denominator == number.denominator == 1:
            return gold_number == number
        return abs(gold_number - number) <= Fraction(rel_tol) * max(abs(gold_number), abs(number))

    if gold_number is not None:
        gold_answer = gold_source = str(gold_number)
    gold_expressions = _expressions(gold_answer, gold_source)
    if not gold_expressions:
        return None
    if answer and re.sub(r"\s+", "", answer) == re.sub(r"\s+", "", gold_answer):
        return True
    if EXPLOSIVE.search(answer) or (marked and len(answer) > MAX_ANSWER_LENGTH):
        return False
    from math_verify import verify

    # Without a mark the answer is somewhere in prose, which must not be read as one formula.
    expressions = _expressions(answer if marked else "", source)
    return verify(gold_expressions, expressions, timeout_seconds=_timeout())


def accuracy_reward(
    completions: Sequence[str | list[dict[str, Any]]],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that is 1.0 where the final answer of a completion is right and 0.0 where it is wrong.

    Beyond TRL's it takes plain completions, GSM8K's `#### 42` and bare numbers; [`answers_match`] says what is equal.
    No model output makes it raise; its time is bounded, by timeouts in the main thread, elsewhere by input limits.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        solution (`list`, *optional*):
            Gold answers, bare or at the end of a text: TRL's column.
        answer (`list`, *optional*):
            The same under GSM8K's column name; only used where there is no `solution`.

    Returns:
        `list[float | None]`: `None` where the gold answer is missing or cannot be read, which TRL skips.

    Raises:
        `ValueError`: If the data set has neither column.

    Example:
    ```python
    >>> accuracy_reward([r"so \boxed{1000}", "#### 12"], answer=["... #### 1,000", "... #### 13"])
    [1.0, 0.0]
    ```
    """
    golds = solution if solution is not None else answer
    if golds is None:
        raise ValueError(
            "accuracy_reward needs the gold answers in a column `solution` or `answer`, and the data set has neither; "
            "rename the column that holds them."
        )
    rewards: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        match = None if gold is None else answers_match(completion_text(completion), str(gold))
        rewards.append(None if match is None else float(match))
    return rewards


def multiple_choice_reward(
    completions: Sequence[str | list[dict[str, Any]]], answer: list[str], **kwargs: Any
) -> list[float]:
    r"""
    Reward function that is 1.0 where a completion chooses the right letter, as [`choice_letter`] reads it.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        answer (`list[str]`):
            Letters of the right choices.
        **kwargs:
            The other columns and TRL's arguments, unused.

    Returns:
        `list[float]`: 1.0 or 0.0 per completion.

    Example:
    ```python
    >>> multiple_choice_reward([r"so \boxed{C}", "The answer is (B)."], answer=["C", "D"])
    [1.0, 0.0]
    ```
    """
    chosen = [choice_letter(completion_text(completion)) for completion in completions]
    return [float(letter == gold.strip().upper()) for letter, gold in zip(chosen, answer, strict=True)]


def format_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    Reward function that is 1.0 where a completion ends with exactly one final answer, marked by `\boxed{}` or `####`.

    The mark must be the only one, hold something, and be followed by nothing but white space, full stops and the end
    of a formula (`$`, `\)`, `\]`). A box on the `####` line is part of that mark: `#### \boxed{42}` is one answer.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.

    Returns:
        `list[float]`: 1.0 or 0.0 per completion.

    Example:
    ```python
    >>> format_reward([r"It is $\boxed{42}$.", r"\boxed{41} or \boxed{42}", "It is 42."])
    [1.0, 0.0, 0.0]
    ```
    """
    rewards = []
    for completion in completions:
        text = completion_text(completion)
        outer: list[tuple[int, int, str, str]] = []
        for mark in _marks(text):
            if not outer or mark[0] >= outer[-1][1]:
                outer.append(mark)
        ends = len(outer) == 1 and outer[0][2] and re.fullmatch(r"(\s|[.$]|\\[)\]])*", text[outer[0][1] :])
        rewards.append(1.0 if ends else 0.0)
    return rewards


def answered_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    Reward function that is 1.0 where a final answer can be read, as majority votes read it: for data without labels.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.

    Returns:
        `list[float]`: 1.0 or 0.0 per completion.

    Example:
    ```python
    >>> answered_reward([r"It is $\boxed{42}$.", "42", "It is 42."])
    [1.0, 1.0, 0.0]
    ```
    """
    return [float(answer_key(completion_text(completion)) is not None) for completion in completions]

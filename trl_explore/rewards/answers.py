"""Reward functions for tasks with one final answer, for plain and conversational completions."""

import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from trl.rewards import think_format_reward as think_format_reward

# Number of characters at the end of a completion that are searched for an answer without a mark.
# The limit bounds the parsing time.
TAIL_LENGTH = 2000
# Maximum number of characters of an answer, because sympy can need minutes for a long random formula.
MAX_ANSWER_LENGTH = 500
TIMEOUT_SECONDS = 4

# ------------------------------------------------------------------------------------------------------------- marks

BOXED = re.compile(r"\\boxed\s*\{")  # `\boxed{`
HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")  # `#### 42`
SMILEY = re.compile(r"(?<!\s)\s+[:;]-?\)+$")  # ` :)` after an answer; the lookbehind keeps the search linear
# A line that is a heading if other text follows it: `#### Step 1`, `#### **Step 1**` or `#### 1. Add`.
HEADING = re.compile(
    r"""
    [ \t]* \#{4}
    [#*_ \t]*                      # a lower level, or bold text: `##### **Step`
    (?: \d{1,2} [.)] [*_ \t]+ )?   # a number: `1. Add`
    [A-Za-z]{3,} (?![A-Za-z(])     # a whole word without a bracket after it: `Step`, and not `sqrt(2)`
    """,
    re.VERBOSE,
)
OTHER_LINE = re.compile(r"^(?![ \t]*####).*\S", re.MULTILINE)  # a line that does not begin with `####`

# ----------------------------------------------------------------------------------------------------------- numbers

NUMBER_PATTERN = r"""
    [-+]?
    (?:
        (?: \d{1,3} (?:,\d{3})+ | \d+ ) (?:\.\d*)?   # `1,234.5`, `1234` or `5.`
        | \.\d+                                      # `.5`
    )
    (?: [eE] [-+]? \d{1,3} )?                        # `1e3`
"""
NUMBER = re.compile(NUMBER_PATTERN, re.ASCII | re.VERBOSE)
FRACTION = re.compile(
    r"""
    ([-+]?)
    (?:
        \\[dt]?frac \{(\d+)\} \{(\d+)\}   # `\frac{1}{2}`
        | (\d+) \s*/\s* (\d+)             # `1/2`
    )
    """,
    re.ASCII | re.VERBOSE,
)
# White space and currency signs around a number, and full stops after it: `$5`, `\$5`, `5 €.`
AROUND_NUMBER = re.compile(r"^ (?: [\s$€£] | \\\$ )+ | (?: [\s.$€£] | \\\$ )+ $", re.VERBOSE)
AFTER_SIGN = re.compile(r"^([-+]) \s* (?: \\?\$ | [€£] )? \s*", re.VERBOSE)  # `-$5`
LATEX_COMMA = re.compile(r",\\! | \{,\} | \\[,!]", re.VERBOSE)  # `1,\!000`, `1{,}000` or `1\,000`

# ---------------------------------------------------------------------------------------------------------- formulas

# A word of at least three letters that is not a LaTeX command means prose or a unit, not a formula.
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# Notation that is not LaTeX, in formulas of answers without a mark.
ROOT = re.compile(r"\\?sqrt\s*\(([^()]*)\)")  # `3*sqrt(2)`
FUNCTION = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])")  # `2 ln 3`
THOUSANDS = re.compile(
    r"""
    (?<=\d) [ ,] (?=\d{3}(?!\d))   # `1 234` or `1,234`
    (?! [^(\[{]* [)\]}] )          # not in brackets: `(1,234)` is a pair
    """,
    re.VERBOSE,
)
SPACE = r"(?: \s | ~ | \\[ ,;:!] )"
# The end of an answer that does not belong to its formula.
UNITS = re.compile(
    rf"""
    (?<=[\w)}}])
    (?:
        {SPACE}* \\(?:text|mbox|pmod) \s* {{[^{{}}]*}} (?: \^{{?\d}}? )?   # `\text{{ cm}}^2` or `\pmod{{11}}`
        | (?: \s [A-Za-z]{{2,}} )+                                         # ` square units`
    )
    $
    """,
    re.VERBOSE,
)
# LaTeX without words, except `or`, `and` and products such as `xy`.
FORMULA = re.compile(
    r"""
    (?:
        \\[A-Za-z]+                           # a command: `\frac`
        | \\[,;:!%{}|\\ ]                     # a space or a sign: `\,` or `\%`
        | (?<![A-Za-z])
          (?:
              [A-Za-z]'*                      # a letter: `f` or `f'`
              | [abcxyz]+                     # a product: `xy`
              | or | and                      # in a list: `1 or 2`
          )
          (?![A-Za-z])
        | [\d\s+*/^=<>()\[\]{}|.,:;!%_~√×÷±π−-]
    )*
    """,
    re.VERBOSE,
)
# Text before and after a number that is meant as the answer.
BEFORE_NUMBER = r"""
    (?:
        [A-Za-z] (?:\(\w\))? \s* [=:]                     # a name: `x = 42`, `x: 42` or `f(2) = 42`
        | (?: (?: \\[A-Za-z]+ | [^A-Za-z=] )* = )*        # sides of an equation: `6 \times 7 = 42`
    )
    \s*
"""
AFTER_NUMBER = rf"""
    (?:
        {SPACE}* (?: ! | \\?% | (?![ei])[A-Za-z] )        # a sign or a letter: `42!`, `42 %` or `42x`
        | (?: {SPACE}+ [(\[]? [A-Za-z] | [gmL] )          # the beginning of a unit: `42 m`, `42 (cm)` or `5L`
          (?: [\w.^{{}})\]] | [ ]?/[ ]? )*                # the rest of the unit: `42 m^2` or `5km / h`
    )?
"""
# A formula that may mean only its number: `42x`, `42 m^2` or `6 * 7 = 42`.
MAYBE_NUMBER = re.compile(rf"{BEFORE_NUMBER} {NUMBER_PATTERN} (?:/\d+)? {AFTER_NUMBER}", re.VERBOSE)

# ----------------------------------------------------------------------------------------------------------- choices

STYLE = r"(?: \\(?:text|mathrm)(?:bf)?\s*\{ | \\mathbf\s*\{ )?"  # `\text{`
# A choice inside a mark.
MARKED_CHOICE = re.compile(
    rf"""
    [(\s]* {STYLE} [(\s]* ([A-Za-z])   # `C`, `(C`, `\text{{C` or `\text{{(C`
    \s* (?: [.:)}}] .* )?              # closing brackets, or a text: `)`, `}}` or `. Some words`
    """,
    re.DOTALL | re.VERBOSE,
)
# A choice in prose.
SAID_CHOICE = re.compile(
    rf"""
    \b[Aa]nswer (?:\s+is)? \s* :?      # `The answer is` or `Answer:`
    [\s*$(]*                           # ` **` or ` $(`
    (?: (?:option|choice) \s+ )?
    \(? {STYLE} ([A-Z]) (?![A-Za-z])   # `(B)`, and not `Because`
    """,
    re.VERBOSE,
)

# ------------------------------------------------------------------------------------------------ explosive formulas

# Short formulas that sympy would never finish.
EXPLOSIVE = re.compile(
    r"""
    (?: \^ | (?<=[\d)}]) \s*\*\* ) [\s{(]*            # a power: `9^{` or `9**(`
    (?:
        \d+ [\s)}]* (?: \^ | \*\* ) [\s{(]* \d        # whose exponent is a power: `9^{9^9}`
        | [-+]?\d[\d,]{4,}                            # or has at least five digits: `2^123456`
    )
    | (?:
        \d{5,}                                        # factorial of a large number: `123456!`
        | [({] [\d\s^*{}!]* [\d!}] [)}]               # factorial of brackets: `(10^9)!`
      )
      \s*!
    | binom \{ [^{}]* (?: \d{5} | \^ )                # `\binom{10^9}{9}`
    """,
    re.VERBOSE,
)
# Characters next to a match of `EXPLOSIVE` that belong to the same formula.
FORMULA_CHARACTERS = "0123456789 \t+-*/^(){}!"
# The exclamation mark of a sentence such as `The answer is 12345!`.
EXCLAMATION = re.compile(r"(?<=\d{5})!(?=[*\s]*(?:\Z|(?<=\s)[A-Z]))")
# Replaces explosive formulas in prose. No gold answer equals it.
STAND_IN = " 31415926535897932384626433832795 "

# Text that may follow the last mark: white space, full stops and the end of a formula, such as `$.` or `\]`.
AFTER_MARK = re.compile(r"(?: \s | [.$] | \\[)\]] )*", re.VERBOSE)


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """
    Return the text of a completion.

    Args:
        completion (`str` or `list[dict]`):
            A completion as TRL passes it to reward functions: a text, or messages, of which the last one is read.

    Returns:
        `str`: The text. Empty if there are no messages or no content.
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    content = completion[-1].get("content")
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""


class _Mark(NamedTuple):
    r"""Marked final answer in a text. `start` and `end` include the mark, such as `\boxed{}`. math-verify parses
    `source`."""

    start: int
    end: int
    answer: str
    source: str


def _marks(text: str) -> list[_Mark]:
    """Return the marks of final answers, in order."""
    marks = []
    end_of_other_lines = max([line.end() for line in OTHER_LINE.finditer(text)], default=0)
    for match in HASHES.finditer(text):
        start_of_line = text.rfind("\n", 0, match.start()) + 1
        if HEADING.match(text, start_of_line) and match.end() < end_of_other_lines:
            continue
        answer = SMILEY.sub("", match.group(1).strip())
        marks.append(_Mark(match.start(), match.end(), answer, answer))
    for match in BOXED.finditer(text):
        depth = 1
        for position in range(match.end(), min(len(text), match.end() + MAX_ANSWER_LENGTH + 1)):
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
            if depth == 0:
                answer = text[match.end() : position].strip()
                marks.append(_Mark(match.start(), position + 1, answer, rf"\boxed{{{answer}}}"))
                break
    return sorted(marks)


def _answer_and_source(text: str) -> tuple[str, str] | None:
    """Return `(answer, source)` of the last mark."""
    marks = _marks(text)
    if not marks:
        return None
    return marks[-1].answer, marks[-1].source


def extract_answer(text: str) -> str | None:
    r"""
    Return the final answer of a text: the content of the last `\boxed{...}` or the rest of the line after the last
    `#### `, whichever comes later.

    These do not count: a `\boxed{` that is never closed (in a truncated completion), a box with more than 500
    characters, a `####` at the end of a line, and a Markdown heading. A heading is a line such as `#### Step 1` or
    `#### 1. Add`: it begins with `####` and a word of at least three letters, maybe with a number before the word. It
    counts as a heading only if a line without `####` follows. So `#### Paris` as the last line is an answer. A smiley
    at the end of a `####` line, as in `#### 42 :)`, does not belong to the answer.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `str` or `None`: The answer without surrounding white space. `None` if there is no mark.
    """
    marked = _answer_and_source(text)
    if marked is None:
        return None
    return marked[0]


def parse_number(text: str) -> Fraction | None:
    r"""
    Return the exact value of a text that is a single number.

    Supported forms are `1000`, `1,000`, `1{,}000`, `-0.5`, `.5`, `1e3`, `1/2` and `\frac{1}{2}`, also with a currency
    sign, between dollar signs, or with a full stop. A percentage is not a number here, because `42\%` can mean 42 or
    0.42.

    Args:
        text (`str`):
            The text.

    Returns:
        `Fraction` or `None`: The value. `None` if the text is anything else.
    """
    if len(text) > 100:  # no reasonable number is that long
        return None
    # Use ASCII for the minus sign. Remove white space and currency signs at both ends, and full stops at the end.
    text = AROUND_NUMBER.sub("", text.replace("\u2212", "-"))
    text = AFTER_SIGN.sub(r"\1", text)
    text = LATEX_COMMA.sub(",", text)
    if NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    fraction = FRACTION.fullmatch(text)
    if fraction:
        # Only the groups of one form match, `\frac{1}{2}` or `1/2`.
        sign, numerator, denominator = [group for group in fraction.groups() if group is not None]
        if int(denominator) != 0:
            return Fraction(int(sign + numerator), int(denominator))
    return None


def answer_key(text: str) -> Fraction | str | None:
    """
    Return the final answer of a text in a form that majority votes compare.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `Fraction`, `str` or `None`: The number if the marked answer or the whole text is one, else the marked answer
        without white space, else `None`.
    """
    answer = extract_answer(text)
    if answer is None:
        return parse_number(text)
    number = parse_number(answer)
    if number is not None:
        return number
    return re.sub(r"\s+", "", answer)


def choice_letter(text: str) -> str | None:
    """
    Return the letter that a completion chooses.

    Args:
        text (`str`):
            Text of a completion.

    Returns:
        `str` or `None`: The upper-case letter in the last mark. If there is no mark, the last letter in prose such as
        `The answer is (B)`. `None` if the last mark contains no choice, or if there is neither a mark nor such prose.
    """
    answer = extract_answer(text)
    if answer is not None:
        marked = MARKED_CHOICE.fullmatch(answer)
        if marked is None:
            return None
        return marked.group(1).upper()
    choices = SAID_CHOICE.findall(text[-TAIL_LENGTH:])
    if not choices:
        return None
    return choices[-1].upper()


def _timeout() -> int | None:
    # math-verify's timeouts use signal.alarm, which raises outside the main thread.
    if threading.current_thread() is not threading.main_thread():
        return None
    return TIMEOUT_SECONDS


def _bare_formula(answer: str) -> str:
    """Return the LaTeX of an answer without a box and dollar signs, without its units. Empty if it is prose."""
    if len(answer) > MAX_ANSWER_LENGTH or r"\boxed" in answer:
        return ""
    formula = answer.strip("*").rstrip("*.,; ").replace("**", "^")
    formula = ROOT.sub(r"\\sqrt{\1}", formula)
    formula = FUNCTION.sub(r"\\\1", formula)
    formula = THOUSANDS.sub("", formula)
    if re.search(r"\d", formula):
        formula = UNITS.sub("", formula)
    if not FORMULA.fullmatch(formula):
        return ""
    return formula


def _expressions(answer: str, source: str) -> list:
    """Parse an answer with math-verify. The list is empty if math-verify finds no expression."""
    from math_verify import parse

    # math-verify reads a formula as a whole only if it is marked as LaTeX. In other text, it searches for a number.
    formula = ""
    if not source.startswith(r"\boxed"):
        formula = _bare_formula(answer)
    if EXPLOSIVE.search(formula):
        return [answer]  # a text, which equals only itself
    expressions = []
    if formula:
        expressions = parse(rf"\boxed{{{formula}}}", parsing_timeout=_timeout())
        # Both readings of `42x` are right.
        if not MAYBE_NUMBER.fullmatch(formula):
            return expressions
    expressions += parse(source, parsing_timeout=_timeout())
    if not expressions and answer and not WORD.search(answer):
        expressions = parse(f"${answer}$", parsing_timeout=_timeout())
    return expressions


def _without_explosive_formulas(text: str) -> str:
    """Return a text in which `STAND_IN` replaces each formula that sympy would never finish."""
    text = EXCLAMATION.sub("", text)
    pieces = []
    position = 0  # end of the last formula
    for match in EXPLOSIVE.finditer(text):
        if match.start() < position:
            continue
        pieces.append(text[position : match.start()].rstrip(FORMULA_CHARACTERS))
        rest = text[match.end() :]
        position = len(text) - len(rest.lstrip(FORMULA_CHARACTERS))
    pieces.append(text[position:])
    return STAND_IN.join(pieces)


def answers_match(prediction: str, gold: str, *, rel_tol: float = 1e-6) -> bool | None:
    r"""
    Return whether the final answer of a completion equals the gold answer.

    The final answer is the one that [`extract_answer`] finds. Without a mark, it is the whole text if that is a
    number, or else the expression that math-verify finds in the last 2,000 characters.

    Whole numbers must be equal, and other numbers equal up to `rel_tol`. math-verify compares everything else; for it,
    `42\%` equals `42` and `0.42`. It reads a gold answer without a mark, or the rest of a `####` line, as one formula:
    `2x+1` equals `1+2x` and not `2`. Units at the end do not count. If words surround a number, as in
    `Tom has 42 apples`, or it is the last side of an equation such as `6*7 = 42`, the number is the answer. `42x`
    equals `42` too, because a letter after a number can be a unit.

    A marked answer of more than 500 characters, or one that sympy would never finish (`9^{9^9}`), is right only if it
    repeats the text of the gold answer. In a text without a mark, a formula that sympy would never finish counts as a
    number that equals no gold answer, and `12345!` at the end of a sentence is the number.

    Args:
        prediction (`str`):
            Text of a completion.
        gold (`str`):
            Gold answer, bare or marked at the end of a text.
        rel_tol (`float`, *optional*, defaults to `1e-6`):
            Relative tolerance for numbers that are not whole.

    Returns:
        `bool` or `None`: Whether the answers are equal. `None` if the gold answer cannot be parsed.
    """
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
    if marked and len(answer) > MAX_ANSWER_LENGTH:
        return False
    if not marked:
        answer = ""  # the answer is somewhere in prose, which must not be parsed as one formula
        source = _without_explosive_formulas(source)
    if EXPLOSIVE.search(source):
        return False
    from math_verify import verify

    expressions = _expressions(answer, source)
    return verify(gold_expressions, expressions, timeout_seconds=_timeout())


def accuracy_reward(
    completions: Sequence[str | list[dict[str, Any]]],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that is 1.0 if the final answer of a completion is right and 0.0 if it is wrong.

    In contrast to TRL's function of this name, it supports plain completions, GSM8K's `#### 42` and bare numbers.
    [`answers_match`] compares answers. No completion makes this function raise. Its time is bounded by timeouts in the
    main thread, and by limits on the length of an answer in other threads.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        solution (`list`, *optional*):
            Gold answers, bare or marked at the end of a text. TRL's name of the column.
        answer (`list`, *optional*):
            Gold answers under GSM8K's name of the column. Not used if there is a `solution`.
        **kwargs:
            Other columns and TRL's arguments, not used.

    Returns:
        `list[float | None]`: One reward per completion. `None` if the gold answer is missing or cannot be parsed.

    Raises:
        `ValueError`: If the data set has neither column.

    Example:
    ```python
    >>> accuracy_reward([r"so \boxed{1000}", "#### 12"], answer=["... #### 1,000", "... #### 13"])
    [1.0, 0.0]
    ```
    """
    golds = solution
    if golds is None:
        golds = answer
    if golds is None:
        raise ValueError(
            "accuracy_reward needs the gold answers in a column `solution` or `answer`, and the data set has neither; "
            "rename the column that holds them."
        )
    rewards: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        match = None
        if gold is not None:
            match = answers_match(completion_text(completion), str(gold))
        rewards.append(None if match is None else float(match))
    return rewards


def multiple_choice_reward(
    completions: Sequence[str | list[dict[str, Any]]], answer: list[str | None], **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that is 1.0 if a completion chooses the right letter, as [`choice_letter`] reads it, else 0.0.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        answer (`list[str]`):
            Letters of the right choices. None if the right choice is not known.
        **kwargs:
            Other columns and TRL's arguments, not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 per completion. `None` where `answer` is None.

    Example:
    ```python
    >>> multiple_choice_reward([r"so \boxed{C}", "The answer is (B)."], answer=["C", "D"])
    [1.0, 0.0]
    ```
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        if gold is None:
            rewards.append(None)
            continue
        letter = choice_letter(completion_text(completion))
        rewards.append(float(letter == gold.strip().upper()))
    return rewards


def format_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    Reward function that is 1.0 if a completion ends with exactly one final answer, marked by `\boxed{}` or `####`.

    The answer must not be empty. After it, only white space, full stops and the end of a formula (`$`, `\)`, `\]`) are
    allowed. A box on a `####` line belongs to that mark: `#### \boxed{42}` is one answer. A Markdown heading is no
    mark, as in [`extract_answer`].

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        **kwargs:
            Other columns and TRL's arguments, not used.

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
        outer: list[_Mark] = []  # without the boxes on `####` lines
        for mark in _marks(text):
            if not outer or mark.start >= outer[-1].end:
                outer.append(mark)
        reward = 0.0
        if len(outer) == 1 and outer[0].answer:
            rest = text[outer[0].end :]
            if AFTER_MARK.fullmatch(rest):
                reward = 1.0
        rewards.append(reward)
    return rewards


def answered_reward(completions: Sequence[str | list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    r"""
    Reward function that is 1.0 if [`answer_key`] finds an answer in a completion, else 0.0. For data without labels.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or as messages.
        **kwargs:
            Other columns and TRL's arguments, not used.

    Returns:
        `list[float]`: 1.0 or 0.0 per completion.

    Example:
    ```python
    >>> answered_reward([r"It is $\boxed{42}$.", "42", "It is 42."])
    [1.0, 1.0, 0.0]
    ```
    """
    return [float(answer_key(completion_text(completion)) is not None) for completion in completions]

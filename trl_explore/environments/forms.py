"""Short forms of reasoning-gym tasks, which a model of 135 million parameters can learn.

A form rewrites the question of a data set as one or a few short lines. The model answers in short lines, and the form
checks each line. (In `chain_sum`, it checks the terms of a line but not the result.) All demonstrations follow the
form and the rules, and about half of them solve the task.
"""

import random
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise, permutations
from typing import Any, TypeVar

Entry = Mapping[str, Any]
# Limits of an answer in all forms. A longer text counts as no answer.
MAX_LINES = 40
MAX_LENGTH = 2000


class Form(ABC):
    """
    Short questions and answers for one data set.

    Attributes:
        config (`dict`):
            Fields of the data set that keep problems small. Fields that the user gives override them.
        max_completion_length (`int`):
            Maximum number of tokens in a completion. With the fields of `config`, every demonstration is shorter.
        step_delimiters (`tuple[str, ...]`):
            Texts that end a step of an answer.
    """

    config: dict[str, Any] = {}
    max_completion_length = 64
    step_delimiters: tuple[str, ...] = ("\n",)

    @abstractmethod
    def question(self, entry: Entry) -> str:
        """
        Return the short question.

        Args:
            entry (`Mapping`):
                The package's entry: `question`, `answer` and `metadata`.

        Returns:
            `str`: The question.

        Raises:
            ValueError: If the problem is too large for the form.
        """

    @abstractmethod
    def answer(self, text: str, entry: Entry) -> str | None:
        """
        Check a completion, and convert it to the package's format.

        Args:
            text (`str`):
                Completion of the model.
            entry (`Mapping`):
                The package's entry.

        Returns:
            `str` or `None`: The answer in the package's format. `None` if a line violates the form or the rules.
        """

    @abstractmethod
    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        """Return an answer that solves the task, or None if there is none."""

    @abstractmethod
    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        """Return an answer that follows the form and the rules but does not solve the task, or None if there is
        none."""

    def demonstration(self, entry: Entry, rng: random.Random) -> str:
        """
        Return an answer that follows the form and the rules.

        Args:
            entry (`Mapping`):
                The package's entry.
            rng (`random.Random`):
                Source of randomness.

        Returns:
            `str`: The answer. About half of the answers solve the task.

        Raises:
            ValueError: If there is neither a right nor a wrong answer to this problem.
        """
        makers = [self.right_demonstration, self.wrong_demonstration]
        rng.shuffle(makers)
        for make in makers:
            text = make(entry, rng)
            if text is not None:
                return text
        raise ValueError(f"There is no demonstration for {self.question(entry)!r}.")

    def key(self, entry: Entry) -> str:
        """Return a text that is equal for equal problems. By this text, the evaluation rows leave out the problems of
        training rows."""
        return self.question(entry)


def _lines(text: str) -> list[str]:
    """Return the lines of an answer, or an empty list if the text is empty or too long."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return []
    lines = [line.strip() for line in text.split("\n")]
    if len(lines) > MAX_LINES:
        return []
    return lines


# ---------------------------------------------------------------------------------------------------------------------

STEP = re.compile(r"(-?\d{1,9}) ([-+*/]) (-?\d{1,9}) = (-?\d{1,9})", re.ASCII)
Step = tuple[int, str, int, int]


def _calculate(left: int, operator: str, right: int) -> int | None:
    """Return the result of a calculation. Return None if it divides by zero, or if a division leaves a remainder."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0 or left % right != 0:
        return None
    return left // right


def _countdown_steps(numbers: Sequence[int], operators: Sequence[str]) -> Iterator[tuple[Step, list[int]]]:
    """Yield each step with two of the numbers, together with the numbers that remain after it. Steps with a negative
    result are left out."""
    for first, second in permutations(range(len(numbers)), 2):
        for operator in operators:
            if operator in "+*" and first > second:  # the same step as with the numbers in the other order
                continue
            left, right = numbers[first], numbers[second]
            result = _calculate(left, operator, right)
            if result is None or result < 0:
                continue
            rest = [number for index, number in enumerate(numbers) if index not in (first, second)]
            yield (left, operator, right, result), [*rest, result]


class CountdownForm(Form):
    """
    Countdown with two to four numbers: `Use 11, 4, 17 to make 24.` is answered by `11 - 4 = 7` and `7 + 17 = 24`.

    Each line calculates with two of the remaining numbers, and replaces them with the result. All numbers must be
    used.
    """

    config = dict(min_numbers=3, max_numbers=3, min_value=1, max_value=20, min_target=10, max_target=99)

    def question(self, entry: Entry) -> str:
        metadata = entry["metadata"]
        numbers = metadata["numbers"]
        if len(numbers) > 4:
            raise ValueError(
                f'form="steps" of countdown takes 2 to 4 numbers; this problem has {len(numbers)}. '
                "Set min_numbers and max_numbers to at most 4."
            )
        return f"Use {', '.join(map(str, numbers))} to make {metadata['target']}."

    def answer(self, text: str, entry: Entry) -> str | None:
        available = [(number, str(number)) for number in entry["metadata"]["numbers"]]
        lines = _lines(text)
        if len(lines) != len(available) - 1:
            return None
        for line in lines:
            match = STEP.fullmatch(line)
            if match is None:
                return None
            left, right, result = int(match[1]), int(match[3]), int(match[4])
            left_expression = self._take(available, left)
            right_expression = self._take(available, right)
            if left_expression is None or right_expression is None or _calculate(left, match[2], right) != result:
                return None
            available.append((result, f"({left_expression} {match[2]} {right_expression})"))
        return available[0][1]

    @staticmethod
    def _take(available: list[tuple[int, str]], number: int) -> str | None:
        for index, (value, expression) in enumerate(available):
            if value == number:
                del available[index]
                return expression
        return None

    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        metadata = entry["metadata"]
        steps = self._solve(list(metadata["numbers"]), metadata["target"], rng)
        if steps is None:
            return None
        return self._text(steps)

    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        metadata = entry["metadata"]
        for _ in range(100):
            numbers, steps = list(metadata["numbers"]), []
            while len(numbers) > 1:
                operator = rng.choice("+-*/")
                possible = list(_countdown_steps(numbers, operator))
                if not possible:  # for example, if every division leaves a remainder
                    possible = list(_countdown_steps(numbers, "+"))
                step, numbers = rng.choice(possible)
                steps.append(step)
            if numbers[0] != metadata["target"]:
                return self._text(steps)
        return None

    def _solve(self, numbers: list[int], target: int, rng: random.Random) -> list[Step] | None:
        if len(numbers) == 1:
            if numbers[0] != target:
                return None
            return []
        possible = list(_countdown_steps(numbers, "+-*/"))
        rng.shuffle(possible)
        for step, rest in possible:
            following = self._solve(rest, target, rng)
            if following is not None:
                return [step, *following]
        return None

    @staticmethod
    def _text(steps: Sequence[Step]) -> str:
        return "\n".join(f"{left} {operator} {right} = {result}" for left, operator, right, result in steps)

    def key(self, entry: Entry) -> str:
        metadata = entry["metadata"]
        return f"{sorted(metadata['numbers'])} {metadata['target']}"


# ---------------------------------------------------------------------------------------------------------------------


class ChainSumForm(Form):
    """
    A sum of several terms: `45 + 17 - 9 =` is answered by `45 + 17 = 62` and `62 - 9 = 53`.

    Each line must begin with the result of the previous line, and add or subtract the next term. The form does not
    check the results, so one wrong result makes the final answer wrong.
    """

    config = dict(min_terms=4, max_terms=5, min_digits=2, max_digits=2)

    def question(self, entry: Entry) -> str:
        self._terms(entry)
        return f"{entry['metadata']['expression']} ="

    @staticmethod
    def _terms(entry: Entry) -> tuple[int, list[tuple[str, int]]]:
        """Return the first term, and the operator and value of each further term."""
        first, *rest = entry["metadata"]["expression"].split(" ")
        if not rest:
            raise ValueError('form="steps" of chain_sum needs at least two terms. Set min_terms to at least 2.')
        return int(first), [(operator, int(term)) for operator, term in zip(rest[::2], rest[1::2], strict=True)]

    def answer(self, text: str, entry: Entry) -> str | None:
        value, terms = self._terms(entry)
        lines = _lines(text)
        if len(lines) != len(terms):
            return None
        for line, (operator, term) in zip(lines, terms, strict=True):
            match = STEP.fullmatch(line)
            if match is None or (int(match[1]), match[2], int(match[3])) != (value, operator, term):
                return None
            value = int(match[4])
        return str(value)

    def _text(self, entry: Entry, errors: Mapping[int, int]) -> str:
        """Return an answer. `errors` maps the index of a line to a number that is added to the result of this line."""
        value, terms = self._terms(entry)
        lines = []
        for index, (operator, term) in enumerate(terms):
            sign = 1 if operator == "+" else -1
            result = value + sign * term + errors.get(index, 0)
            lines.append(f"{value} {operator} {term} = {result}")
            value = result
        return "\n".join(lines)

    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        return self._text(entry, {})

    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        _, terms = self._terms(entry)
        wrong_line = rng.randrange(len(terms))
        return self._text(entry, {wrong_line: rng.choice([-10, -2, -1, 1, 2, 10])})


# ---------------------------------------------------------------------------------------------------------------------

S = TypeVar("S")
# A search problem has three parts: the start state, a function that returns the states one move away from a state,
# and a function that returns True for end states.
Search = tuple[S, Callable[[S], list[S]], Callable[[S], bool]]
State = tuple[int, ...]


def _walk(search: Search[S], rng: random.Random, length: int) -> list[S]:
    """Return the states of a random walk of at most `length` moves, without the start. The walk visits no state twice
    and no end state."""
    start, neighbours, is_end = search
    walk = [start]
    while len(walk) <= length:
        possible = [state for state in neighbours(walk[-1]) if state not in walk and not is_end(state)]
        if not possible:
            break
        walk.append(rng.choice(possible))
    return walk[1:]


def _shortest(search: Search[S], rng: random.Random) -> list[S] | None:
    """Return the states of a shortest path from the start to an end state, without the start. Return None if there is
    no path."""
    start, neighbours, is_end = search
    seen = {start}
    queue: deque[tuple[S, list[S]]] = deque([(start, [])])
    while queue:
        state, path = queue.popleft()
        if is_end(state):
            return path
        following = neighbours(state)
        for next_state in rng.sample(following, len(following)):
            if next_state not in seen:
                seen.add(next_state)
                queue.append((next_state, [*path, next_state]))
    return None


class JugsForm(Form):
    """
    Water jugs: `Jugs 358, get 4.` is answered by the contents of all jugs after each move, such as `050` and `320`.

    Each line must follow from the previous line by one move that changes something: fill a jug, empty a jug, or pour
    one jug into another until the first is empty or the second is full. Each jug has one digit, so no jug holds more
    than nine litres. Three jugs give only about 220 problems. Four jugs give enough for the default sizes.
    """

    config = dict(num_jugs=4, difficulty=4)

    def question(self, entry: Entry) -> str:
        puzzle = entry["metadata"]["puzzle"]
        capacities = puzzle["jug_capacities"]
        if max(capacities) > 9:
            raise ValueError(
                f'form="steps" of jugs takes jugs of at most 9 litres; this problem has one of {max(capacities)}. '
                "Set difficulty to at most 6."
            )
        return f"Jugs {''.join(map(str, capacities))}, get {puzzle['target']}."

    @staticmethod
    def _moves(capacities: Sequence[int], state: State) -> Iterator[tuple[str, State]]:
        names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        for jug, capacity in enumerate(capacities):
            if state[jug] < capacity:
                yield f"fill {names[jug]}", (*state[:jug], capacity, *state[jug + 1 :])
            if state[jug] > 0:
                yield f"empty {names[jug]}", (*state[:jug], 0, *state[jug + 1 :])
        for source, target in permutations(range(len(capacities)), 2):
            amount = min(state[source], capacities[target] - state[target])
            if amount > 0:
                poured = list(state)
                poured[source] -= amount
                poured[target] += amount
                yield f"pour {names[source]}->{names[target]}", tuple(poured)

    def answer(self, text: str, entry: Entry) -> str | None:
        capacities = entry["metadata"]["puzzle"]["jug_capacities"]
        state: State = (0,) * len(capacities)
        moves = []
        for line in _lines(text):
            if re.fullmatch(rf"[0-9]{{{len(capacities)}}}", line) is None:
                return None
            new_state = tuple(int(digit) for digit in line)
            move = None
            for name, reached in self._moves(capacities, state):
                if reached == new_state:
                    move = name
                    break
            if move is None:
                return None
            moves.append(f'"{move}"')
            state = new_state
        if not moves:
            return None
        return f"[{', '.join(moves)}]"

    def _search(self, entry: Entry) -> Search[State]:
        puzzle = entry["metadata"]["puzzle"]
        capacities, target = puzzle["jug_capacities"], puzzle["target"]

        def neighbours(state: State) -> list[State]:
            return [reached for _, reached in self._moves(capacities, state)]

        return (0,) * len(capacities), neighbours, lambda state: target in state

    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        path = _shortest(self._search(entry), rng)
        if path is None:
            return None
        return self._text(path)

    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        walk = _walk(self._search(entry), rng, length=entry["metadata"]["puzzle"]["min_moves"])
        if not walk:
            return None
        return self._text(walk)

    @staticmethod
    def _text(states: Sequence[State]) -> str:
        return "\n".join("".join(map(str, state)) for state in states)


# ---------------------------------------------------------------------------------------------------------------------

Cell = tuple[int, int]
# Digit that the form writes for each mark of the package: a free cell, a wall, the start and the end.
DIGITS = {"O": "0", "X": "1", "*": "2", "#": "3"}
DIRECTIONS = {(0, 1): "right", (1, 0): "down", (0, -1): "left", (-1, 0): "up"}
INFEASIBLE = "infeasible"  # the package's answer if there is no path
NO_PATH = "none"  # the form's answer if there is no path


class ShortestPathForm(Form):
    """
    Path through a grid from the cell 2 to the cell 3, around walls (1). The answer is the row and the column after
    each step.

    Rows and columns count from 1: `21` is the first cell of the second row. Each cell must be a neighbour of the
    previous cell, and must not be a wall. `none` means that there is no path. Only a shortest path solves the task.
    """

    config = dict(min_rows=4, max_rows=4, min_cols=4, max_cols=4, p_blocked=0.3)

    def question(self, entry: Entry) -> str:
        matrix = entry["metadata"]["matrix"]
        if len(matrix) > 9 or len(matrix[0]) > 9:
            raise ValueError(
                f'form="steps" of shortest_path takes at most 9 rows and columns; this grid has {len(matrix)} rows '
                f"and {len(matrix[0])} columns. Set max_rows and max_cols to at most 9."
            )
        lines = ["2 to 3:"]
        for row in matrix:
            lines.append("".join(DIGITS[cell] for cell in row))
        return "\n".join(lines)

    @staticmethod
    def _find(matrix: Sequence[Sequence[str]], mark: str) -> Cell:
        for row_index, row in enumerate(matrix):
            if mark in row:
                return row_index, row.index(mark)
        raise ValueError(f"The grid has no cell {mark!r}.")

    def answer(self, text: str, entry: Entry) -> str | None:
        lines = _lines(text)
        if lines == [NO_PATH]:
            return INFEASIBLE
        start, neighbours, _ = self._search(entry)
        cells = [start]
        for line in lines:
            if re.fullmatch("[1-9][1-9]", line) is None:
                return None
            cell = (int(line[0]) - 1, int(line[1]) - 1)
            if cell not in neighbours(cells[-1]):
                return None
            cells.append(cell)
        steps = []
        for (row, column), (next_row, next_column) in pairwise(cells):
            steps.append(DIRECTIONS[next_row - row, next_column - column])
        return " ".join(steps) or None

    def _search(self, entry: Entry) -> Search[Cell]:
        matrix = entry["metadata"]["matrix"]
        end = self._find(matrix, "#")

        def neighbours(cell: Cell) -> list[Cell]:
            found = []
            for down, right in DIRECTIONS:
                row, column = cell[0] + down, cell[1] + right
                is_inside = 0 <= row < len(matrix) and 0 <= column < len(matrix[0])
                if is_inside and matrix[row][column] != "X":
                    found.append((row, column))
            return found

        return self._find(matrix, "*"), neighbours, lambda cell: cell == end

    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        path = _shortest(self._search(entry), rng)
        if path is None:
            return NO_PATH
        return self._text(path)

    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        path = _shortest(self._search(entry), rng)
        if path is None:
            length = rng.randint(2, 6)  # there is no path, so every walk is a wrong answer
        else:
            length = len(path)
        walk = _walk(self._search(entry), rng, length=length)
        # If there is a path, `none` is a wrong answer too. Use it sometimes, and whenever there is no walk.
        if path is not None and (not walk or rng.random() < 0.1):
            return NO_PATH
        if not walk:
            return None
        return self._text(walk)

    @staticmethod
    def _text(cells: Sequence[Cell]) -> str:
        return "\n".join(f"{row + 1}{column + 1}" for row, column in cells)


# ---------------------------------------------------------------------------------------------------------------------


@cache
def _word_graph(length: int) -> dict[str, list[str]]:
    """Map each of the package's words with `length` letters to the words that differ from it in one letter. All words
    are in lower case."""
    from reasoning_gym.algorithmic.word_ladder import WordLadderConfig, WordLadderDataset

    config = WordLadderConfig(min_word_length=length, max_word_length=length, seed=0, size=1)
    graph = WordLadderDataset(config).word_graphs[length]
    lowered = {}
    for word in sorted(graph):
        lowered[word.lower()] = sorted(neighbour.lower() for neighbour in graph[word])
    return lowered


class WordLadderForm(Form):
    """
    Word ladder: `Change cat to dog.` is answered by `cot`, `cog` and `dog`, one word per line, without the first word.

    Each word must differ from the previous word in one letter. The form does not check whether a word exists. If the
    package does not know a word, the answer does not solve the task.
    """

    config = dict(min_word_length=3, max_word_length=3, min_chain_length=3, max_chain_length=5)

    def question(self, entry: Entry) -> str:
        metadata = entry["metadata"]
        return f"Change {metadata['start_word'].lower()} to {metadata['end_word'].lower()}."

    def answer(self, text: str, entry: Entry) -> str | None:
        words = [entry["metadata"]["start_word"].lower()]
        for line in _lines(text):
            if re.fullmatch(rf"[a-z]{{{len(words[0])}}}", line) is None:
                return None
            changed = sum(before != after for before, after in zip(words[-1], line, strict=True))
            if changed != 1:
                return None
            words.append(line)
        if len(words) == 1:
            return None
        return ",".join(words).upper()

    @staticmethod
    def _search(entry: Entry) -> Search[str]:
        metadata = entry["metadata"]
        start, end = metadata["start_word"].lower(), metadata["end_word"].lower()
        graph = _word_graph(len(start))
        return start, lambda word: graph[word], lambda word: word == end

    def right_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        path = _shortest(self._search(entry), rng)
        if path is None:
            return None
        return "\n".join(path)

    def wrong_demonstration(self, entry: Entry, rng: random.Random) -> str | None:
        walk = _walk(self._search(entry), rng, length=entry["metadata"]["chain_length"] - 1)
        return "\n".join(walk) or None


# ---------------------------------------------------------------------------------------------------------------------

FORMS: dict[str, Form] = {
    "chain_sum": ChainSumForm(),
    "countdown": CountdownForm(),
    "jugs": JugsForm(),
    "shortest_path": ShortestPathForm(),
    "word_ladder": WordLadderForm(),
}

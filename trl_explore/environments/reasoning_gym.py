r"""Tasks of the package reasoning-gym: rows, and a reward function that calls the package's own `score_answer`.

```python
>>> from trl import GRPOConfig, GRPOTrainer
>>> from trl_explore.environments import ReasoningGymSpec

>>> spec = ReasoningGymSpec("countdown", min_numbers=3, max_numbers=3)
>>> trainer = GRPOTrainer(
...     model="Qwen/Qwen2.5-0.5B-Instruct",
...     args=GRPOConfig(**spec.options),
...     train_dataset=spec.train_dataset,
...     eval_dataset=spec.eval_dataset,
...     reward_funcs=spec.reward_funcs,
... )
```
"""

import json
import random
import re
import traceback
from collections.abc import Mapping, Sequence
from datetime import date, time
from functools import cached_property
from typing import Any

from datasets import Dataset, Features, Value

from trl_explore.environments.forms import FORMS, Form
from trl_explore.environments.gym_worker import decode, field_defaults, make_data_set, worker
from trl_explore.names import unknown_name
from trl_explore.rewards.answers import BOXED, completion_text

SOURCE = "reasoning_gym"
SEED_OFFSET = 1_000_000  # difference between the default seed of the evaluation rows and the seed of the training rows
MAX_SEED = 2**31 - 1
# Number of questions to try before an error says that the data set has too few different questions.
TRIES_PER_ROW = 10  # per evaluation row
MIN_TRIES = 200  # in total, at least
MAX_BOXES = 20  # number of boxes to try, from the last one backwards, until one is closed

ANSWER_IN = {
    "tags": "Write your final answer between <answer> and </answer>.",
    "boxed": r"Write your final answer in \boxed{}.",
    "last_line": "Write your final answer alone in the last line.",
    "completion": "Write the answer and nothing else.",
}
FORM_NAMES = ("package", "steps")

# Data sets that cannot be trained on, each with the reason.
REFUSED = {
    "composite": "it mixes other data sets; make one spec for each of them, join their rows with "
    "datasets.concatenate_datasets, and give the trainer the reward functions of all specs",
    "game_of_life_halting": "the package scores every answer that is not empty with 1.0, so there is nothing to learn",
}

FEATURES = Features(
    {
        "prompt": [{"role": Value("string"), "content": Value("string")}],
        "question": Value("string"),
        "answer": Value("string"),
        "metadata": Value("string"),
        "dataset": Value("string"),
    }
)


def find_answer(text: str, answer_in: str) -> str | None:
    r"""
    Return the final answer in a completion.

    Args:
        text (`str`):
            Text of the completion.
        answer_in (`str`):
            `"tags"`: between the last `<answer>` and `</answer>`. `"boxed"`: in the last `\boxed{}` that is closed.
            `"last_line"`: the last line that is not empty. `"completion"`: the whole text.

    Returns:
        `str` or `None`: The answer without white space around it. `None` if the tags or the box are missing or not
        closed, or if the text is empty. Empty tags and an empty box give an empty text.
    """
    if answer_in == "tags":
        before, end_tag, _ = text.rpartition("</answer>")
        _, start_tag, answer = before.rpartition("<answer>")
        if not end_tag or not start_tag:
            return None
        return answer.strip()
    if answer_in == "boxed":
        return _last_box(text)
    if answer_in == "last_line":
        text = text.strip().rpartition("\n")[2]
    return text.strip() or None


def _last_box(text: str) -> str | None:
    # answers.extract_answer reads boxes of at most 500 characters, and solved grids are longer.
    last_boxes = list(BOXED.finditer(text))[-MAX_BOXES:]
    for mark in reversed(last_boxes):
        depth = 1
        for brace in re.finditer(r"[{}]", text[mark.end() :]):
            if brace.group() == "{":
                depth += 1
            else:
                depth -= 1
            if depth == 0:
                return text[mark.end() : mark.end() + brace.start()].strip()
    return None


class ReasoningGymReward:
    """
    Reward function for TRL: the package's score of the answer in each completion.

    The object can be pickled. It reads the columns `question`, `answer`, `metadata` and `dataset` of the rows.

    Args:
        name (`str`):
            Name of the data set.
        config (`Mapping`):
            Fields of the data set's configuration, as JSON values.
        answer_in (`str`):
            Position of the answer in a completion, as in [`find_answer`].
        form (`str`):
            `"package"` or `"steps"`.
    """

    def __init__(self, name: str, config: Mapping[str, Any], answer_in: str, form: str) -> None:
        self.name = name
        self.config = dict(config)
        self.answer_in = answer_in
        self.form = form
        self.__name__ = f"{SOURCE}_{name}"

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        question: Sequence[str] | None = None,
        answer: Sequence[str | None] | None = None,
        metadata: Sequence[str] | None = None,
        dataset: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Score completions.

        Args:
            completions (`list[str]` or `list[list[dict]]`):
                Completions, plain or as messages. In a list of messages, the last one is scored.
            question (`list[str]`):
                Column of the rows: the package's question.
            answer (`list[str]`):
                Column of the rows: the package's answer, or `None` if it gives none.
            metadata (`list[str]`):
                Column of the rows: the package's metadata as text.
            dataset (`list[str]`):
                Column of the rows: name of the data set.
            **kwargs:
                Other columns and arguments that TRL passes. They are ignored.

        Returns:
            `list[float | None]`: Scores, in most data sets between 0 and 1. With the form `"steps"`, 1.0 or 0.0. The
            score is `None` for rows of other data sets. TRL leaves `None` out of a row's total reward, so one data set
            can mix rows of several specs.

        Raises:
            ValueError: If the rows lack a column.
        """
        columns = {"question": question, "answer": answer, "metadata": metadata, "dataset": dataset}
        missing = [column for column, values in columns.items() if values is None]
        if missing:
            raise ValueError(
                f"{self.__name__} reads the column `{missing[0]}`, which the rows do not have. "
                "Train on the rows of ReasoningGymSpec.train_dataset, and keep their columns."
            )
        scores: list[float | None] = []
        for index, completion in enumerate(completions):
            row = {column: values[index] for column, values in columns.items() if values is not None}
            score = None
            if row["dataset"] == self.name:
                score = self.score(completion_text(completion), row)
            scores.append(score)
        return scores

    def score(self, text: str, row: Mapping[str, Any]) -> float:
        """
        Score one completion.

        Args:
            text (`str`):
                Text of the completion.
            row (`Mapping`):
                Row with `question`, `answer` and `metadata`.

        Returns:
            `float`: The score.
        """
        if self.form == "package":
            return worker().score(self.name, self.config, find_answer(text, self.answer_in), row)
        given = FORMS[self.name].answer(text, entry_of(row))
        if given is None:
            return 0.0
        # For some wrong answers, the package gives a part of the full score. That would reward an answer that only
        # follows the form. So count only the full score.
        return float(worker().score(self.name, self.config, given, row) == 1.0)


def entry_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the package's entry of a row: `question`, `answer` and the decoded `metadata`."""
    return {"question": row["question"], "answer": row["answer"], "metadata": decode(row["metadata"])}


class ReasoningGymSpec:
    r"""
    A task of reasoning-gym for `GRPOTrainer` and its subclasses.

    Install the package with `pip install "trl-explore[reasoning-gym]"`.

    Args:
        name (`str`):
            Name of a data set of reasoning-gym, such as `countdown`.
        size (`int`, *optional*, defaults to `1000`):
            Number of training rows.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the training rows.
        eval_size (`int`, *optional*, defaults to `128`):
            Number of evaluation rows.
        eval_seed (`int`, *optional*):
            Seed of the evaluation rows. `None` uses `seed` plus a million. The evaluation rows leave out the questions
            of training rows.
        answer_in (`str`, *optional*, defaults to `"tags"`):
            Position of the answer in a completion: `"tags"` (between `<answer>` and `</answer>`), `"boxed"` (in
            `\boxed{}`), `"last_line"` or `"completion"`. A sentence at the end of each question asks for this
            position.
        form (`str`, *optional*, defaults to `"package"`):
            `"package"`: the package's questions and answers. `"steps"`: short questions for small models. The model
            then answers in short lines, and each line is checked. Only some data sets have the form `"steps"`. It sets
            fields of `config` that give easy problems, and your own fields override them.
        system_prompt (`str`, *optional*):
            Text of a system message before each question.
        **config:
            Fields of the data set's own configuration, such as `min_numbers=3`.

    Raises:
        ImportError: If reasoning-gym is not installed.
        ValueError: If an argument is wrong, or the data set cannot be used.

    Example:
    ```python
    >>> spec = ReasoningGymSpec("countdown", form="steps", size=2)
    >>> spec.train_dataset[0]["prompt"]
    [{'role': 'user', 'content': 'Use 14, 9, 2 to make 63.'}]
    ```
    """

    environment_factory = None

    def __init__(
        self,
        name: str,
        *,
        size: int = 1000,
        seed: int = 0,
        eval_size: int = 128,
        eval_seed: int | None = None,
        answer_in: str = "tags",
        form: str = "package",
        system_prompt: str | None = None,
        **config: Any,
    ) -> None:
        _check_name(name)
        _check_number("size", size, 1)
        _check_number("seed", seed, 0)
        _check_number("eval_size", eval_size, 1)
        if eval_seed is None:
            eval_seed = (seed + SEED_OFFSET) % MAX_SEED
        _check_number("eval_seed", eval_seed, 0)
        _check_choice("answer_in", answer_in, tuple(ANSWER_IN))
        _check_choice("form", form, FORM_NAMES)
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise ValueError(f"`system_prompt` is {system_prompt!r}; write a text.")
        self._form: Form | None = None
        if form == "steps":
            self._form = _steps_form(name, answer_in)
            config = {**self._form.config, **config}
        self._name = name
        self._size, self._seed = size, seed
        self._eval_size, self._eval_seed = eval_size, eval_seed
        self._answer_in = answer_in
        self._system_prompt = system_prompt
        self.config = _checked_config(name, config, seed, size)

    @property
    def name(self) -> str:
        """`reasoning_gym:` and the name of the data set."""
        return f"{SOURCE}:{self._name}"

    @cached_property
    def train_dataset(self) -> Dataset:
        """Training rows: a conversational `prompt`, and columns of text that the reward function reads."""
        return self._dataset(self._train_rows)

    @cached_property
    def eval_dataset(self) -> Dataset:
        """Evaluation rows with the same columns. Each question occurs once, and none is the question of a training
        row."""
        seen = {self._key(row) for row in self._train_rows}
        rows: list[dict[str, Any]] = []
        tries = max(MIN_TRIES, TRIES_PER_ROW * self._eval_size)
        for start in range(0, tries, self._eval_size):
            # The package generates row i with the seed `seed + i`. So this seed gives the rows that follow.
            seed = self._eval_seed + start
            for row in worker().rows(self._name, self.config, seed=seed, size=self._eval_size):
                key = self._key(row)
                if key not in seen and len(rows) < self._eval_size:
                    seen.add(key)
                    rows.append(row)
            if len(rows) == self._eval_size:
                return self._dataset(rows)
        raise ValueError(
            f"{self.name} gives only {len(rows)} questions that are not among the {self._size} training rows, and "
            f"`eval_size` is {self._eval_size}. Lower `size` or `eval_size`, or set fields of the data set so that it "
            "has more questions."
        )

    @cached_property
    def reward_funcs(self) -> ReasoningGymReward:
        """Reward function. Its name in TRL's metrics is `reasoning_gym_NAME`."""
        form = "package" if self._form is None else "steps"
        return ReasoningGymReward(self._name, self.config, self._answer_in, form)

    def answer_fn(self, text: str) -> str | None:
        """
        Return the answer in a completion, for which `maj@k` counts the completion as a vote.

        Args:
            text (`str`):
                Text of a completion.

        Returns:
            `str` or `None`: The answer, see [`find_answer`]. With the form `"steps"`, the whole text.
        """
        if self._form is None:
            return find_answer(text, self._answer_in)
        return text.strip() or None

    @property
    def options(self) -> dict[str, Any]:
        """Values of fields of `GRPOConfig` that suit the task."""
        if self._form is None:
            return {"max_completion_length": 1024}
        return {"max_completion_length": self._form.max_completion_length}

    @property
    def step_delimiters(self) -> list[str] | None:
        """Texts that end a step of an answer. They are `None` for the form `"package"`, because its answers have no
        common format."""
        if self._form is None:
            return None
        return list(self._form.step_delimiters)

    def demonstration(self, row: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """
        Write a demonstration for a row.

        Args:
            row (`Mapping`):
                A row of this spec.
            rng (`random.Random`):
                Source of randomness.

        Returns:
            `dict`: A row of `SFTTrainer`: the row's `prompt`, and a `completion` of one message. About half of the
            demonstrations solve the task. With the form `"package"`, a demonstration holds only an answer: the answer
            of this row, or the answer of a random training row.

        Raises:
            ValueError: If the data set has no answers.
        """
        if self._form is None:
            text = self._marked_answer(row, rng)
        else:
            text = self._form.demonstration(entry_of(row), rng)
        return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": text}]}

    @cached_property
    def _train_rows(self) -> list[dict[str, Any]]:
        return worker().rows(self._name, self.config, seed=self._seed, size=self._size)

    def _dataset(self, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        return Dataset.from_list([self._row(row) for row in rows], features=FEATURES)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self._form is None:
            content = f"{row['question'].rstrip()}\n\n{ANSWER_IN[self._answer_in]}"
        else:
            content = self._form.question(entry_of(row))
        prompt = [{"role": "user", "content": content}]
        if self._system_prompt is not None:
            prompt.insert(0, {"role": "system", "content": self._system_prompt})
        return {"prompt": prompt, **row, "dataset": self._name}

    def _key(self, row: Mapping[str, Any]) -> str:
        if self._form is None:
            return row["question"]
        return self._form.key(entry_of(row))

    def _marked_answer(self, row: Mapping[str, Any], rng: random.Random) -> str:
        if row["answer"] is None:
            raise ValueError(
                f"{self.name} has no demonstrations: the package gives no answers, only a check of answers. "
                f'Data sets with demonstrations of their own, form="steps": {", ".join(FORMS)}.'
            )
        answer = row["answer"]
        if rng.random() < 0.5:
            answer = rng.choice(self._train_rows)["answer"]
        if self._answer_in == "tags":
            return f"<answer>{answer}</answer>"
        if self._answer_in == "boxed":
            return rf"\boxed{{{answer}}}"
        return answer


def list_names() -> list[str]:
    """
    Return the names of the data sets that [`ReasoningGymSpec`] accepts, in alphabetical order.

    Returns:
        `list[str]`: The names.

    Raises:
        ImportError: If reasoning-gym is not installed.
    """
    return sorted(_registry().keys() - REFUSED.keys())


def _registry() -> dict[str, tuple[type, type]]:
    """Return the package's data sets, each with the classes of the data set and its configuration."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            f'ReasoningGymSpec needs the package reasoning-gym: pip install "trl-explore[reasoning-gym]" ({error})'
        ) from error
    return DATASETS


def _check_name(name: str) -> None:
    known = _registry()
    if name not in known:
        raise ValueError(unknown_name("data set of reasoning-gym", str(name), known.keys() - REFUSED.keys()))
    if name in REFUSED:
        raise ValueError(f"{SOURCE}:{name} cannot be used: {REFUSED[name]}.")


def _check_number(field: str, value: object, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= MAX_SEED:
        raise ValueError(f"`{field}` is {value!r}; write a whole number from {smallest} to {MAX_SEED}.")


def _check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(unknown_name(f"value of `{field}`", str(value), choices))


def _steps_form(name: str, answer_in: str) -> Form:
    if name not in FORMS:
        raise ValueError(
            f'{SOURCE}:{name} has no form="steps"; data sets that have it: {", ".join(FORMS)}. '
            'Use form="package" for the others.'
        )
    if answer_in != "tags":
        raise ValueError(f'`answer_in` is {answer_in!r}, but form="steps" reads the whole completion; leave it out.')
    return FORMS[name]


def _checked_config(name: str, config: Mapping[str, Any], seed: int, size: int) -> dict[str, Any]:
    """Return the fields as JSON values. Raise a ValueError if the package does not accept them."""
    defaults = field_defaults(_registry()[name][1])
    checked = {}
    for field, value in config.items():
        if field not in defaults:
            raise ValueError(f"{SOURCE}:{name}: {unknown_name('field', field, defaults)}")
        checked[field] = _checked_value(name, field, value, defaults[field])
    try:
        make_data_set(name, checked, seed=seed, size=size)
    except Exception as error:
        raise ValueError(f"{SOURCE}:{name} refuses its fields: {_error_message(error)}") from error
    return checked


def _checked_value(name: str, field: str, value: Any, default: Any) -> Any:
    """Return the value of a field as a JSON value. Raise a ValueError if its type is wrong, or not a type of JSON."""
    if isinstance(value, (date, time)):
        value = value.isoformat()
    if default is not None and not _has_type_of(default, value):
        raise ValueError(f"{SOURCE}:{name}: `{field}` is {value!r}; its type must be {type(default).__name__}.")
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise ValueError(
            f"{SOURCE}:{name}: `{field}` is {value!r}; write it with numbers, texts, lists and mappings."
        ) from None


def _has_type_of(default: Any, value: Any) -> bool:
    """Return whether `value` has the type that a field with this default needs. The package itself checks fields whose
    defaults are not numbers, strings or lists."""
    if isinstance(value, bool) or isinstance(default, bool):  # in Python, a bool is also an int
        return isinstance(value, bool) and isinstance(default, bool)
    kind = type(default)
    if kind is float:
        return isinstance(value, (int, float))
    if kind in (list, tuple):
        return isinstance(value, (list, tuple))
    if kind in (int, str):
        return isinstance(value, kind)
    return True


def _error_message(error: Exception) -> str:
    """Return the message of the package's error in one line. If the message is empty, as for an `assert` without a
    text, return the line of code that failed."""
    text = " ".join(str(error).split())
    if not text:
        text = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    return text.rstrip(".") + "."

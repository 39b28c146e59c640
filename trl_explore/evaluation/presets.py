"""Named benchmarks: the location of a dataset, and the conversion of its rows to prompts with gold answers."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.names import unknown_name

if TYPE_CHECKING:
    from datasets import Dataset

FOLDER = Path(__file__).parent / "benchmarks"


@dataclass(frozen=True)
class Preset:
    """Settings of a benchmark, from `benchmarks/*.yaml` of this package or from a user's YAML file."""

    path: str  # Hub name, folder or file of the dataset
    question: Sequence[str]  # columns of the question, in order; empty cells are left out
    # Column of the gold answer: a text, a number, a letter, or a list of which all elements are required. With
    # `wrong_answers`, the text of the right choice.
    answer: str
    config: str | None = None
    split: str = "test"
    choices: str | None = None  # column with the list of choices, which get the letters A, B, ...
    # Columns of the wrong answers, one answer each. They are shuffled with the right one; the question is the seed.
    wrong_answers: Sequence[str] = ()
    instruction: str = ""  # appended to the question, after an empty line
    system_prompt: str | None = None
    reward: str = "accuracy_reward"  # a name that `trl-explore train` takes
    num_samples: int = 4
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 4096


def preset_names() -> list[str]:
    """Return the sorted names of the package's benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str | Path) -> Preset:
    """
    Load a benchmark.

    Args:
        name (`str` or `Path`):
            Name of a benchmark of the package, or a YAML file.

    Returns:
        `Preset`: Its settings.

    Raises:
        `ValueError`: If the name is unknown, or the file cannot be read or has missing or unknown fields.
    """
    import yaml

    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if name not in preset_names():
            raise ValueError(unknown_name("preset", str(name), preset_names()))
        path = FOLDER / f"{name}.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    known = [field.name for field in fields(Preset)]
    if not isinstance(values, dict) or not {"path", "question", "answer"} <= values.keys():
        raise ValueError(f"{path} must have at least the fields path, question and answer, out of {known}.")
    for field in values.keys() - set(known):
        raise ValueError(f"{path}: {unknown_name('field', str(field), known)}")
    for field in ("question", "wrong_answers"):
        if isinstance(values.get(field), str):
            values[field] = [values[field]]
    return Preset(**values)


def as_prompts(rows: "Dataset", preset: Preset) -> "Dataset":
    """
    Convert rows of a benchmark to prompts.

    Args:
        rows ([`~datasets.Dataset`]):
            Rows of the benchmark's dataset.
        preset (`Preset`):
            Settings of the benchmark.

    Returns:
        [`~datasets.Dataset`]: A conversational `prompt` and a gold `answer` for each row.

    Raises:
        `ValueError`: If a column that the benchmark names is missing.
    """
    from datasets import Dataset

    needed = [*preset.question, preset.answer, *preset.wrong_answers]
    if preset.choices is not None:
        needed.append(preset.choices)
    for column in needed:
        if column not in rows.column_names:
            raise ValueError(f"{unknown_name('column', column, rows.column_names)} There are {rows.column_names}.")

    return Dataset.from_list([_as_prompt(row, preset) for row in rows])


def _as_prompt(row: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Return the `prompt` and the gold `answer` of one row. If there are choices, the prompt lists them with letters.
    With `wrong_answers`, the answer is the letter of the right choice."""
    question = "\n\n".join(str(row[column]).strip() for column in preset.question if row[column])
    answer: Any = row[preset.answer]
    choices: list[Any] = []
    if preset.wrong_answers:
        right = str(answer).strip()
        choices = [right, *(str(row[column]).strip() for column in preset.wrong_answers)]
        random.Random(question).shuffle(choices)
        answer = string.ascii_uppercase[choices.index(right)]
    elif preset.choices:
        choices = row[preset.choices]
    lines = []
    for letter, choice in zip(string.ascii_uppercase, choices, strict=False):
        lines.append(f"{letter}. {choice}")
    parts = [question, "\n".join(lines), preset.instruction]
    messages = [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
    if preset.system_prompt:
        messages.insert(0, {"role": "system", "content": preset.system_prompt})
    return {"prompt": messages, "answer": _gold(answer)}


def _gold(answer: Any) -> str:
    """Return the gold answer as text. A list becomes one boxed answer with all elements; their order is free."""
    if not isinstance(answer, list):
        return str(answer)
    if len(answer) == 1:
        return str(answer[0])
    return rf"\boxed{{{', '.join(map(str, answer))}}}"

"""Benchmarks by name: where a data set is, and how its rows become prompts with gold answers."""

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
    """How to evaluate on a data set, as `benchmarks/*.yaml` here and a user's own YAML file say it."""

    path: str  # hub name, folder or file
    question: Sequence[str]  # columns of the question, in their order; empty cells are left out
    answer: str  # column: text, number, list (all wanted), letter; with `wrong_answers` the right text
    config: str | None = None
    split: str = "test"
    choices: str | None = None  # column with the list of choices, which get the letters A, B, ...
    wrong_answers: Sequence[str] = ()  # a column each; shuffled with the right one, equal questions equally
    instruction: str = ""  # behind the question, after an empty line
    system_prompt: str | None = None
    reward: str = "accuracy_reward"  # as `trl-explore train` names it
    num_samples: int = 4
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 4096


def preset_names() -> list[str]:
    """Names of the benchmarks that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str | Path) -> Preset:
    """Reads a benchmark, by its name or from a file."""
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
        raise ValueError(f"{path} must have at least the fields path, question and answer: {known} are all.")
    for field in values.keys() - set(known):
        raise ValueError(f"{path}: {unknown_name('field', str(field), known)}")
    question = values["question"]
    return Preset(**values | {"question": [question] if isinstance(question, str) else question})


def as_prompts(rows: "Dataset", preset: Preset) -> "Dataset":
    """Conversational `prompt` and gold `answer` of each row of a benchmark."""
    from datasets import Dataset

    needed = [*preset.question, preset.answer, *preset.wrong_answers, *filter(None, [preset.choices])]
    for column in needed:
        if column not in rows.column_names:
            raise ValueError(f"{unknown_name('column', column, rows.column_names)} There are {rows.column_names}.")

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        question = "\n\n".join(str(row[column]).strip() for column in preset.question if row[column])
        answer, choices = row[preset.answer], row[preset.choices] if preset.choices else []
        if preset.wrong_answers:
            right = str(answer).strip()
            choices = [right, *(str(row[column]).strip() for column in preset.wrong_answers)]
            random.Random(question).shuffle(choices)
            answer = string.ascii_uppercase[choices.index(right)]
        listed = "\n".join(
            f"{letter}. {choice}" for letter, choice in zip(string.ascii_uppercase, choices, strict=False)
        )
        user = "\n\n".join(filter(None, [question, listed, preset.instruction]))
        system = [{"role": "system", "content": preset.system_prompt}] if preset.system_prompt else []
        return {"prompt": [*system, {"role": "user", "content": user}], "answer": _gold(answer)}

    return Dataset.from_list([convert(row) for row in rows])


def _gold(answer: Any) -> str:
    """The gold answer as the rewards read it; of several, all are wanted, in any order."""
    if isinstance(answer, list):
        return answer[0] if len(answer) == 1 else rf"\boxed{{{', '.join(answer)}}}"
    return str(answer)

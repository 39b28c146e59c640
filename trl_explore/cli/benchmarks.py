"""Data for `trl-explore eval`: benchmarks, copies of benchmarks, tasks, and the user's own data."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_explore.evaluation.presets import Preset, as_prompts, load_preset, preset_names
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import (
    RENAMED_FILE,
    UsageError,
    load_reward_functions,
    load_splits,
    looks_like_path,
    pick_split,
    renaming_command,
)

if TYPE_CHECKING:
    from datasets import Dataset

TASK_PROMPTS = 256
TASK_SAMPLES = 8
# Reward functions that read a marked answer, such as \boxed{7}.
ANSWER_REWARDS = {"accuracy_reward", "reasoning_accuracy_reward", "multiple_choice_reward"}


class Benchmark(NamedTuple):
    """A data set for evaluation, with its reward functions and recommended options."""

    name: str  # name in tables, and name of its folder
    origin: dict[str, str | None]  # path, config and split; for a copy of a benchmark, the path on the Hub
    rows: "Dataset"
    reward_funcs: list[Any]
    answer_fn: Callable[[str], Hashable | None]  # answer of a completion, for votes
    recommended: dict[str, Any]  # recommended fields of `Sampling`
    reads_answers: bool  # True if a reward function reads marked answers: a completion without one is then wrong


def load_benchmarks(args: argparse.Namespace) -> list[Benchmark]:
    """Return the data sets that `--dataset` and `--task` name. Raise a UsageError if two have the same name."""
    if not args.dataset and args.task is None:
        raise UsageError("nothing to evaluate on: pass --dataset gsm8k, or --task reasoning_gym:countdown")
    if args.task_config is not None and args.task is None:
        raise UsageError(f"task_config={args.task_config!r} belongs to a task; name one with --task, or leave it out")
    benchmarks = [load_benchmark(text, args) for text in args.dataset or []]
    if args.task is not None:
        benchmarks.append(_from_run_task(args))
    counts = Counter(benchmark.name for benchmark in benchmarks)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(f"dataset: {count} of them are called {name!r}; evaluate them one by one")
    return benchmarks


def load_benchmark(text: str, args: argparse.Namespace) -> Benchmark:
    """
    Load one data set.

    Args:
        text (`str`):
            Name of a benchmark, `NAME=PATH` for a copy of it, a YAML file that describes a benchmark, name of an
            embedded task, or the user's own data with a column `prompt`.
        args (`argparse.Namespace`):
            Flags of the command.

    Returns:
        [`Benchmark`]: The data set.

    Raises:
        UsageError: If there is no such data set, or it does not fit the flags.
    """
    from trl_explore.tasks import TASKS

    name, equals, copy = text.partition("=")
    if name in preset_names() or Path(name).suffix in (".yaml", ".yml"):
        try:
            preset = load_preset(name)
        except ValueError as error:
            raise UsageError(f"dataset: {error}") from error
        return _from_preset(_label(Path(name).stem), preset, copy or preset.path, args)
    if args.system_prompt is not None:
        raise UsageError(f"system_prompt is for benchmarks; {text!r} has whole prompts: write it into them")
    if text in TASKS:
        return _from_task(text, TASKS[text], args)
    if equals and not looks_like_path(name) and "/" not in name:
        raise UsageError(f"dataset={text!r}: {unknown_name('benchmark', name, preset_names())}")
    if "/" not in text and not looks_like_path(text) and not Path(text).exists():
        raise UsageError(
            f"dataset: {unknown_name('data set', text, [*preset_names(), *TASKS])} Data of your own is named by its "
            "path, ./data.jsonl, or its Hub name, owner/name."
        )
    return _from_own_data(text, args)


def _from_preset(name: str, preset: Preset, path: str, args: argparse.Namespace) -> Benchmark:
    """Load a benchmark from `path`, which may be a copy."""
    rows, _ = _load_rows(name, path, _config(preset.config, path), preset.split, args)
    if args.system_prompt is not None:
        preset = replace(preset, system_prompt=args.system_prompt)
    try:
        prompts = as_prompts(rows, preset)
    except ValueError as error:
        raise UsageError(f"dataset={name!r} ({path}): {error}") from error
    origin = {"path": preset.path, "config": preset.config, "split": args.dataset_split or preset.split}
    graders = args.reward_funcs or [preset.reward]
    fields = ("num_samples", "temperature", "top_p", "max_new_tokens")
    return Benchmark(
        name=name,
        origin=origin,
        rows=prompts,
        reward_funcs=load_reward_functions(graders, None),
        answer_fn=_answer_fn(preset.reward),
        recommended={field: getattr(preset, field) for field in fields},
        reads_answers=bool(ANSWER_REWARDS & {*graders}),
    )


def _config(name: str | None, path: str) -> str | None:
    """Return the configuration to load. None for a local copy that has no such configuration."""
    from datasets import get_dataset_config_names

    local = Path(path).expanduser()
    if name is None or not local.exists():
        return name
    if local.is_dir() and name in get_dataset_config_names(str(local)):
        return name
    return None


def _from_task(name: str, task: Any, args: argparse.Namespace) -> Benchmark:
    try:
        rows = task.evaluation_set(args.limit or TASK_PROMPTS)
    except ValueError as error:
        raise UsageError(f"dataset={name!r}: {error}") from error
    rewards = _rewards_or(args, [task.reward])
    recommended = {"num_samples": TASK_SAMPLES, "max_new_tokens": task.max_completion_length}
    origin: dict[str, str | None] = {"path": name, "config": None, "split": "evaluation"}
    # Each task marks answers differently. By default, votes count whole completions.
    answer_fn = getattr(task, "answer_fn", str.strip)
    return Benchmark(_label(name), origin, rows, rewards, answer_fn, recommended, reads_answers=False)


def _rewards_or(args: argparse.Namespace, default: list[Any]) -> list[Any]:
    """Return the reward functions that `--reward_funcs` names, or `default`."""
    if args.reward_funcs:
        return load_reward_functions(args.reward_funcs, None)
    return default


def _from_run_task(args: argparse.Namespace) -> Benchmark:
    """Return the held-out rows of the task that `--task` names. No training on the task uses these rows."""
    from trl_explore.runs.tasks import find_run_task, read_task_config

    fields = read_task_config(args.task_config)
    task = find_run_task(args.task, fields)
    if task.is_agent:
        raise UsageError(
            f"task={args.task!r} is played with tools, but eval samples completions of one turn: measure the model "
            "with trl-explore compare, or in training with --eval_strategy steps"
        )
    if args.system_prompt is not None:
        raise UsageError(f"system_prompt is for benchmarks; the task {args.task!r} has whole prompts: leave it out")
    if task.has_tiny_model:  # an embedded task, which generates its evaluation set
        return _from_task(args.task, task.task, args)
    rows = task.task.eval_dataset
    rows = rows.select(range(min(args.limit or len(rows), len(rows))))
    rewards = _rewards_or(args, task.reward_funcs)
    recommended: dict[str, Any] = {"num_samples": TASK_SAMPLES}
    if "max_completion_length" in task.options:
        recommended["max_new_tokens"] = task.options["max_completion_length"]
    config = json.dumps(fields) if fields else None
    origin = {"path": args.task, "config": config, "split": "evaluation"}
    return Benchmark(_label(args.task), origin, rows, rewards, task.answer_fn, recommended, reads_answers=False)


def _from_own_data(text: str, args: argparse.Namespace) -> Benchmark:
    """Load the user's own data, which has the columns `prompt` and `answer` or `solution`."""
    rows, origin = _load_rows(text, text, args.dataset_config, "test", args)
    columns = rows.column_names
    if "prompt" not in columns:
        command = renaming_command(text, columns, config=args.dataset_config, split=args.dataset_split or "test")
        raise UsageError(
            f"dataset={text!r} needs a column 'prompt', but has {', '.join(columns)}. Describe the data in a YAML "
            f"file with path, question and answer, or write a file with the column: {command} and pass --dataset "
            f"{RENAMED_FILE}"
        )
    if not args.reward_funcs and not {"answer", "solution"} & set(columns):
        raise UsageError(
            f"dataset={text!r} has no gold answers, a column 'answer' or 'solution', but {', '.join(columns)}: rename "
            "the column, or pass --reward_funcs"
        )
    graders = args.reward_funcs or ["accuracy_reward"]
    name = text
    if looks_like_path(text) or Path(text).exists():
        name = Path(text).stem
    return Benchmark(
        name=_label(name),
        origin=origin,
        rows=rows,
        reward_funcs=load_reward_functions(graders, None),
        answer_fn=_answer_fn(graders[0]),
        recommended={},
        reads_answers=bool(ANSWER_REWARDS & {*graders}),
    )


def _answer_fn(grader: str) -> Callable[[str], Hashable | None]:
    """Return the function that reads answers for votes, which depends on the name of the reward function."""
    from trl_explore.rewards.answers import answer_key, choice_letter

    if grader == "multiple_choice_reward":
        return choice_letter
    return answer_key


def _load_rows(
    name: str, path: str, config: str | None, split: str, args: argparse.Namespace
) -> "tuple[Dataset, dict[str, str | None]]":
    """Return the rows for the evaluation, and their path, config and split."""
    import datasets

    try:
        splits = load_splits(path, config=config, field="dataset")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UsageError(f"dataset={name!r}: {_explain(error, name, path)}") from error
    wanted = args.dataset_split or split
    # Without `--dataset_split`, data with a single split need not call it `split`.
    sole_split_is = None if args.dataset_split else split
    rows = pick_split(splits, wanted, "dataset_split", sole_split_is=sole_split_is)
    if not len(rows):
        raise UsageError(f"dataset={name!r} has no rows")
    origin = {"path": path, "config": config, "split": str(rows.split)}
    return rows.select(range(min(args.limit or len(rows), len(rows)))), origin


def _explain(error: Exception, name: str, path: str) -> str:
    """Return why a data set cannot be loaded, and what to do."""
    copy = "name a copy of it, ./FOLDER"
    if name in preset_names():
        copy = f"pass a copy of it, --dataset {name}=FOLDER"
    if "gated" in str(error).lower():
        return (
            f"{path} is gated: accept its terms on https://huggingface.co/datasets/{path} and log in with "
            f"`hf auth login`, or {copy}"
        )
    if isinstance(error, ConnectionError):
        return (
            f"{path} is not on this machine, and the Hub cannot be reached: run `hf download {path} --repo-type "
            f"dataset --local-dir FOLDER` on a machine that reaches it, then {copy}"
        )
    return f"{path} cannot be loaded: {error}"


def _label(name: str) -> str:
    """Return a name that a folder can have."""
    return re.sub(r"[^\w.-]+", "__", name).strip(".") or "data"

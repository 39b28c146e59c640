"""What a run is made of, by name: the data set, the reward functions, the model folder, the checkpoint to resume."""

import difflib
import inspect
import json
import os
import reprlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.errors import UsageError
from trl_explore.names import FILE_FORMATS, import_named, is_import_path, looks_like_path, prompt_change, unknown_name
from trl_explore.rewards.checks import checked

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from trl import DatasetMixtureConfig, ScriptArguments

RENAMED_FILE = "with_prompt.jsonl"  # what the line of [`renaming_command`] writes
# Weights that `save_model` writes, of a model or of an adapter, in one file or in several.
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
)

RewardFunction = Callable[..., Any]


def missing_path(field: str, path: Path) -> UsageError:
    """The error for a path that is not there, with up to three of a similar name that are."""
    problem = f"{field}={str(path)!r} does not exist (looked from {os.getcwd()})"
    if not path.parent.is_dir():
        return UsageError(f"{problem}: {path.parent} does not exist either")
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()])
    return UsageError(f"{problem}; did you mean {' or '.join(map(repr, near))}?" if near else problem)


def check_output_dir(name: str | Path, field: str = "output_dir") -> Path:
    """The folder, `~` expanded, sure to be writable or to be made; `field` is the flag that names it."""
    folder = Path(name).expanduser()
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        what = "is a file" if nearest == folder else f"cannot be made, because {str(nearest)!r} is a file"
        raise UsageError(f"{field}={str(name)!r} {what}; name a folder with --{field}")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(
            f"{field}={str(name)!r} cannot be written to ({nearest}: {error.strerror}); name another with --{field}"
        ) from error
    return folder


def check_model(name: str | None, *, revision: str | None, trust_remote_code: bool) -> str:
    """The model's name, `~` expanded if it is a folder, once it is sure that it can be found. `smollm2` becomes the
    folder of the model that an installed package contains."""
    from transformers import AutoConfig

    if name is None:
        raise UsageError("model_name_or_path is missing: pass a Hub name or a folder, --model_name_or_path ./my-model")
    from trl_explore.pretrained.smollm2 import find_pretrained

    name = find_pretrained(name)
    path = Path(name).expanduser()
    if looks_like_path(name) and not path.is_dir():
        raise missing_path("model_name_or_path", path)
    name = str(path) if path.is_dir() else name
    try:
        AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"model_name_or_path={name!r} cannot be loaded: {error}") from error
    return name


def load_train_and_eval(
    script_args: "ScriptArguments", mixture: "DatasetMixtureConfig", *, needs_eval: bool
) -> tuple["Dataset", "Dataset | None"]:
    """The train split that the arguments name, and the test split if the run evaluates, else `None`."""
    import datasets
    from trl import get_dataset

    from trl_explore.rows.columns import row_columns

    name = script_args.dataset_name
    if bool(mixture.datasets) == (name is not None):
        raise UsageError("name the data once: either dataset_name (a path or a Hub name) or a `datasets` mixture")
    try:
        options: dict[str, Any] = {
            "config": script_args.dataset_config,
            "streaming": script_args.dataset_streaming,
        }
        splits = get_dataset(mixture) if mixture.datasets else load_splits(str(name), **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        named = "datasets" if mixture.datasets else f"dataset_name={name!r}"
        raise UsageError(f"{named} cannot be loaded: {error}") from error
    train = pick_split(splits, script_args.dataset_train_split, "dataset_train_split", sole_split_is="train")
    columns = row_columns(train)  # None while a streamed data set has not been looked at
    if columns is not None and not columns:  # of a file that is read while it is used
        raise UsageError(f"dataset_name={name!r} has no rows")
    if columns is not None and "prompt" not in columns:
        config, split = script_args.dataset_config, script_args.dataset_train_split
        command = renaming_command(None if mixture.datasets else name, columns, config=config, split=split)
        raise UsageError(
            f"the data needs a column 'prompt', but has {', '.join(columns)}. Write a file with the column: {command} "
            f"and pass --dataset_name {RENAMED_FILE}"
        )
    if not needs_eval:
        return train, None
    remedy = " Or switch evaluation off with --eval_strategy no."
    return train, pick_split(splits, script_args.dataset_test_split, "dataset_test_split", remedy=remedy)


def renaming_command(name: str | None, columns: Sequence[str], *, config: str | None, split: str) -> str:
    """
    Return a line for the shell that writes a copy of the data with a column `prompt`.

    Args:
        name (`str`, *optional*):
            File, folder or Hub name of the data; `None` for a mixture, which the line calls `DATA`.
        columns (`Sequence[str]`):
            Names of the data set's columns, none of them `prompt`.
        config (`str`, *optional*):
            Configuration of a data set of the Hub.
        split (`str`):
            Split that is read.

    Returns:
        `str`: A call of `python` that writes [`RENAMED_FILE`].
    """
    path = Path(name or "DATA").expanduser()
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        function, data = "load_from_disk", f"load_from_disk({json.dumps(str(path))})"
        if (path / "dataset_dict.json").exists():
            data += f"[{json.dumps(split)}]"
    elif path.is_file():
        # A file has one split, which `datasets` calls "train".
        builder = FILE_FORMATS.get(path.suffix, "json")
        function = "load_dataset"
        data = f'load_dataset("{builder}", data_files={json.dumps(str(path))}, split="train")'
    else:
        arguments = [json.dumps(str(path) if path.is_dir() else name or "DATA")]
        if config is not None:
            arguments.append(json.dumps(config))
        function, data = "load_dataset", f"load_dataset({', '.join(arguments)}, split={json.dumps(split)})"
    code = f"from datasets import {function}; {data}{prompt_change(columns)}.to_json({json.dumps(RENAMED_FILE)})"
    return shlex.join(["python", "-c", code])


def load_splits(
    name: str, *, config: str | None = None, streaming: bool = False, field: str = "dataset_name"
) -> "DatasetDict":
    """All splits of a file, a folder (of files or of `save_to_disk`) or a Hub name, which messages call `field`."""
    import datasets

    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise UsageError(f"{field}={name!r}: cannot read {path.suffix!r} files, only {', '.join(FILE_FORMATS)}")
        if not path.stat().st_size:
            raise UsageError(f"{field}={name!r} is empty: it needs at least one row")
        try:
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), streaming=streaming)
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            raise UsageError(f"{field}={name!r} cannot be loaded: {_what_is_wrong(path, error)}") from error
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # written by save_to_disk
            stored = datasets.load_from_disk(str(path))
            return stored if isinstance(stored, datasets.DatasetDict) else datasets.DatasetDict(train=stored)
        name = str(path)
    elif looks_like_path(name):
        raise missing_path(field, path)
    return datasets.load_dataset(name, name=config, streaming=streaming)


def _what_is_wrong(path: Path, error: Exception) -> str:
    """Why a file of data cannot be loaded: for `.jsonl`, the first line that is no JSON object and its fault."""
    if "corresponds to no data" in str(error):
        return "it has no rows"
    if path.suffix != ".jsonl":
        return str(error.__cause__ or error)  # `datasets` hides the cause
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode(errors="replace"))
            except json.JSONDecodeError as fault:
                return f"line {number} is no JSON: {fault.msg}, column {fault.colno}"
            if not isinstance(row, dict):
                return f"line {number} is no JSON object, one row with its columns by name, but {reprlib.repr(row)}"
    return str(error.__cause__ or error)


def pick_split(
    splits: "DatasetDict", name: str, field: str, *, sole_split_is: str | None = None, remedy: str = ""
) -> "Dataset":
    """Takes one split of a data set."""
    if name in splits:
        return splits[name]
    if name == sole_split_is and len(splits) == 1:  # one file called test.jsonl: nothing else can be meant
        return next(iter(splits.values()))
    raise UsageError(f"{field}: {unknown_name('split', name, splits)}{remedy}")


def load_reward_functions(names: list[str] | None, model: str | None) -> list[str | RewardFunction]:
    """What the trainer takes as `reward_funcs`; the functions tell what is wrong with them in one sentence."""
    rewards: list[str | RewardFunction] = [] if model is None else [model]
    named = _named_rewards() if names else {}
    for name in names or []:
        if name in named:
            rewards.append(_told(named[name]))
        elif is_import_path(name):
            rewards.append(_told(user_object("reward_funcs", name, "function", inspect.isfunction)[1]))
        else:
            raise UsageError(
                f"reward_funcs: {unknown_name('reward function', name, named)} "
                "A function of your own is named by its import path, my_module.my_reward."
            )
    if not rewards:
        raise UsageError("no reward: pass --reward_funcs accuracy_reward, my_module.my_reward, or a reward model")
    return rewards


def check_deciding_reward(name: str | None, rewards: Sequence[str | RewardFunction]) -> None:
    """Refuse a `--success_reward` that is not one of the reward functions."""
    from trl.trainer.utils import get_callable_name

    from trl_explore.rewards.success import check_success_reward

    names = [reward.split("/")[-1] if isinstance(reward, str) else get_callable_name(reward) for reward in rewards]
    try:
        check_success_reward(name, names)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _told(func: RewardFunction) -> RewardFunction:
    from trl.trainer.utils import get_callable_name

    return checked(func, get_callable_name(func), tell=True)


def _named_rewards() -> dict[str, RewardFunction]:
    from trl.rewards import (
        accuracy_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )

    import trl_explore.rewards.answers

    trl_rewards: dict[str, RewardFunction] = {
        "accuracy_reward": accuracy_reward,
        "reasoning_accuracy_reward": reasoning_accuracy_reward,
        "think_format_reward": think_format_reward,
        # the same two numbers as `trl grpo`, so that a run file means the same in both
        "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    }
    ours = {
        name: function
        for name, function in inspect.getmembers(trl_explore.rewards.answers, inspect.isfunction)
        if name.endswith("_reward")
    }
    return trl_rewards | ours


def user_object(
    field: str, path: str, kind: str, is_one: Callable[[Any], bool], *, fits: Callable[[Any], bool] = callable
) -> tuple[str, Any]:
    """Return [`~trl_explore.names.import_named`], with a `UsageError` in the place of its error."""
    try:
        return import_named(field, path, kind, is_one, fits=fits)
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_checkpoint(resume: str | bool | None, output_dir: str) -> str | None:
    """Folder of the checkpoint to resume, or `None`."""
    from trl_explore.saving.checkpoints import is_complete, last_complete_checkpoint

    if resume is None or str(resume).lower() == "false":
        return None
    if str(resume).lower() == "true":
        last, skipped = last_complete_checkpoint(output_dir)
        if skipped:
            print(f"trl-explore: passing over {', '.join(skipped)}: not written to the end", file=sys.stderr)
        if last is None:
            raise UsageError(
                f"resume_from_checkpoint=true: no checkpoint in {output_dir!r}; leave it out to start anew"
            )
        return last
    path = Path(str(resume)).expanduser()
    if not is_complete(path):
        raise UsageError(
            f"resume_from_checkpoint={resume!r} is not a checkpoint folder written to the end; pass `true` for "
            f"the last one in {output_dir!r}"
        )
    return str(path)


def check_earlier_run(output_dir: str | Path, *, checkpoint: str | None, model: str | None) -> None:
    """
    Raise where a run that starts at step 0 would overwrite an earlier one in its folder.

    Args:
        output_dir (`str` or `Path`):
            Folder of the new run.
        checkpoint (`str`, *optional*):
            Checkpoint that the run resumes. A run that resumes one of its own folder overwrites nothing.
        model (`str`, *optional*):
            Model that is trained. If it is the model in `output_dir`, the user wants it to be replaced.

    Raises:
        UsageError: If the folder holds checkpoints or a trained model of an earlier run.
    """
    from trl_explore.saving.checkpoints import checkpoint_folders, last_complete_checkpoint

    folder = Path(output_dir).expanduser().resolve()
    if checkpoint is not None and Path(checkpoint).expanduser().resolve().parent == folder:
        return
    found = _describe_earlier_run(folder)
    trains_own_model = model is not None and Path(model).expanduser().resolve() == folder
    if found is None or (trains_own_model and not checkpoint_folders(folder)):
        return
    resumable = last_complete_checkpoint(folder)[0] is not None
    resume = "to continue that run, add --resume_from_checkpoint true; " if resumable else ""
    raise UsageError(
        f"output_dir={str(output_dir)!r} holds {found} of an earlier run, which this run would overwrite: {resume}to "
        "start a new run, name another folder with --output_dir, or add --overwrite_output_dir"
    )


def _describe_earlier_run(folder: Path) -> str | None:
    """Return what an earlier run has left in a folder that a new run would overwrite, or None if there is nothing.
    Logs, tables and cards do not count."""
    from trl_explore.saving.checkpoints import checkpoint_folders

    found = []
    checkpoints = checkpoint_folders(folder)
    if checkpoints:
        found.append(checkpoints[0].name if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints")
    if any((folder / name).is_file() for name in MODEL_FILES):
        found.append("a trained model")
    return " and ".join(found) or None

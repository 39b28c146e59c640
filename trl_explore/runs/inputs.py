"""Inputs of a run, found by name: the data set, the reward functions, the model folder, the checkpoint to resume."""

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

RENAMED_FILE = "with_prompt.jsonl"  # file that the shell command of [`renaming_command`] writes
# Files of weights that `save_model` writes for a model or an adapter. An index belongs to weights in several files.
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
    """Return the error for a path that does not exist. It names up to three existing paths with similar names."""
    problem = f"{field}={str(path)!r} does not exist (looked from {os.getcwd()})"
    if not path.parent.is_dir():
        return UsageError(f"{problem}: {path.parent} does not exist either")
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()])
    if near:
        problem = f"{problem}; did you mean {' or '.join(map(repr, near))}?"
    return UsageError(problem)


def check_output_dir(name: str | Path, field: str = "output_dir") -> Path:
    """
    Check that a folder is writable, or can be created, and return it with `~` expanded.

    Args:
        name (`str` or `Path`):
            The folder.
        field (`str`, *optional*, defaults to `"output_dir"`):
            Flag that names the folder, for error messages.

    Raises:
        UsageError: If the path is a file, or the folder cannot be created or written to.
    """
    folder = Path(name).expanduser()
    # The folder itself, or the nearest of its parents that exists.
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        problem = "is a file"
        if existing != folder:
            problem = f"cannot be made, because {str(existing)!r} is a file"
        raise UsageError(f"{field}={str(name)!r} {problem}; name a folder with --{field}")
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UsageError(
            f"{field}={str(name)!r} cannot be written to ({existing}: {error.strerror}); name another with --{field}"
        ) from error
    return folder


def check_model(name: str | None, *, revision: str | None, trust_remote_code: bool) -> str:
    """
    Check that a model can be found, and return its name, or its folder with `~` expanded.

    Args:
        name (`str`, *optional*):
            Hub name, folder, or `smollm2` for the model that an installed package contains.
        revision (`str`, *optional*):
            Revision on the Hub.
        trust_remote_code (`bool`):
            If `True`, allow models with code of their own.

    Raises:
        UsageError: If `name` is None or the model cannot be found.
    """
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
    """
    Load the training split that the arguments name, and the test split if the run evaluates.

    Args:
        script_args ([`~trl.ScriptArguments`]):
            Names of the data set and its splits.
        mixture ([`~trl.DatasetMixtureConfig`]):
            A mixture of data sets, which may replace the data set of `script_args`.
        needs_eval (`bool`):
            If `True`, load the test split.

    Returns:
        `tuple[Dataset, Dataset | None]`: Training split, and test split or None.

    Raises:
        UsageError: If the data cannot be loaded, has no rows or no column `prompt`, or a split is missing.
    """
    import datasets
    from trl import get_dataset

    from trl_explore.rows.columns import row_columns

    name = script_args.dataset_name
    has_name, has_mixture = name is not None, bool(mixture.datasets)
    if has_name == has_mixture:  # both, or none
        raise UsageError("name the data once: either dataset_name (a path or a Hub name) or a `datasets` mixture")
    options: dict[str, Any] = {"config": script_args.dataset_config, "streaming": script_args.dataset_streaming}
    try:
        splits = get_dataset(mixture) if has_mixture else load_splits(str(name), **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        named = "datasets" if has_mixture else f"dataset_name={name!r}"
        raise UsageError(f"{named} cannot be loaded: {error}") from error
    train = pick_split(splits, script_args.dataset_train_split, "dataset_train_split", sole_split_is="train")
    columns = row_columns(train)  # None for a streamed data set whose columns are not known before it is read
    is_empty = not isinstance(train, datasets.IterableDataset) and len(train) == 0
    if is_empty or (columns is not None and not columns):  # without columns: a streamed file without rows
        raise UsageError(f"dataset_name={name!r} has no rows")
    if columns is not None and "prompt" not in columns:
        config, split = script_args.dataset_config, script_args.dataset_train_split
        command = renaming_command(name, columns, config=config, split=split)  # `name` is None for a mixture
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
            File, folder or Hub name of the data. For a mixture it is `None`, and the line contains the placeholder
            `DATA`.
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
        source = str(path) if path.is_dir() else (name or "DATA")
        arguments = [json.dumps(source)]
        if config is not None:
            arguments.append(json.dumps(config))
        function, data = "load_dataset", f"load_dataset({', '.join(arguments)}, split={json.dumps(split)})"
    code = f"from datasets import {function}; {data}{prompt_change(columns)}.to_json({json.dumps(RENAMED_FILE)})"
    return shlex.join(["python", "-c", code])


def load_splits(
    name: str, *, config: str | None = None, streaming: bool = False, field: str = "dataset_name"
) -> "DatasetDict":
    """
    Load all splits of a data set.

    Args:
        name (`str`):
            A file, a folder (with files, or written by `save_to_disk`) or a Hub name.
        config (`str`, *optional*):
            Configuration of a data set of the Hub.
        streaming (`bool`, *optional*, defaults to `False`):
            If `True`, read rows only when they are used.
        field (`str`, *optional*, defaults to `"dataset_name"`):
            Flag that names the data set, for error messages.

    Raises:
        UsageError: If a file or folder does not exist, or a file cannot be read.
    """
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
            try:
                stored = datasets.load_from_disk(str(path))
            except IndexError:  # a data set or a split that was saved without rows
                raise UsageError(f"{field}={name!r} has no rows") from None
            if isinstance(stored, datasets.DatasetDict):
                return stored
            return datasets.DatasetDict(train=stored)
        name = str(path)
    elif looks_like_path(name):
        raise missing_path(field, path)
    return datasets.load_dataset(name, name=config, streaming=streaming)


def _what_is_wrong(path: Path, error: Exception) -> str:
    """Return the reason why a file of data cannot be loaded. For `.jsonl`, it names the first faulty line."""
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
    """
    Return one split of a data set.

    Args:
        splits (`DatasetDict`):
            All splits.
        name (`str`):
            Name of the split.
        field (`str`):
            Flag that names the split, for error messages.
        sole_split_is (`str`, *optional*):
            If `name` is this text and the data set has a single split, that split is returned.
        remedy (`str`, *optional*, defaults to `""`):
            Last sentence of the error message.

    Raises:
        UsageError: If there is no such split.
    """
    if name in splits:
        return splits[name]
    if name == sole_split_is and len(splits) == 1:  # for example a single file test.jsonl, used for training
        return next(iter(splits.values()))
    raise UsageError(f"{field}: {unknown_name('split', name, splits)}{remedy}")


def load_reward_functions(names: list[str] | None, model: str | None) -> list[str | RewardFunction]:
    """
    Return the reward model and the reward functions, as the trainer takes them in `reward_funcs`.

    An error inside one of the functions is reported in one sentence that names the function.

    Args:
        names (`list[str]`, *optional*):
            Names of reward functions of trl-explore or TRL, or import paths.
        model (`str`, *optional*):
            Hub name or folder of a reward model.

    Raises:
        UsageError: If a function is unknown, or if there is no reward at all.
    """
    rewards: list[str | RewardFunction] = []
    if model is not None:
        rewards.append(model)
    named = _named_rewards() if names else {}
    for name in names or []:
        if name in named:
            rewards.append(_with_explained_errors(named[name]))
        elif is_import_path(name):
            function = user_object("reward_funcs", name, "function", inspect.isfunction)[1]
            rewards.append(_with_explained_errors(function))
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

    names = []
    for reward in rewards:
        # TRL names a reward model by the last part of its path.
        names.append(reward.split("/")[-1] if isinstance(reward, str) else get_callable_name(reward))
    try:
        check_success_reward(name, names)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _with_explained_errors(func: RewardFunction) -> RewardFunction:
    """Wrap a reward function, so that any exception becomes one sentence that names the function."""
    from trl.trainer.utils import get_callable_name

    return checked(func, get_callable_name(func), tell=True)


def _named_rewards() -> dict[str, RewardFunction]:
    """Return TRL's and our reward functions by name. If both have a name, such as `accuracy_reward`, ours counts."""
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
        # `trl grpo` uses these two numbers, so a configuration file gives the same rewards with both commands.
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
    """Call [`~trl_explore.names.import_named`], and raise a UsageError instead of its ValueError."""
    try:
        return import_named(field, path, kind, is_one, fits=fits)
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_checkpoint(resume: str | bool | None, output_dir: str) -> str | None:
    """
    Return the folder of the checkpoint to resume, or None if the run starts at step 0.

    Args:
        resume (`str` or `bool`, *optional*):
            Folder of a checkpoint, or true for the last complete checkpoint in `output_dir`. None or false to resume
            none.
        output_dir (`str`):
            Folder of the run.

    Raises:
        UsageError: If there is no such checkpoint, or it is incomplete.
    """
    from trl_explore.saving.checkpoints import is_complete, last_complete_checkpoint

    if resume is None or str(resume).lower() == "false":
        return None
    if str(resume).lower() == "true":
        last, skipped = last_complete_checkpoint(output_dir)
        if skipped:
            print(f"trl-explore: skipping {', '.join(skipped)}: not written to the end", file=sys.stderr)
        if last is None:
            raise UsageError(
                f"resume_from_checkpoint=true: no checkpoint in {output_dir!r}; leave it out to start a new run"
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
    Raise a UsageError if a run that starts at step 0 would overwrite an earlier run in its folder.

    Args:
        output_dir (`str` or `Path`):
            Folder of the new run.
        checkpoint (`str`, *optional*):
            Checkpoint that the run resumes. If it is in `output_dir`, the run continues there and overwrites nothing.
        model (`str`, *optional*):
            Model that is trained. If it is the model in `output_dir`, the user wants it to be replaced. Checkpoints in
            this folder are an error nevertheless.

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
    resume = ""
    if last_complete_checkpoint(folder)[0] is not None:
        resume = "to continue that run, add --resume_from_checkpoint true; "
    raise UsageError(
        f"output_dir={str(output_dir)!r} holds {found} of an earlier run, which this run would overwrite: {resume}to "
        "start a new run, name another folder with --output_dir, or add --overwrite_output_dir"
    )


def _describe_earlier_run(folder: Path) -> str | None:
    """Describe the checkpoints or weights of an earlier run that a new run in the folder would overwrite. Return None
    if there are none. Logs, tables and model cards do not count."""
    from trl_explore.saving.checkpoints import checkpoint_folders

    found = []
    checkpoints = checkpoint_folders(folder)
    if checkpoints:
        found.append(checkpoints[0].name if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints")
    if any((folder / name).is_file() for name in MODEL_FILES):
        found.append("a trained model")
    return " and ".join(found) or None

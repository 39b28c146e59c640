"""The command `trl-explore filter`, which writes the prompts that a model rarely solves to a file for training."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.cli.flags import FlagParser
from trl_explore.runs.inputs import (
    UsageError,
    check_deciding_reward,
    check_output_dir,
    load_reward_functions,
    load_train_and_eval,
)
from trl_explore.runs.models import find_model, load_model, load_tokenizer
from trl_explore.saving.whole_files import whole_file

if TYPE_CHECKING:
    from datasets import Dataset

    from trl_explore.runs.tasks import RunTask

DESCRIPTION = """\
Keep the prompts that a model solves in less than a share THRESHOLD of K samples:

  trl-explore filter --model_name_or_path ./model --dataset_name data.jsonl \\
      --reward_funcs accuracy_reward --k 4 --threshold 0.25 --output hard.jsonl
  trl-explore train --dataset_name hard.jsonl ...

Instead of --dataset_name and --reward_funcs, --task names a task with training prompts and rewards:

  trl-explore filter --model_name_or_path ./model --task reasoning_gym:countdown --output hard.jsonl

An interrupted filter continues when the same command is given again.
Several processes: accelerate launch --num_processes 4 -m trl_explore.cli filter ...
"""
SUFFIXES = (".jsonl", ".json", ".parquet")
COMPLETION_LENGTH = 256
OF_DATA = ("dataset_name", "dataset_config", "dataset_train_split")  # flags that name the prompts without a task


def build_parser() -> FlagParser:
    """Return the parser of `trl-explore filter`."""
    parser = FlagParser(
        prog="trl-explore filter",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="trl-explore filter --model_name_or_path M (--dataset_name D --reward_funcs R | --task T) --output FILE "
        "[...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model_name_or_path", required=True, metavar="M", help="model or adapter: a Hub name or a folder")
    add("--adapter_name_or_path", metavar="A", help="adapter, where M is its base model")
    add("--dataset_name", metavar="D", help="prompts: a file, a folder or a Hub name")
    add("--task", metavar="T", help="task whose training prompts are filtered; all: trl-explore tasks")
    add("--task_config", metavar="JSON", help="fields of the task, as in `train`")
    add(
        "--reward_funcs",
        nargs="+",
        metavar="R",
        help="as in `train`: names, or import paths such as my_module.reward (default: the task's)",
    )
    add("--output", required=True, metavar="FILE", help=f"where the hard prompts go: {', '.join(SUFFIXES)}")
    add("--k", type=int, default=4, help="samples per prompt (default: %(default)s)")
    add("--threshold", type=float, default=0.25, help="pass rate below which a prompt is hard (default: %(default)s)")
    add("--success_threshold", type=float, default=1.0, help="smallest reward of a success (default: %(default)s)")
    add("--success_reward", metavar="NAME", help="reward function that decides success (default: the weighted sum)")
    add("--reward_weights", type=float, nargs="+", metavar="W", help="one per reward function (default: 1 each)")
    add("--max_completion_length", type=int, metavar="N", help=f"tokens (default: {COMPLETION_LENGTH}, or the task's)")
    add("--temperature", type=float, default=1.0, help="of the samples (default: %(default)s)")
    add("--batch_size", type=int, default=64, metavar="N", help="samples at a time (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the samples, and of an embedded task's prompts (default: %(default)s)")
    add("--reward_model_name_or_path", metavar="M", help="reward model, counted before the functions")
    add("--dataset_config", metavar="NAME", help="configuration of a data set on the Hub")
    add("--dataset_train_split", metavar="NAME", help="split to filter (default: train)")
    add("--model_revision", default="main", metavar="NAME", help="revision on the Hub (default: %(default)s)")
    add("--dtype", default="auto", help="auto, bfloat16, float16 or float32 (default: %(default)s)")
    add("--trust_remote_code", action="store_true", help="run code from the model's Hub repository")
    return parser


def _write(dataset: "Dataset", path: Path) -> None:
    """Write a data set to a Parquet file, or to a file with one JSON object per line (`.json` and `.jsonl`)."""
    with whole_file(path) as part:
        if path.suffix == ".parquet":
            dataset.to_parquet(part)
        else:
            dataset.to_json(part, force_ascii=False, double_precision=15)


def run(argv: list[str]) -> int:
    """Run `trl-explore filter`, and return its exit status, which is 130 after Ctrl-C."""
    args = build_parser().parse(argv)
    output = _check_output(args)
    task = _find_task(args)
    rewards = _find_rewards(args, task)
    length = COMPLETION_LENGTH
    if task is None:
        dataset = _load_prompts(args)
    else:
        dataset = _prompts_of_task(args, task)
        length = task.options.get("max_completion_length", COMPLETION_LENGTH)
    if args.max_completion_length is None:
        args.max_completion_length = length

    from trl_explore.evaluation.hard_prompts import check_settings

    settings = {
        "k": args.k,
        "threshold": args.threshold,
        "max_completion_length": args.max_completion_length,
        "temperature": args.temperature,
        "batch_size": args.batch_size,
    }
    try:
        check_settings(dataset, **settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _filter(args, dataset, rewards, settings, output)


def _check_output(args: argparse.Namespace) -> Path:
    """Return the file that the hard prompts go to. Raise a UsageError if it cannot be written."""
    output = Path(args.output).expanduser()
    if output.suffix not in SUFFIXES:
        raise UsageError(f"output={args.output!r} must end with one of {', '.join(SUFFIXES)}")
    if output.is_dir():
        raise UsageError(f"output={args.output!r} is a folder; name a file")
    check_output_dir(output.parent, "output")
    if args.dataset_name is not None and output.resolve() == Path(args.dataset_name).expanduser().resolve():
        raise UsageError(f"output={args.output!r} is the data set itself; name another file")
    return output


def _find_task(args: argparse.Namespace) -> "RunTask | None":
    """Return the task that `--task` names, or None."""
    if args.task is None:
        if args.task_config is not None:
            raise UsageError(
                f"task_config={args.task_config!r} belongs to a task; name one with --task, or leave it out"
            )
        if args.dataset_name is None:
            raise UsageError("nothing to filter: pass --dataset_name data.jsonl, or --task reasoning_gym:countdown")
        return None
    from trl_explore.runs.tasks import find_run_task, read_task_config

    for name in OF_DATA:
        value = getattr(args, name)
        if value is not None:
            raise UsageError(
                f"task={args.task!r} and {name}={value!r}: a task brings its data; leave one of the two out"
            )
    task = find_run_task(args.task, read_task_config(args.task_config))
    if task.is_agent:
        raise UsageError(
            f"task={args.task!r} is played with tools, but filter samples completions of one turn: name a task "
            "without tools"
        )
    return task


def _find_rewards(args: argparse.Namespace, task: "RunTask | None") -> list[Any]:
    """Return the reward functions that the flags name, or else the reward functions of the task."""
    if task is None or args.reward_funcs or args.reward_model_name_or_path:
        rewards: list[Any] = load_reward_functions(args.reward_funcs, args.reward_model_name_or_path)
    else:
        rewards = task.reward_funcs
    if args.reward_weights is not None and len(args.reward_weights) != len(rewards):
        raise UsageError(
            f"reward_weights: {len(args.reward_weights)} weights for {len(rewards)} rewards; one for each"
        )
    check_deciding_reward(args.success_reward, rewards)
    return rewards


def _load_prompts(args: argparse.Namespace) -> "Dataset":
    from trl import DatasetMixtureConfig, ScriptArguments

    fields = {name: getattr(args, name) for name in OF_DATA if getattr(args, name) is not None}
    return load_train_and_eval(ScriptArguments(**fields), DatasetMixtureConfig(), needs_eval=False)[0]


def _prompts_of_task(args: argparse.Namespace, task: "RunTask") -> "Dataset":
    try:
        return task.train_rows(args.seed)
    except ValueError as error:
        raise UsageError(f"task={args.task!r}: {error}") from error


def _filter(
    args: argparse.Namespace, dataset: "Dataset", rewards: list[Any], settings: dict[str, Any], output: Path
) -> int:
    """Sample, write the hard prompts to `output`, and return the exit status."""
    import torch
    from accelerate import PartialState

    from trl_explore.evaluation.hard_prompts import filter_hard_prompts, read_pass_rates
    from trl_explore.machine.threads import limit_threads
    from trl_explore.saving.records import FileRefusedError

    options = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
    source = find_model(args.model_name_or_path, args.adapter_name_or_path, **options)
    model, tokenizer = load_model(source, dtype=args.dtype, **options), load_tokenizer(source, **options)
    if not torch.accelerator.is_available():  # the model stays on the CPU
        limit_threads(model)
    scores = output.with_name(output.name + ".scores.jsonl")
    try:
        hard = filter_hard_prompts(
            model,
            dataset,
            reward_funcs=rewards,
            processing_class=tokenizer,
            success_threshold=args.success_threshold,
            success_reward=args.success_reward,
            reward_weights=args.reward_weights,
            seed=args.seed,
            scores_file=scores,
            **settings,
        )
    except FileRefusedError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        done = 0
        if scores.is_file():
            done = len(read_pass_rates(scores)[1])
        print(f"Stopped after {done} of {len(dataset)} prompts; the same command continues there.", file=sys.stderr)
        return 130
    state = PartialState()
    if state.is_main_process:
        rates = read_pass_rates(scores)[1].values()
        print(f"Kept {len(hard)} of {len(dataset)} prompts, those with a pass rate below {args.threshold}.")
        print(f"Pass rates: {_histogram(rates, args.k)}")
        if len(hard):
            _write(hard, output)
            print(f"Written to {output}. With {scores.name}, another --threshold needs no sampling.")
    state.destroy_process_group()
    if not len(hard):
        raise UsageError(f"no prompt is left, and {output} was not written: raise --threshold above {args.threshold}")
    return 0


def _histogram(rates: Iterable[float | None], k: int) -> str:
    """Return the number of prompts per number of solved samples, for example `0/4: 120, 1/4: 30, no reward: 2`."""
    counts: Counter[str] = Counter()
    for rate in rates:
        if rate is None:
            counts["no reward"] += 1
        else:
            counts[f"{round(rate * k)}/{k}"] += 1
    order = [*(f"{solved}/{k}" for solved in range(k + 1)), "no reward"]
    return ", ".join(f"{name}: {counts[name]}" for name in order if counts[name])

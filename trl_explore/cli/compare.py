"""`trl-explore compare`: several methods on the same budget, and what each had learned by then."""

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.cli.flags import FlagParser
from trl_explore.cli.train import read_config
from trl_explore.methods import METHODS
from trl_explore.runs.inputs import UsageError
from trl_explore.runs.workers import WorkerFailed, Workers

if TYPE_CHECKING:
    from trl_explore.compare.folder import ComparisonFolder
    from trl_explore.compare.settings import Comparison

DESCRIPTION = """\
Train several methods on the same number of generated tokens (or seconds) and compare what they learned:

  trl-explore compare                                    # GRPO and what suits the task countdown, on a CPU
  trl-explore compare --task chain --tokens 2e5 --seeds 0 1
  trl-explore compare --task multi_hop --methods grpo branpo
  trl-explore compare --config comparison.yaml           # your model, data and arms: examples/README.md

The folder gets curves.png, curves.svg, curves.csv, table.md, comparison.yaml and the checkpoints of each run. The same
command continues an interrupted comparison; --seeds and arms may be added to a finished one.
"""
DEFAULT_TASK, DEFAULT_TOKENS, DEFAULT_OUTPUT = "countdown", 3e5, "out/compare"
# The keys of `compare_tasks.ALL_TASKS`, without the import that takes seconds.
TASK_NAMES = (
    *("chain", "chaind", "late1", "late3", "vault", "doors", "dialects", "paths", "countdown"),
    *("sudoku", "frozen_lake", "sokoban"),
    *("lake_agent", "multi_hop", "rare_hop"),
)
FLAGS = ("task", "seeds", "metrics", "evaluations", "num_eval", "output_dir")


def build_parser() -> FlagParser:
    """
    The flags of `trl-explore compare`.

    Returns:
        [`~trl_explore.cli.flags.FlagParser`]: Their parser.
    """
    parser = FlagParser(
        prog="trl-explore compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="trl-explore compare [--config FILE] [--task TASK] [--tokens N] [--seeds N ...] [...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file: model, data and rewards or a task, budget, seeds, common, arms")
    add("--task", metavar="TASK", help=f"{', '.join(TASK_NAMES)} (default without --config: {DEFAULT_TASK})")
    add("--methods", nargs="+", metavar="M", help=f"of {', '.join(METHODS)}; one arm each, the first is the baseline")
    add("--tokens", type=float, metavar="N", help=f"budget of each run (default without --config: {DEFAULT_TOKENS:g})")
    add("--seconds", type=float, metavar="N", help="budget of each run in seconds of training, instead of tokens")
    add("--steps", type=int, metavar="N", help="budget of each run in optimizer steps, instead of tokens")
    add("--seeds", type=int, nargs="+", metavar="N", help="seeds of every arm (default: 0)")
    add(
        "--metrics", nargs="+", metavar="M", help="such as greedy_accuracy, reward, pass_at_8, maj_at_8, coverage_at_8"
    )
    add("--evaluations", type=int, metavar="N", help="evaluations per run after the first (default: 10)")
    add("--num_eval", type=int, metavar="N", help="held-out problems (default: 128)")
    add("--output_dir", metavar="DIR", help=f"where results go (default: {DEFAULT_OUTPUT}/TASK)")
    add("--processes", type=int, metavar="N", help="train N runs at a time, each in a process of its own")
    return parser


def _document(args: argparse.Namespace) -> dict[str, Any]:
    """The YAML file with the flags over it; without a file, the defaults below them."""
    document = read_config(args.config)
    if args.config is None:
        document = {"task": DEFAULT_TASK, "budget": {"tokens": DEFAULT_TOKENS}}
    given = {name: value for name, value in vars(args).items() if value is not None}
    budget = {name: given[name] for name in ("tokens", "seconds", "steps") if name in given}
    if budget:
        document["budget"] = budget
    if "methods" in given:
        document["arms"] = [{"method": method} for method in given["methods"]]
    return document | {name: given[name] for name in FLAGS if name in given}


def run(argv: list[str]) -> int:
    """
    Runs `trl-explore compare`.

    Args:
        argv (`list[str]`):
            Arguments after `compare`.

    Returns:
        `int`: As [`carry_out`] says.
    """
    args = build_parser().parse(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("compare runs in one process: start it without accelerate launch or torchrun")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"processes={args.processes}: give an integer of at least 1")
    document = _document(args)
    # one folder per task, so that trying one after the other needs no flag
    output_dir = document.pop("output_dir", None) or Path(DEFAULT_OUTPUT, str(document.get("task", "")))

    from trl_explore.compare.folder import ComparisonFolder
    from trl_explore.compare.settings import read_comparison
    from trl_explore.runs.quiet import quiet

    quiet()
    comparison = read_comparison(document)
    folder = ComparisonFolder(comparison, str(output_dir))
    command = ["trl-explore", "compare", *argv]
    return carry_out(folder, command=command, processes=args.processes, check_arms=True)


def carry_out(
    folder: "ComparisonFolder", *, command: list[str], processes: int | None = None, check_arms: bool = False
) -> int:
    """
    Trains what is missing of a comparison, and shows its result.

    Args:
        folder ([`~trl_explore.compare.folder.ComparisonFolder`]):
            The comparison.
        command (`list[str]`):
            What continues it.
        processes (`int`, *optional*):
            Runs at a time, each in a process of its own. Without a number all are trained in this one.
        check_arms (`bool`, *optional*, defaults to `False`):
            Whether every trainer is constructed first, to see what it refuses.

    Returns:
        `int`: Exit code: `0`, `130` when Ctrl-C stopped it early, `1` when one of the processes ended early.
    """
    try:
        if check_arms:
            folder.check_arms()
        folder.write_settings()
        _train(folder.comparison, folder, processes)
    except KeyboardInterrupt:
        print(f"\nStopped; what is done is kept. Continue with:\n  {shlex.join(command)}", file=sys.stderr)
        return 130
    except WorkerFailed as error:
        text = f"{error.details}trl-explore: error: {error}; what is done is kept. Continue with:"
        print(f"{text}\n  {shlex.join(command)}", file=sys.stderr)
        return 1
    _show(folder.comparison, folder)
    return 0


def _train(comparison: "Comparison", folder: "ComparisonFolder", processes: int | None) -> None:
    import datasets
    from tqdm.auto import tqdm

    from trl_explore.compare.report import write_report
    from trl_explore.compare.run import Interrupted

    done = folder.num_runs - len(folder.missing())
    total = int(folder.num_runs * comparison.amount)
    unit = {"tokens": "tok", "seconds": "s", "steps": "step"}[comparison.clock]
    print(
        f"{folder.num_runs} runs of {comparison.amount:,.0f} {comparison.clock} each"
        f"{f', {done} of them done' if done else ''}: "
        f"{', '.join(arm.name for arm in comparison.arms)}; seeds {', '.join(map(str, comparison.seeds))}"
    )
    if done == folder.num_runs:
        return
    if processes is not None:
        _train_side_by_side(folder, min(processes, folder.num_runs - done))
        return
    datasets.disable_progress_bars()  # there is one of ours
    starts = folder.warm_starts()
    initial = int(done * comparison.amount)
    # smoothing 0: arms differ in speed, so the mean of all tells more than the last steps
    with tqdm(total=total, initial=initial, unit=unit, unit_scale=True, smoothing=0) as bar:
        try:
            for _ in folder.train(starts, bar):
                if folder.missing():  # a look at what there is so far
                    write_report(folder.finished(), comparison, folder.path)
        except Interrupted:
            raise KeyboardInterrupt from None


def _train_side_by_side(folder: "ComparisonFolder", processes: int) -> None:
    from rich.console import Console

    from trl_explore.compare.report import write_report
    from trl_explore.compare.workers import ArmLines, train_side_by_side

    lines = ArmLines(folder, Console())
    with Workers(processes) as workers, lines.progress:
        for _ in train_side_by_side(folder, workers, lines):
            if folder.missing():  # a look at what there is so far
                write_report(folder.finished(), folder.comparison, folder.path)


def _show(comparison: "Comparison", folder: "ComparisonFolder") -> None:
    from rich.console import Console

    from trl_explore.compare.report import explanation, rich_table, write_report

    console, runs = Console(), folder.finished()
    files = write_report(runs, comparison, folder.path)
    console.print(rich_table(runs, comparison))
    console.print(explanation(runs, comparison), markup=False, highlight=False)
    names = ", ".join(path.name for path in files)
    console.print(f"{Path(folder.path)}: {names}", markup=False, highlight=False, soft_wrap=True)
    if not any(path.suffix == ".png" for path in files):
        console.print("no picture: matplotlib is missing (pip install 'trl-explore[plots]')", markup=False)

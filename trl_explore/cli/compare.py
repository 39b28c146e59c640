"""The command `trl-explore compare`, which trains several methods with the same budget and compares their results."""

import argparse
import os
from pathlib import Path
from typing import Any

from trl_explore.cli.flags import FlagParser
from trl_explore.errors import UsageError
from trl_explore.methods import METHODS
from trl_explore.names import program_name
from trl_explore.runs.arguments import read_config

DESCRIPTION = """\
Train several methods on the same number of generated tokens (or seconds) and compare what they learned:

  trl-explore compare                                    # GRPO and methods for the task doors, on a CPU
  trl-explore compare --task chain --tokens 2e5 --seeds 0 1
  trl-explore compare --task multi_hop --methods grpo branpo
  trl-explore compare --task reasoning_gym:countdown --model_name_or_path smollm2 --warm_start_steps 60
  trl-explore compare --methods grpo my_module.MyTrainer # a trainer of your own
  trl-explore compare --config comparison.yaml           # your model, data and arms

An example of comparison.yaml. It may have all fields of `trl-explore train`: fields of the model and the data next to
model_name_or_path, and fields of the training in the options of an arm, or in `common` for all arms:

  model_name_or_path: Qwen/Qwen2.5-1.5B
  dataset_name: data.jsonl
  reward_funcs: [accuracy_reward]
  budget: {tokens: 2e6}
  seeds: [0, 1, 2]
  arms:
    - {method: grpo}
    - {method: deep_grpo, options: {num_branches: 8}}

The folder gets curves.png, curves.svg, curves.csv, table.md, comparison.yaml and the checkpoints of each run. The same
command continues an interrupted comparison; --seeds and arms may be added to a finished one.
"""
DEFAULT_TASK, DEFAULT_TOKENS, DEFAULT_OUTPUT = "doors", 3e5, "out/compare"
# The keys of `runs.embedded.ALL_TASKS`. They are repeated here, because importing that module takes seconds.
TASK_NAMES = (
    *("chain", "chaind", "late1", "late3", "doors", "deep_doors"),
    "multi_hop",
)
TASK_HELP = (
    f"{', '.join(TASK_NAMES)}; with --model_name_or_path, reasoning_gym:NAME or textarena:ENV_ID; the import path of "
    f"a task object, my_tasks:MAZE; all: trl-explore tasks (default without --config: {DEFAULT_TASK})"
)
METHODS_HELP = f"some of {', '.join(METHODS)}, or import paths of trainers; the first one is the baseline"
# Flags that replace the field of the same name in the YAML file.
FLAGS = (
    *("task", "task_config", "model_name_or_path", "warm_start_steps"),
    *("seeds", "metrics", "evaluations", "num_eval", "output_dir"),
)


def build_parser() -> FlagParser:
    """Return the parser of `trl-explore compare`."""
    parser = FlagParser(
        prog="trl-explore compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="trl-explore compare [--config FILE] [--task TASK] [--tokens N] [--seeds N ...] [...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file: model, data and rewards or a task, budget, seeds, common, arms")
    add("--task", metavar="TASK", help=TASK_HELP)
    add("--task_config", metavar="JSON", help="fields of a task of another package, see trl-explore tasks TASK")
    add("--model_name_or_path", metavar="M", help="model for a task of another package: smollm2, Hub name or folder")
    add("--warm_start_steps", type=int, metavar="N", help="supervised steps that teach the task to the model first")
    add("--methods", nargs="+", metavar="M", help=METHODS_HELP)
    add("--tokens", type=float, metavar="N", help=f"budget of each run (default without --config: {DEFAULT_TOKENS:g})")
    add("--seconds", type=float, metavar="N", help="budget of each run in wall seconds of training, instead of tokens")
    add("--steps", type=int, metavar="N", help="budget of each run in optimizer steps, instead of tokens")
    add("--seeds", type=int, nargs="+", metavar="N", help="seeds of every arm (default: 0)")
    add(
        "--metrics", nargs="+", metavar="M", help="such as greedy_accuracy, reward, pass_at_8, maj_at_8, coverage_at_8"
    )
    add("--evaluations", type=int, metavar="N", help="evaluations per run after the first (default: 10)")
    add("--num_eval", type=int, metavar="N", help="held-out problems (default: 128)")
    add("--output_dir", metavar="DIR", help=f"where results go (default: {DEFAULT_OUTPUT}/TASK)")
    add("--processes", type=int, metavar="N", help="train N runs at a time, each in its own process")
    return parser


def _document(args: argparse.Namespace) -> dict[str, Any]:
    """Return the content of the YAML file, overridden by flags. Without a file, flags override the defaults."""
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
    """Run `trl-explore compare`, and return the exit status of [`~trl_explore.compare.conductor.run_comparison`]."""
    args = build_parser().parse(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("compare runs in one process: start it without accelerate launch or torchrun")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"processes={args.processes}: give an integer of at least 1")
    document = _document(args)
    # Each task gets its own folder, so that users can try several tasks without a flag.
    folder_name = str(document.get("task", "")).replace(":", "-")
    output_dir = document.pop("output_dir", None) or Path(DEFAULT_OUTPUT, folder_name)

    from trl_explore.compare.conductor import run_comparison
    from trl_explore.compare.folder import ComparisonFolder
    from trl_explore.compare.settings import read_comparison
    from trl_explore.runs.quiet import quiet

    quiet()
    folder = ComparisonFolder(read_comparison(document), str(output_dir))
    return run_comparison(
        folder, command=[program_name(), "compare", *argv], processes=args.processes, check_arms=True
    )

"""`trl-explore quickstart`: GRPO, DEEP-GRPO and TreeGRPO on a task that needs exploration, offline on a CPU."""

import argparse
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trl_explore.errors import UsageError
from trl_explore.names import program_name
from trl_explore.runs.quiet import quiet
from trl_explore.runs.workers import count_cores

if TYPE_CHECKING:
    from trl_explore.compare.settings import Comparison

# The benchmark deep_ends of examples/benchmarks, with half its budget. The settings were tuned on the benchmark's
# development seeds, 100 to 103. On these seeds, a learning rate of 2e-3 gave all three arms their highest curves over
# 60,000 tokens. The other settings equal the benchmark's settings. A test checks that the benchmark's grid
# contains all settings.
COMPARISON = {
    "task": "deep_doors",
    "budget": {"tokens": 6e4},
    "evaluations": 6,
    "num_eval": 128,
    "metrics": ["greedy_accuracy", "pass_at_1"],
    "common": {"learning_rate": 2e-3},
    "arms": [
        {"name": "GRPO", "method": "grpo", "options": {"scale_rewards": "none"}},
        {
            "name": "DEEP-GRPO, unsolved",
            "method": "deep_grpo",
            "options": {"explore_prompts": "unsolved", "aux_loss_weight": 1.0},
        },
        {"name": "TreeGRPO", "method": "tree_grpo", "options": {"expansion_width": 4, "depth_weight": 4.0}},
    ],
}
FAST = {"budget": {"tokens": 3e3}, "evaluations": 1, "num_eval": 32}
NUM_SEEDS, NUM_SEEDS_FAST = 6, 2
OUTPUT, OUTPUT_FAST = "out/quickstart", "out/quickstart-fast"
INTRODUCTION = (
    "The task: choose the right door eight times in a row; the first wrong door ends the attempt. For each seed, a "
    "tiny language model is taught to guess (the models are kept for the next time). It succeeds once in 15,000 "
    "attempts, so GRPO finds too few successes to learn from."
)
ELSEWHERE = (
    "Plain GRPO wins if its samples already succeed often enough. On Countdown, both methods are clearly behind GRPO "
    "for as many tokens. The documentation's page 'When does exploration pay?' (docs/evidence.md in the repository) "
    "shows this, and also this task with ten other seeds and twice the tokens."
)
MACHINES = (
    "Another machine gives other figures, because the starting models depend on how a processor rounds. With two "
    "different roundings, TreeGRPO was far ahead in both runs (docs/measured.md in the repository)."
)
MORE_SEEDS = "More seeds give narrower intervals: --num_seeds 10 continues from here."
FAST_NOTE = "With --fast the budget is too small to learn much: this was a check that everything runs."


def document(*, fast: bool, seed: int, num_seeds: int | None) -> dict[str, Any]:
    """Return the comparison in the form of a YAML file of `trl-explore compare`."""
    found, count = dict(COMPARISON), NUM_SEEDS
    if fast:
        found, count = {**COMPARISON, **FAST}, NUM_SEEDS_FAST
    if num_seeds is not None:
        count = num_seeds
    return {**found, "seeds": list(range(seed, seed + count))}


def difference_text(mean: float, half: float | None) -> str:
    """Return a difference of shares as text in percentage points, with its interval and the conclusion, such as
    `"+10.8 ± 9.1 (ahead)"`."""
    from trl_explore.compare.costs import FEWEST_SEEDS

    if half is None:
        return f"{100 * mean:+.1f} (may be chance: an interval needs {FEWEST_SEEDS} seeds)"
    if abs(mean) <= half:
        word = "not clear: the interval includes 0"
    elif mean > 0:
        word = "ahead"
    else:
        word = "behind"
    return f"{100 * mean:+.1f} ± {100 * half:.1f} ({word})"


def verdicts(runs: Sequence[Mapping[str, Any]], comparison: "Comparison") -> list[str]:
    """
    Return a sentence per arm after the first, with its difference to the first arm in the comparison's first metric.

    The main result is the difference between the means along the curves, as in the benchmarks. The metric must be a
    share.
    """
    from trl_explore.compare.costs import interval, mean_along, paired_values
    from trl_explore.compare.plots import metric_label
    from trl_explore.compare.report import equal_cost, summarize

    base, *others = summarize(runs, comparison)
    metric, reading = f"eval/{comparison.metrics[0]}", equal_cost(runs, comparison)
    along = {(run["arm"], run["seed"]): mean_along(run["points"], comparison.cost, reading, metric) for run in runs}
    seeds = dict.fromkeys(run["seed"] for run in runs)
    sentences = []
    for row in others:
        mean_gap = interval([along[row.arm, seed] - along[base.arm, seed] for seed in seeds])
        end = row.cells[0].difference
        assert end is not None  # only the first arm has no difference
        # CPU seconds, because other work on the machine makes wall seconds longer.
        spent = paired_values(runs, row.arm, base.arm, cost=comparison.cost, reading=reading, metric="cpu_seconds")
        ours, theirs = sum(pair[0] for pair in spent), sum(pair[1] for pair in spent)
        sentences.append(
            f"{row.arm} - {base.arm} on these seeds, points of {metric_label(metric)[0]} for as many "
            f"{comparison.unit}: {difference_text(*mean_gap)} on average along the curve, {difference_text(*end)} at "
            f"the end, in {ours / theirs:.1f} times the CPU seconds."
        )
    return sentences


def main(args: argparse.Namespace) -> int:
    """Run or continue the quick-start; return the exit code of [`~trl_explore.compare.conductor.run_comparison`]."""
    if args.processes < 1:
        raise UsageError(f"processes={args.processes}: give an integer of at least 1")
    began = time.perf_counter()

    from rich.console import Console

    from trl_explore.compare.conductor import run_comparison
    from trl_explore.compare.folder import SETTINGS, ComparisonFolder
    from trl_explore.compare.settings import read_comparison

    quiet()
    console = Console()
    output = args.output_dir or (OUTPUT_FAST if args.fast else OUTPUT)
    given = document(fast=args.fast, seed=args.seed, num_seeds=args.num_seeds)
    folder = ComparisonFolder(read_comparison(given), output)
    console.print(INTRODUCTION, highlight=False)
    if (folder.path / SETTINGS).is_file():
        left = len(folder.missing())
        rest = f"the other {left} go on" if left else "there is nothing to train"
        console.print(
            f"{output} is there already: its {folder.num_runs - left} finished runs are kept, {rest}. To start again, "
            f"remove it (rm -r {shlex.quote(output)}) or name another folder with --output_dir.",
            highlight=False,
            markup=False,
        )
    code = run_comparison(folder, command=_command(args), processes=args.processes)
    if code == 0:
        if args.fast:
            notes = [FAST_NOTE]
        else:
            notes = [*verdicts(folder.finished(), folder.comparison), MACHINES, MORE_SEEDS, ELSEWHERE]
        for note in [*notes, f"all in {time.perf_counter() - began:.0f} s"]:
            console.print(note, highlight=False, markup=False)
    return code


def _command(args: argparse.Namespace) -> list[str]:
    """Return the command that continues an interrupted quick-start."""
    words = [program_name(), "quickstart"]
    if args.fast:
        words.append("--fast")
    if args.output_dir is not None:
        words += ["--output_dir", args.output_dir]
    if args.num_seeds is not None:
        words += ["--num_seeds", str(args.num_seeds)]
    if args.seed != 0:
        words += ["--seed", str(args.seed)]
    if args.processes != count_cores():
        words += ["--processes", str(args.processes)]
    return words

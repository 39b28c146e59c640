"""`trl-explore quickstart`: DEEP-GRPO and plain GRPO from one warm start on one token budget, on a CPU, offline."""

import argparse
import json
import logging
import shlex
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trl_explore.cli_inputs import check_output_dir
from trl_explore.comparison import Arm, Budget, Run, train_arm
from trl_explore.interrupt import InterruptCallback
from trl_explore.tasks import TeachableTask, get_task
from trl_explore.tasks.warm_start import warm_start

ARMS = (
    Arm("DEEP-GRPO", "deep_grpo", dict(segment_delimiters=[";"], max_pivots_per_batch=16, sampling_batch_size=32)),
    Arm("GRPO", "grpo"),
)
COLUMNS = {
    "greedy accuracy": "eval/greedy_accuracy",
    "pass@1": "eval/pass_at_1",
    "pass@8": "eval/pass_at_8",
}
NOTE = (
    "This task is easy: plain GRPO solves it too, and in less time. It shows that the trainers run and learn on your "
    "machine, not which one is better; for that, see examples/README.md."
)


FAST_NOTE = "With --fast the budget is too small to learn much: this was a check that everything runs."


@dataclass(frozen=True)
class Size:
    """How much of the quick-start to run."""

    tokens: float
    evaluate_every: int
    num_eval: int


FULL = Size(tokens=1.5e6, evaluate_every=20, num_eval=128)
FAST = Size(tokens=1.5e5, evaluate_every=8, num_eval=64)


class Interrupted(Exception):
    """Ctrl-C ended an arm; its checkpoint is on disk."""


def quiet() -> None:
    """Keep the libraries' warnings and bars from burying the progress line."""
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("trl").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def run_arm(arm: Arm, task: TeachableTask, start: Path, folder: Path, *, seed: int, size: Size, resume: bool) -> Run:
    """
    Train one arm with a live progress line, or read its result where an earlier run finished it.

    Args:
        arm ([`~trl_explore.comparison.Arm`]):
            The arm.
        task ([`~trl_explore.tasks.TeachableTask`]):
            The embedded task.
        start (`Path`):
            Folder of the warm-started model.
        folder (`Path`):
            Where the arm's checkpoints and its result go.
        seed (`int`):
            Seed of training.
        size ([`Size`]):
            Budget and evaluation.
        resume (`bool`):
            Whether earlier results and checkpoints are used.

    Returns:
        [`~trl_explore.comparison.Run`]: Curve and cost.

    Raises:
        Interrupted: After Ctrl-C; the checkpoint is saved.
    """
    from tqdm.auto import tqdm

    result = folder / "run.json"
    if resume and result.is_file():
        return Run.load(result)
    interrupt = InterruptCallback()
    with tqdm(total=int(size.tokens), desc=f"{arm.name:9s}", unit="tok", unit_scale=True) as bar:
        try:
            run = train_arm(
                arm,
                task,
                start,
                output_dir=folder,
                seed=seed,
                budget=Budget(tokens=size.tokens),
                evaluate_every=size.evaluate_every,
                num_eval=size.num_eval,
                options=dict(save_strategy="steps", save_steps=20, save_total_limit=2),
                progress=bar,
                callbacks=[interrupt],
                resume=resume,
            )
        finally:
            interrupt.restore()
    if interrupt.interrupted:
        raise Interrupted
    run.save(result)
    return run


def result_table(runs: list[dict[str, Any]]) -> Table:
    """
    The closing table: the warm start, then each arm at the end of its budget.

    Args:
        runs (`list[dict]`):
            Runs with `arm`, `seed` and `points`.

    Returns:
        `rich.table.Table`: One row per seed and arm.
    """
    table = Table(title="held-out problems, accuracy in %")
    for name in ("seed", "method", *COLUMNS, "tokens", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for seed in dict.fromkeys(run["seed"] for run in runs):
        of_seed = [run for run in runs if run["seed"] == seed]
        rows = [("warm start", of_seed[0]["points"][0]), *((run["arm"], run["points"][-1]) for run in of_seed)]
        for name, point in rows:
            accuracies = [f"{100 * point[key]:.1f}" for key in COLUMNS.values()]
            table.add_row(str(seed), name, *accuracies, f"{point['tokens']:,.0f}", f"{point['seconds']:.0f}")
    return table


def main(args: argparse.Namespace) -> int:
    """
    Run the quick-start.

    Args:
        args (`argparse.Namespace`):
            `fast`, `output_dir`, `seed`, `num_seeds` and `resume`.

    Returns:
        `int`: Exit code: 0, or 130 after Ctrl-C.
    """
    import torch

    console = Console()
    began = time.perf_counter()
    quiet()
    # A 100k-parameter model gains little from a second thread on an idle machine, and on a busy one it waits for it.
    torch.set_num_threads(1)
    task, size = get_task("chain"), FAST if args.fast else FULL
    output = check_output_dir(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    try:
        for seed in range(args.seed, args.seed + args.num_seeds):
            console.print(
                f"seed {seed}: teaching a tiny language model arithmetic with bad habits (cached afterwards)"
            )
            start = warm_start(task, seed=seed)
            console.print(f"then {size.tokens:,.0f} generated tokens for each method")
            for arm in ARMS:
                folder = output / f"seed{seed}" / arm.name.lower()
                runs.append(asdict(run_arm(arm, task, start, folder, seed=seed, size=size, resume=args.resume)))
    except (KeyboardInterrupt, Interrupted):
        flags = ["--fast"] * args.fast + ["--num_seeds", str(args.num_seeds)] * (args.num_seeds > 1)
        command = ["trl-explore", "quickstart", "--resume", "--output_dir", args.output_dir, "--seed", str(args.seed)]
        console.print(f"\nStopped; what is done is kept. Resume with:\n  {shlex.join(command + flags)}")
        return 130

    (output / "runs.json").write_text(json.dumps(runs))
    console.print(result_table(runs))
    try:
        from trl_explore.plots import learning_curves

        console.print(f"curves: {learning_curves(runs, output / 'curves.png', title='quick-start task: chain')}")
    except ModuleNotFoundError:
        console.print("no picture: matplotlib is missing (pip install 'trl-explore[plots]')")
    console.print(FAST_NOTE if args.fast else NOTE)
    console.print(f"all in {time.perf_counter() - began:.0f} s")
    return 0

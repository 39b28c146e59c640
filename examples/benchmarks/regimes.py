"""Benchmark: compare exploration methods with GRPO, its cheap rivals and controls, where exploration may help.

    python examples/benchmarks/regimes.py train late_code      # train the missing runs; without a name: of all regimes
    python examples/benchmarks/regimes.py report               # write tables, verdicts and pictures

A *regime* is a problem with its arms and settings. It is a YAML file in `regimes/`. The environment variable `REGIMES`
names another folder. An *arm* is a method with its options. Its role is one of:

- *baseline*: GRPO.
- *more samples*: GRPO with four times the samples per prompt.
- *rival*: GRPO with one cheap change, from `rivals.yaml`, such as an entropy bonus.
- *method*: an exploration method.
- *control*: a method without its idea. It spends as much as the method.

Every arm is tuned over the learning rate and over one more field with two values, its *knob*. The best setting is the
one with the highest mean along the learning curve. The runs of a regime are trained in these stages, in this order:

- *admission rates*, *admission*: The baseline and *more samples* train for an equal number of steps, each at its best
  learning rate. If *more samples* learns clearly faster per step, GRPO is limited by samples.
- *rates*, *knob*: The baseline and *more samples* are tuned on development seeds (four by default). First all learning
  rates are tried, then the second value of the knob at the best learning rate.
- *rival rates*, *rival knob*: The rivals are tuned in the same way, with the best value of the baseline's knob.
- *collapse*: All settings that were tried for GRPO, for the entropy bonus and for the KL penalty are compared by their
  variety (such as pass@16) at the end of training. The best one trains on the fresh seeds. If its variety ends clearly
  below its start or its peak, GRPO is limited by variety.
- *method rates*, *method knob*: The methods and controls are tuned in the same way. If GRPO is limited neither by
  samples nor by variety, the regime is not admitted, and training ends before this stage. `--anyway` continues.
- *verdict*: Every arm trains at its best setting, on fresh seeds (ten by default).
- *seconds*: Every arm trains again on the first fresh seed, all in one sitting, because the speed of a machine changes
  from day to day. Reports take the seconds of verdict runs from these runs. If a regime has several seeds for this
  stage, reports take the mean.

Results go to `regimes/results/<regime>.csv`. Runs that are in this file with the same settings are not trained again.
So the command can be stopped at any time and continued, also on another machine. But train all verdict runs of a
regime on one machine. Another machine may round differently and train other warm starts. The report lists the arms
whose warm start differs from GRPO's.

`--processes 2` trains two runs at a time, except in the stage *seconds*. The results are the same. On a GPU,
`train --large --minutes 9` trains a model of 77 million parameters for nine minutes. Repeat the command until no run
is missing.
"""

import argparse
import shutil
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

from regimes_plan import STAGES, Regime, enlarged, expected, folder, load_regimes, stage_arms
from regimes_results import Row, read_results, to_runs, write_results
from stages import Stage

from trl_explore.errors import UsageError

OVERHEAD = 1.5  # duration of a run, with loading and evaluation, divided by its seconds of training
TIMED_PROBLEMS = 16  # held-out problems in the stage "seconds", which needs no evaluation


def train(regime: Regime, output_dir: Path, *, anyway: bool = False, processes: int | None = None) -> None:
    """
    Train the missing runs of a regime, stage by stage, and add them to its results file.

    Args:
        regime ([`Regime`]):
            The regime.
        output_dir (`Path`):
            Folder for checkpoints. The regime gets a folder in it.
        anyway (`bool`, *optional*, defaults to `False`):
            Whether to train methods even if the regime is not admitted.
        processes (`int`, *optional*):
            Number of runs to train at a time. If None, one run at a time, in this process.
    """
    from regimes_effects import Results

    for stage in STAGES:
        if stage == "method rates" and not anyway and not Results(regime, read_results(regime.path)).admitted:
            print(
                f"{regime.name}: not admitted, because GRPO is limited neither by samples nor by variety. "
                "Its methods are not trained; --anyway trains them",
                flush=True,
            )
            return
        train_stage(regime, stage, output_dir / regime.name, processes=processes)


def train_stage(regime: Regime, stage: str, output_dir: Path, *, processes: int | None = None) -> None:
    """
    Train the runs of a stage that the results file lacks, with `trl-explore compare`, and add them to the file.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            One of `STAGES`.
        output_dir (`Path`):
            Folder for checkpoints of the regime.
        processes (`int`, *optional*):
            Number of runs to train at a time. The stage *seconds* ignores it and trains one.
    """
    rows = read_results(regime.path)
    document = regime.document(stage, stage_arms(regime, stage, rows))
    if not document["arms"] or not document["seeds"]:
        return
    evaluation = {}
    if stage == "seconds":
        # The seconds do not include evaluation, so a smaller evaluation leaves them unchanged.
        num_problems = min(TIMED_PROBLEMS, document.get("num_eval", TIMED_PROBLEMS))
        evaluation = {"num_eval": num_problems, "samples_at_ends": None}
        processes = None
    runs = Stage(stage, document, regime.path, output_dir, evaluation=evaluation)
    kept = runs.without_stale(rows)  # the next stages take the best of all rows of a stage
    if stage == "seconds" and runs.missing(rows):
        # Seconds of different sittings cannot be compared. If one run is missing, all runs are trained again.
        kept = [row for row in rows if row["stage"] != stage]
        shutil.rmtree(runs.runs_folder.path, ignore_errors=True)
    if kept != rows:
        write_results(regime.path, kept, list(runs.runs_folder.comparison.metrics))
    runs.train(processes=processes)


def outlook(regimes: Sequence[Regime], processes: int | None) -> str:
    """
    Describe the missing runs of each regime, and estimate the time to train them.

    The settings of a stage depend on the results of earlier stages. So if an earlier stage is not complete, all runs
    of a stage count as missing. If a regime turns out not to be admitted, fewer runs are trained.

    Args:
        regimes (`Sequence[Regime]`):
            The regimes.
        processes (`int`, *optional*):
            Number of runs to train at a time, except in the stage *seconds*.

    Returns:
        `str`: One line per regime.
    """
    lines = []
    for regime in regimes:
        rows = read_results(regime.path)
        missing = _missing_runs(regime, rows)
        if not missing:
            lines.append(f"{regime.name}: complete")
            continue
        seconds = []
        for stage in STAGES:
            seconds += [run.points[-1]["seconds"] for run in to_runs(rows, stage)]
        time = "the time is unknown until a first run has finished"
        if seconds:
            alone = missing.get("seconds", 0)  # the runs of this stage are trained one at a time
            rounds = alone + (sum(missing.values()) - alone) / (processes or 1)
            hours = rounds * OVERHEAD * statistics.mean(seconds) / 3600
            time = f"about {hours:.1f} hours, estimated from {len(seconds)} finished runs"
        stages = ", ".join(f"{stage} {count}" for stage, count in missing.items())
        lines.append(f"{regime.name}: {sum(missing.values())} runs missing ({stages}); {time}")
    return "\n".join(lines)


def _missing_runs(regime: Regime, rows: list[Row]) -> dict[str, int]:
    """Return the number of missing runs by stage, given the results. Complete stages are left out."""
    missing: dict[str, int] = {}
    for stage in STAGES:
        count = expected(regime, stage)
        if count and not missing:  # all earlier stages are complete, so the arms of this stage are known
            document = regime.document(stage, stage_arms(regime, stage, rows))
            num_missing = len(Stage(stage, document, regime.path, Path()).missing(rows))
            if not num_missing or stage != "seconds":  # in this stage, all arms are timed in one sitting
                count = num_missing
        if count:
            missing[stage] = count
    return missing


def main() -> None:
    """Train regimes, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("regimes", nargs="*", help="regimes to train: names of files in regimes/ (default: all)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/regimes"), help="folder for checkpoints")
    parser.add_argument("--anyway", action="store_true", help="train methods even if a regime is not admitted")
    parser.add_argument("--processes", type=int, help="runs to train at a time, each with one thread (default: 1)")
    parser.add_argument("--large", action="store_true", help="train a model of 77 million parameters on a GPU")
    parser.add_argument(
        "--minutes",
        type=float,
        help="save and stop after this time, as Ctrl-C does; the same command continues the training",
    )
    args = parser.parse_intermixed_args()  # names of regimes may follow flags
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes={args.processes}: give at least 1")
    try:
        chosen = load_regimes(args.regimes)
    except UsageError as error:
        parser.error(str(error))
    if args.large:
        chosen = [enlarged(regime) for regime in chosen]
    if args.command == "report":
        from regimes_report import report

        if args.regimes:
            parser.error("report: leave out the names of regimes; it always has all regimes with results")
        report(chosen, folder() / ("results-large" if args.large else "results"))
        return
    if args.minutes:
        # A process that was started with `nohup ... &` ignores SIGINT. Restore Python's handler, so that the signal
        # below stops the training.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    try:
        for regime in chosen:
            train(regime, args.output_dir, anyway=args.anyway, processes=args.processes)
    finally:
        print(outlook(chosen, args.processes))


if __name__ == "__main__":
    main()

"""When does exploration pay? Methods beside GRPO, its cheap rivals and controls, where exploration can pay at all.

    python examples/benchmarks/regimes.py train late_code      # or several regimes, or none for all: what is missing
    python examples/benchmarks/regimes.py report               # tables, verdicts and pictures from results/*.csv

A regime is a file in `regimes/`: what `trl-explore compare` runs, and its arms. Its stages, one after the other:

- *admission rates*, *admission*: GRPO and GRPO with four times the samples per prompt, for as many steps, each at its
  best learning rate. Where more samples make it learn faster per step, it is limited by samples.
- *rates*, *knob*: GRPO at three learning rates, and at the best of them with another value of one more field, on four
  development seeds. Then so its rivals, which are GRPO as it was tuned with one thing changed.
- *collapse*: GRPO, with an entropy bonus, a KL penalty or neither, at the setting that keeps most variety at the end.
  Where it ends below where it began, or below its own best, it is limited by collapse.
- *method rates*, *method knob*: the methods and their controls, tuned alike. A regime that is limited by neither ends
  before that, unless `--anyway` is given.
- *verdict*: every arm at its best setting, on ten fresh seeds.
- *seconds*: the first of these again, every arm in one sitting, because a machine is not equally fast at all times.
  What it took for so many tokens is what the runs of the verdict are said to have taken. With several seeds of this
  stage it is the mean of an arm's runs that counts.

Arms are tuned and judged by the mean along their curves. Every run goes into `regimes/results/<regime>.csv`. What is
there with the same settings is not trained again, so a run that was stopped anywhere, or moved to another machine,
goes on from there. Another machine trains other warm starts, by rounding: train all arms of a verdict on one, or the
report names those that began elsewhere. `--processes 2` trains two runs at a time, which changes nothing but how long
it takes: seconds are always measured one run at a time. On a GPU, `train --large --minutes 9` trains a model of 77
million parameters, in slices. `REGIMES` names another folder of regimes.
"""

import argparse
import shutil
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

from regimes_plan import STAGES, Regime, enlarged, expected, folder, stage_arms
from regimes_results import read_results, to_runs, write_results
from stages import folder_of_stage, runs_of_stage, train_missing

from trl_explore.errors import UsageError
from trl_explore.names import unknown_name

OVERHEAD = 1.5  # what a run takes beside training: loading and evaluation
TIMED_PROBLEMS = 16  # that are evaluated where only time is of interest


def train(regime: Regime, output_dir: Path, *, anyway: bool = False, processes: int | None = None) -> None:
    """
    Trains what is missing of a regime, and adds it to its results stage by stage.

    Args:
        regime ([`Regime`]):
            The regime.
        output_dir (`Path`):
            Where checkpoints go.
        anyway (`bool`, *optional*, defaults to `False`):
            Whether it goes on where GRPO lacks neither samples nor variety.
        processes (`int`, *optional*):
            Runs at a time. None for one, in this process.
    """
    from regimes_report import Results

    for stage in STAGES:
        if stage == "method rates" and not anyway and not Results(regime, read_results(regime.path)).admitted:
            print(f"{regime.name}: not admitted, nothing more is trained; --anyway does", flush=True)
            return
        train_stage(regime, stage, output_dir / regime.name, processes=processes)


def train_stage(regime: Regime, stage: str, output_dir: Path, *, processes: int | None = None) -> None:
    """
    Runs `trl-explore compare` on a stage, as far as the results do not have it yet.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            One of the stages.
        output_dir (`Path`):
            Where checkpoints go.
        processes (`int`, *optional*):
            Runs at a time.
    """
    from trl_explore.compare.settings import read_comparison

    found = read_results(regime.path)
    document = regime.document(stage, stage_arms(regime, stage, found))
    if not document["arms"] or not document["seeds"]:
        return
    if stage != "seconds":
        train_missing(regime.path, document, stage, output_dir, processes=processes)
        return
    rows, known, wanted = runs_of_stage(document, stage, found)
    if known.keys() == wanted:
        return
    # Runs that were timed in another sitting cannot be compared, so the whole stage runs again.
    metrics = list(read_comparison(document).metrics)
    write_results(regime.path, [row for row in rows if row["stage"] != stage], metrics)
    shutil.rmtree(folder_of_stage(document, stage, output_dir), ignore_errors=True)
    num_problems = min(TIMED_PROBLEMS, document.get("num_eval", TIMED_PROBLEMS))  # evaluation is not timed
    evaluated = {"num_eval": num_problems, "samples_at_ends": None}
    train_missing(regime.path, document, stage, output_dir, evaluated=evaluated)


def outlook(regimes: Sequence[Regime], processes: int | None) -> str:
    """
    What is still missing, and how long it will take.

    Args:
        regimes (`Sequence[Regime]`):
            The regimes.
        processes (`int`, *optional*):
            Runs at a time.

    Returns:
        `str`: A line per regime. Runs count as missing while the stages before theirs are not complete, for those
        decide what they are; a regime that turns out not to be admitted needs fewer.
    """
    lines = []
    for regime in regimes:
        rows, complete, missing = read_results(regime.path), True, {}
        for stage in STAGES:
            count = expected(regime, stage)
            if complete and count:
                document = regime.document(stage, stage_arms(regime, stage, rows))
                _, known, wanted = runs_of_stage(document, stage, rows)
                count = len(wanted - known.keys())
                if count and stage == "seconds":
                    count = len(wanted)  # all arms are timed in one sitting
            complete = complete and not count
            if count:
                missing[stage] = count
        if not missing:
            lines.append(f"{regime.name}: complete")
            continue
        seconds = [run.points[-1]["seconds"] for stage in STAGES for run in to_runs(rows, stage)]
        names = ", ".join(f"{stage} {count}" for stage, count in missing.items())
        time = "no run of it has shown yet how long one takes"
        if seconds:
            hours = sum(missing.values()) * OVERHEAD * statistics.mean(seconds) / (processes or 1) / 3600
            time = f"about {hours:.1f} hours, by the {len(seconds)} runs that are there"
        lines.append(f"{regime.name}: {sum(missing.values())} runs missing ({names}); {time}")
    return "\n".join(lines)


def main() -> None:
    """Trains or reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("regimes", nargs="*", help="to train: names of files in regimes/ (default: all)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/regimes"), help="where checkpoints go")
    parser.add_argument("--anyway", action="store_true", help="train all arms also where a regime is not admitted")
    parser.add_argument("--processes", type=int, help="runs at a time, each with one thread (default: 1)")
    parser.add_argument("--large", action="store_true", help="a model of 77 million parameters, on a GPU")
    parser.add_argument("--minutes", type=float, help="stop after so long as Ctrl-C does; the same command goes on")
    args = parser.parse_intermixed_args()  # names of regimes may follow flags
    files = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    for name in args.regimes:
        if name not in files:
            parser.error(unknown_name("regime", name, files))
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes={args.processes}: give at least 1")
    try:
        chosen = [Regime.load(path) for name, path in files.items() if not args.regimes or name in args.regimes]
    except UsageError as error:
        parser.error(str(error))
    chosen = [enlarged(regime) for regime in chosen] if args.large else chosen
    if args.command == "report":
        from regimes_report import report

        if args.regimes:
            parser.error("a report is of all regimes that have results: leave their names out")
        report(chosen, folder() / ("results-large" if args.large else "results"))
        return
    if args.minutes:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which `nohup ... &` switches off
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    try:
        for regime in chosen:
            train(regime, args.output_dir, anyway=args.anyway, processes=args.processes)
    finally:
        print(outlook(chosen, args.processes))


if __name__ == "__main__":
    main()

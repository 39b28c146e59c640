"""When does exploration pay? Every method beside GRPO and its controls, where exploration can pay at all.

    python examples/benchmarks/regimes.py train late_code      # or several regimes, or none for all: what is missing
    python examples/benchmarks/regimes.py report               # table, verdicts and picture from results/*.csv

A regime is a file in `regimes/`: what `trl-explore compare` runs, and its arms. Six stages, one after the other:

- *admission rates*, *admission*: GRPO and GRPO with four times the samples per prompt, for as many steps, each at its
  best learning rate. Where more samples do not make it learn faster per step, more exploration has nothing to give.
- *rates*: every arm at three learning rates, on development seeds (two, unless the file has more).
- *knob*: every arm at its best rate and with two values of one more field, on other development seeds.
- *verdict*: every arm at its best setting, on fresh seeds.
- *seconds*: the first of these again, every arm in one sitting, because a machine is not equally fast at all times.
  What it took for so many tokens is what the runs of the verdict are said to have taken.

Arms are tuned and judged by the mean along their curves. Every run goes into `regimes/results/<regime>.csv`. What is
there with the same settings is not trained again, so a run that was stopped, or moved to another machine, goes on
from there. A regime that is not admitted ends there, unless `--anyway` is given. On a GPU, `train --large --minutes 9`
trains a model of 77 million parameters, in slices. `REGIMES` names another folder of regimes.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from regimes_results import MOST_SAMPLES, Row, read_results, settings_of, to_rows, to_runs, write_results

from trl_explore.compare.costs import mean_along
from trl_explore.compare.run import Run
from trl_explore.names import unknown_name
from trl_explore.runs.inputs import UsageError

HERE = Path(__file__).resolve().parent
STAGES = ("admission rates", "admission", "rates", "knob", "verdict", "seconds")
ROLES = ("baseline", "more samples", "method", "control")
LARGE = {"hidden_size": 768, "num_layers": 10}  # 77 million parameters
KEYS = ("name", "method", "role", "of", "options", "knob")

Arm = dict[str, Any]


def default_seeds() -> dict[str, list[int]]:
    """Seeds of each stage; those of the admission are those of rates and verdict."""
    return {"rates": [100, 102], "knob": [101, 103], "verdict": [0, 1, 2, 3, 4]}


@dataclass(frozen=True)
class Regime:
    """
    A file of `regimes/`.

    Args:
        name (`str`):
            Name of the file.
        claim (`str`):
            What is claimed to pay here, and why.
        metric (`str`):
            What arms are tuned and judged by, such as `"greedy_accuracy"`.
        comparison (`dict`):
            What `trl-explore compare` is given, without seeds and arms.
        admission_steps (`int`):
            Optimizer steps of the admission.
        learning_rates (`list[float]`):
            Tried for every arm.
        arms (`list[dict]`):
            Arms with `name`, `method`, `role`, `options`, and `knob`: a field with the values to try, the first of
            which holds while rates are tried. A control says `of` which method.
        seeds (`dict[str, list[int]]`, *optional*):
            Seeds of the stages.
    """

    name: str
    claim: str
    metric: str
    comparison: dict[str, Any]
    admission_steps: int
    learning_rates: list[float]
    arms: list[Arm]
    seeds: dict[str, list[int]] = field(default_factory=default_seeds)

    @classmethod
    def load(cls, path: Path) -> "Regime":
        """Reads a file; what is wrong with it is said in one sentence."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = [spec.name for spec in fields(cls) if spec.name != "name"]
        for name in document:
            if name not in known:
                raise UsageError(f"{path.name}: {unknown_name('field', str(name), known)}")
        missing = set(known) - {"seeds"} - document.keys()
        if missing:
            raise UsageError(f"{path.name}: {', '.join(sorted(missing))} missing")
        regime = cls(name=path.stem, **document)
        try:
            regime.check()
        except UsageError as error:
            raise UsageError(f"{path.name}: {error}") from None
        return regime

    def check(self) -> None:
        """Whether arms are tuned alike, and `trl-explore compare` takes them."""
        from trl_explore.compare.settings import read_comparison

        for arm in self.arms:
            for key in arm:
                if key not in KEYS:
                    raise UsageError(f"arm {arm.get('name')}: {unknown_name('field', key, KEYS)}")
            if arm.get("role") not in ROLES:
                raise UsageError(f"arm {arm.get('name')}: role={arm.get('role')!r}: choose one of {', '.join(ROLES)}")
            if arm["role"] == "control" and arm.get("of") not in [a["name"] for a in self.arms]:
                raise UsageError(f"arm {arm['name']}: of={arm.get('of')!r}: name the method that it is a control of")
        roles = [arm["role"] for arm in self.arms]
        if roles[:2] != ["baseline", "more samples"] or len({*roles[:2]} & {*roles[2:]}):
            raise UsageError("arms: the first is the baseline, the second has more samples, and no others are")
        sizes = {arm["name"]: [len(values) for values in arm["knob"].values()] for arm in self.arms}
        if any(size != [2] for size in sizes.values()):
            raise UsageError(f"arms are tuned alike, over two values of one field each, got {sizes}")
        for stage in ("admission rates", "rates"):
            comparison = read_comparison(self.document(stage, stage_arms(self, stage, [])))
        if self.metric not in comparison.metrics:
            raise UsageError(f"metric={self.metric!r} is not measured; add it to the comparison's metrics")
        if comparison.num_samples > MOST_SAMPLES:
            raise UsageError(f"metrics: more than {MOST_SAMPLES} samples per problem cannot be written down")

    @property
    def path(self) -> Path:
        """Where its results are."""
        return folder() / "results" / f"{self.name}.csv"

    def seeds_of(self, stage: str) -> list[int]:
        """Seeds of a stage."""
        if stage == "seconds":
            return self.seeds.get(stage, self.seeds["verdict"][:1])
        return self.seeds[{"admission": "verdict", "admission rates": "rates"}.get(stage, stage)]

    def document(self, stage: str, arms: list[Arm]) -> dict[str, Any]:
        """A file for `trl-explore compare`."""
        budget = {"steps": self.admission_steps} if stage.startswith("admission") else self.comparison["budget"]
        return {**self.comparison, "budget": budget, "seeds": self.seeds_of(stage), "arms": arms}


def folder() -> Path:
    """The folder of the regimes."""
    return Path(os.environ.get("REGIMES", HERE / "regimes"))


def enlarged(regime: Regime) -> Regime:
    """
    The same regime for a GPU: a larger model in bfloat16, a tenth of the learning rates, two seeds. All arms in one
    sitting may not fit a slice of time, and no other work is on the GPU.

    Args:
        regime ([`Regime`]):
            A regime of the tiny model.

    Returns:
        [`Regime`]: With results of its own.
    """
    common = {**regime.comparison.get("common", {}), "use_cpu": False, "bf16": True}
    return replace(
        regime,
        name=f"{regime.name}-large",
        comparison={**regime.comparison, "model_size": LARGE, "common": common},
        seeds={**regime.seeds, "verdict": regime.seeds["verdict"][:2], "seconds": []},
        learning_rates=[float(f"{rate / 10:g}") for rate in regime.learning_rates],
    )


def stage_arms(regime: Regime, stage: str, rows: list[Row]) -> list[Arm]:
    """
    What a stage runs.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            One of the stages.
        rows (`list[dict]`):
            Results of the stages before.

    Returns:
        `list[dict]`: Arms of a comparison.
    """
    arms = regime.arms[:2] if stage.startswith("admission") else regime.arms
    if stage == "admission":
        return [_best(regime, "admission rates", at_rates(regime, arm), rows, arm["name"]) for arm in arms]
    if stage in ("admission rates", "rates"):
        return [entry for arm in arms for entry in at_rates(regime, arm)]
    tried = [
        with_knob(arm, _best(regime, "rates", at_rates(regime, arm), rows, arm["name"])["options"]) for arm in arms
    ]
    if stage == "knob":
        return [entry for entries in tried for entry in entries]
    return [_best(regime, "knob", own, rows, arm["name"]) for arm, own in zip(arms, tried, strict=True)]


def at_rates(regime: Regime, arm: Arm) -> list[Arm]:
    """An arm at every learning rate, with the first value of its knob."""
    fixed = {name: values[0] for name, values in arm["knob"].items()} | arm.get("options", {})
    return [_entry(arm, "learning_rate", fixed, rate) for rate in regime.learning_rates]


def with_knob(arm: Arm, options: Mapping[str, Any]) -> list[Arm]:
    """An arm with every value of its knob."""
    ((name, values),) = arm["knob"].items()
    return [_entry(arm, name, options, value) for value in values]


def _entry(arm: Arm, name: str, options: Mapping[str, Any], value: Any) -> Arm:
    return {"name": f"{arm['name']}: {name} {value}", "method": arm["method"], "options": {**options, name: value}}


def _best(regime: Regime, stage: str, tried: list[Arm], rows: list[Row], name: str) -> Arm:
    """The one whose curves were highest on average, up to where the run of the stage that got least far stopped."""
    cost = "step" if stage.startswith("admission") else "tokens"
    runs = to_runs(rows, stage)
    reading = min(run.points[-1][cost] for run in runs)

    def height(arm: Arm) -> float:
        own = [run for run in runs if run.arm == arm["name"]]
        return statistics.mean(mean_along(run.points, cost, reading, f"eval/{regime.metric}") for run in own)

    return {**max(tried, key=height), "name": name}


def asked_for(regime: Regime, row: Row) -> bool:
    """
    Whether a result is of the regime as its file is now, not of an arm or a comparison that was changed since.

    Args:
        regime ([`Regime`]):
            The regime.
        row (`dict`):
            One of its results.

    Returns:
        `bool`: `True` also for the stages that a report does not show.
    """
    if row["stage"] not in ("admission", "verdict"):
        return True
    arm = next((arm for arm in regime.arms if arm["name"] == row["arm"]), None)
    if arm is None or row["seed"] not in regime.seeds_of(row["stage"]):
        return False
    options = json.loads(row["options"])
    tried = {"learning_rate": regime.learning_rates, **arm["knob"]}
    return (
        row["settings"]
        == settings_of(regime.document(row["stage"], []), {"method": arm["method"], "options": options})
        and all(options.get(name) == value for name, value in arm.get("options", {}).items())
        and all(options.get(name) in values for name, values in tried.items())
    )


def train(regime: Regime, output_dir: Path, *, anyway: bool = False) -> None:
    """
    Trains what is missing of a regime, and adds it to its results seed by seed.

    Args:
        regime ([`Regime`]):
            The regime.
        output_dir (`Path`):
            Where checkpoints go.
        anyway (`bool`, *optional*, defaults to `False`):
            Whether it goes on where more samples do not help plain GRPO.
    """
    from regimes_report import Results

    for stage in STAGES:
        if stage == "rates" and not anyway and not Results(regime, read_results(regime.path)).admitted:
            print(f"{regime.name}: not admitted, nothing more is trained; --anyway does", flush=True)
            return
        arms = stage_arms(regime, stage, read_results(regime.path))
        for seed in regime.seeds_of(stage):
            train_seed(regime, stage, {**regime.document(stage, arms), "seeds": [seed]}, output_dir / regime.name)


def train_seed(regime: Regime, stage: str, document: dict[str, Any], output_dir: Path) -> None:
    """
    Runs `trl-explore compare` on one seed of a stage, as far as the results do not have it yet.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            One of the stages.
        document (`dict`):
            The comparison, of one seed.
        output_dir (`Path`):
            Where checkpoints go.
    """
    from trl_explore.cli import main
    from trl_explore.compare.folder import RESULT, ComparisonFolder
    from trl_explore.compare.settings import read_comparison

    (seed,), arms = document["seeds"], document["arms"]
    settings = {arm["name"]: settings_of(document, arm) for arm in arms}
    comparison = read_comparison(document)
    metrics, found = list(comparison.metrics), read_results(regime.path)
    # What was measured in another way, or is not asked for any more, is no result.
    rows = [
        row
        for row in found
        if row["stage"] != stage
        or settings.get(row["arm"]) == row["settings"]
        and row["seed"] in regime.seeds_of(stage)
    ]
    known = {run.arm: run for run in to_runs(rows, stage) if run.seed == seed}
    if stage == "seconds" and known.keys() != settings.keys():  # what was timed at another time is no measure
        known, rows = {}, [row for row in rows if row["stage"] != stage]
    if known.keys() == settings.keys():
        if len(rows) < len(found):
            write_results(regime.path, rows, metrics)
        return
    # Every change of a setting makes a folder of its own.
    whole = settings_of(document, {"method": stage, "options": settings})
    place = ComparisonFolder(comparison, output_dir / f"{stage.replace(' ', '-')}-{seed}-{whole}")
    if stage == "seconds":
        shutil.rmtree(place.path, ignore_errors=True)
    place.write_settings()
    for arm in comparison.arms:
        if arm.name in known:
            place.of_run(arm, seed).mkdir(parents=True, exist_ok=True)
            known[arm.name].save(place.of_run(arm, seed) / RESULT)
    print(f"{regime.name}: {stage}, seed {seed}", flush=True)
    code = main(["compare", "--config", str(place.path / "comparison.yaml"), "--output_dir", str(place.path)])
    for arm in arms:
        result = place.of_run(next(a for a in comparison.arms if a.name == arm["name"]), seed) / RESULT
        if arm["name"] not in known and result.is_file():  # also where others are not finished
            rows += to_rows(Run.load(result), stage, arm, settings=settings[arm["name"]], metrics=metrics)
    write_results(regime.path, rows, metrics)
    if code:
        sys.exit(code)


def main() -> None:
    """Trains or reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("regimes", nargs="*", help="to train: names of files in regimes/ (default: all)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/regimes"), help="where checkpoints go")
    parser.add_argument("--anyway", action="store_true", help="train all arms also where a regime is not admitted")
    parser.add_argument("--large", action="store_true", help="a model of 77 million parameters, on a GPU")
    parser.add_argument("--minutes", type=float, help="stop after so long as Ctrl-C does; the same command goes on")
    args = parser.parse_intermixed_args()  # names of regimes may follow flags
    files = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    for name in args.regimes:
        if name not in files:
            parser.error(unknown_name("regime", name, files))
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
    for regime in chosen:
        train(regime, args.output_dir, anyway=args.anyway)


if __name__ == "__main__":
    main()

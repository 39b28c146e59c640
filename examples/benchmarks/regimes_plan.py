"""What `regimes.py` runs: the file of a regime, its stages, and the arms of each."""

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from regimes_results import MOST_SAMPLES, Row, settings_of, to_runs

from trl_explore.compare.costs import mean_along
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name

HERE = Path(__file__).resolve().parent
STAGES = (
    "admission rates",
    "admission",
    "rates",
    "knob",
    "rival rates",
    "rival knob",
    "collapse",
    "method rates",
    "method knob",
    "verdict",
    "seconds",
)
KEPT = ("admission", "collapse", "verdict")  # stages that a report shows
ROLES = ("baseline", "more samples", "rival", "method", "control")
# Who is tuned together. Rivals come after the baseline, whose knob they take.
GROUPS = {"": ("baseline", "more samples"), "rival ": ("rival",), "method ": ("method", "control")}
AGAINST_COLLAPSE = ("entropy bonus", "KL penalty")  # what GRPO may use to keep its variety
LARGE = {"hidden_size": 768, "num_layers": 10}  # 77 million parameters
KEYS = ("name", "method", "role", "of", "options", "knob")

Arm = dict[str, Any]


STAGES_WITH_SEEDS = ("development", "verdict", "seconds")


def default_seeds() -> dict[str, list[int]]:
    """Seeds on which arms are tuned, and those of the verdicts."""
    return {"development": [100, 101, 102, 103], "verdict": list(range(30, 40))}


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
            which holds while rates are tried. A control says `of` which method. The rivals of `rivals.yaml` that the
            file names under `rivals` stand behind the first two.
        variety (`str`, *optional*):
            What tells whether GRPO collapses, such as `"pass_at_16"`. None where it is not asked.
        seeds (`dict[str, list[int]]`, *optional*):
            Seeds of the stages where they are others: `development`, `verdict`, and `seconds`, by default the first
            of the verdicts.
    """

    name: str
    claim: str
    metric: str
    comparison: dict[str, Any]
    admission_steps: int
    learning_rates: list[float]
    arms: list[Arm]
    variety: str | None = None
    seeds: dict[str, list[int]] = field(default_factory=default_seeds)

    @classmethod
    def load(cls, path: Path) -> "Regime":
        """Reads a file; what is wrong with it is said in one sentence."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        known = [*(spec.name for spec in fields(cls) if spec.name != "name"), "rivals"]
        for name in document:
            if name not in known:
                raise UsageError(f"{path.name}: {unknown_name('field', str(name), known)}")
        missing = set(known) - {"seeds", "variety", "rivals"} - document.keys()
        if missing:
            raise UsageError(f"{path.name}: {', '.join(sorted(missing))} missing")
        try:
            rivals = read_rivals(document.pop("rivals", []))
            arms = [*document["arms"][:2], *rivals, *document["arms"][2:]]
            seeds = default_seeds() | document.get("seeds", {})
            for stage in seeds:
                if stage not in STAGES_WITH_SEEDS:
                    raise UsageError(f"seeds: {unknown_name('stage', str(stage), STAGES_WITH_SEEDS)}")
            regime = cls(name=path.stem, **{**document, "arms": arms, "seeds": seeds})
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
        entries = [entry for arm in self.arms for entry in (*at_rates(self, arm), *_with_other_knob(arm))]
        comparison = read_comparison(self.document("verdict", entries))
        for name in ("metric", "variety"):
            wanted = vars(self)[name]
            if wanted is not None and wanted not in comparison.metrics:
                raise UsageError(f"{name}={wanted!r} is not measured; add it to the comparison's metrics")
        if comparison.num_samples > MOST_SAMPLES:
            raise UsageError(f"metrics: more than {MOST_SAMPLES} samples per problem cannot be written down")

    @property
    def path(self) -> Path:
        """Where its results are."""
        return folder() / "results" / f"{self.name}.csv"

    def seeds_of(self, stage: str) -> list[int]:
        """Seeds of a stage: all arms are timed on one."""
        if stage == "seconds":
            return self.seeds.get(stage, self.seeds["verdict"][:1])
        return self.seeds["verdict" if stage in KEPT else "development"]

    def document(self, stage: str, arms: list[Arm]) -> dict[str, Any]:
        """A file for `trl-explore compare`."""
        budget = {"steps": self.admission_steps} if stage.startswith("admission") else self.comparison["budget"]
        document = {**self.comparison, "budget": budget, "seeds": self.seeds_of(stage), "arms": arms}
        if stage not in ("verdict", "seconds"):
            document.pop("samples_at_ends", None)  # is asked of no others
        return document


def folder() -> Path:
    """The folder of the regimes."""
    return Path(os.environ.get("REGIMES", HERE / "regimes"))


def read_rivals(names: list[str]) -> list[Arm]:
    """The arms of `rivals.yaml` with these names."""
    known = {arm["name"]: arm for arm in yaml.safe_load((HERE / "rivals.yaml").read_text(encoding="utf-8"))}
    for name in names:
        if name not in known:
            raise UsageError(f"rivals: {unknown_name('rival', str(name), known)}")
    return [{**known[name], "role": "rival"} for name in names]


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
    if stage == "admission rates":
        return [entry for arm in regime.arms[:2] for entry in at_rates(regime, arm)]
    if stage == "admission":
        return [
            {**_highest(regime, at_rates(regime, arm), rows, ("admission rates",), cost="step"), "name": arm["name"]}
            for arm in regime.arms[:2]
        ]
    if stage == "collapse":
        return [_most_varied(regime, rows)] if regime.variety else []
    for group, roles in GROUPS.items():
        own = [_with_base(regime, arm, rows) for arm in regime.arms if arm["role"] in roles]
        if stage == f"{group}rates":
            return [entry for arm in own for entry in at_rates(regime, arm)]
        if stage == f"{group}knob":
            return [_other_knob(regime, arm, rows) for arm in own]
    return [picked(regime, arm, rows) for arm in regime.arms]


def tuning(role: str) -> tuple[str, str]:
    """The stages in which arms of a role are tuned."""
    group = next(name for name, roles in GROUPS.items() if role in roles)
    return f"{group}rates", f"{group}knob"


def at_rates(regime: Regime, arm: Arm) -> list[Arm]:
    """An arm at every learning rate, with the first value of its knob."""
    fixed = {name: values[0] for name, values in arm["knob"].items()} | arm.get("options", {})
    return [_entry(arm, "learning_rate", fixed, rate) for rate in regime.learning_rates]


def tried(regime: Regime, arm: Arm, rows: list[Row]) -> list[Arm]:
    """All settings that an arm was tuned over."""
    arm = _with_base(regime, arm, rows)
    return [*at_rates(regime, arm), _other_knob(regime, arm, rows)]


def picked(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """An arm at its best setting."""
    best = _highest(regime, tried(regime, arm, rows), rows, tuning(arm["role"]))
    return {**best, "name": arm["name"]}


def _with_base(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """A rival with the baseline's knob as it was picked: it is the tuned baseline with one thing changed."""
    if arm["role"] != "rival" or not any(row["stage"] == "knob" for row in rows):
        return arm
    base = picked(regime, regime.arms[0], rows)["options"]
    return {**arm, "options": {name: base[name] for name in regime.arms[0]["knob"]} | arm.get("options", {})}


def _other_knob(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """An arm at its best learning rate, with the second value of its knob."""
    best = _highest(regime, at_rates(regime, arm), rows, tuning(arm["role"])[:1])
    return _with_other_knob({**arm, "options": best["options"]})[0]


def _with_other_knob(arm: Arm) -> list[Arm]:
    return [_entry(arm, name, arm.get("options", {}), values[1]) for name, values in arm["knob"].items()]


def _most_varied(regime: Regime, rows: list[Row]) -> Arm:
    """GRPO, or GRPO with something against collapse, at the setting that ends with most variety."""
    arms = [regime.arms[0], *(arm for arm in regime.arms if arm["name"] in AGAINST_COLLAPSE)]
    entries = [entry for arm in arms for entry in tried(regime, arm, rows)]
    stages = (*tuning("baseline"), *tuning("rival"))
    best = _highest(regime, entries, rows, stages, metric=regime.variety, along=False)
    return {**best, "name": f"{best['name'].split(':')[0]}, tuned on {regime.variety}"}


def _entry(arm: Arm, name: str, options: Mapping[str, Any], value: Any) -> Arm:
    return {"name": f"{arm['name']}: {name} {value}", "method": arm["method"], "options": {**options, name: value}}


def _highest(
    regime: Regime,
    entries: list[Arm],
    rows: list[Row],
    stages: tuple[str, ...],
    *,
    cost: str = "tokens",
    metric: str | None = None,
    along: bool = True,
) -> Arm:
    """The one whose curves were highest on average, up to where the shortest run stopped, or at their end."""
    runs = [run for stage in stages for run in to_runs(rows, stage)]
    reading = min(run.points[-1][cost] for run in runs)
    name = f"eval/{metric or regime.metric}"

    def height(entry: Arm) -> float:
        own = [run.points for run in runs if run.arm == entry["name"]]
        return statistics.mean(mean_along(p, cost, reading, name) if along else p[-1][name] for p in own)

    return max(entries, key=height)


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
    if row["stage"] not in KEPT:
        return True
    name = row["arm"].split(", tuned on")[0] if row["stage"] == "collapse" else row["arm"]
    arm = next((arm for arm in regime.arms if arm["name"] == name), None)
    if arm is None or row["seed"] not in regime.seeds_of(row["stage"]):
        return False
    options = json.loads(row["options"])
    values = {"learning_rate": regime.learning_rates, **arm["knob"]}
    return (
        row["settings"]
        == settings_of(regime.document(row["stage"], []), {"method": arm["method"], "options": options})
        and all(options.get(name) == value for name, value in arm.get("options", {}).items())
        and all(options.get(name) in among for name, among in values.items())
    )


def expected(regime: Regime, stage: str) -> int:
    """Runs of a stage, known before it is known which."""
    sizes = {
        "admission rates": 2 * len(regime.learning_rates),
        "admission": 2,
        "collapse": 1 if regime.variety else 0,
        "verdict": len(regime.arms),
        "seconds": len(regime.arms),
    }
    for group, roles in GROUPS.items():
        count = sum(arm["role"] in roles for arm in regime.arms)
        sizes |= {f"{group}rates": count * len(regime.learning_rates), f"{group}knob": count}
    return sizes[stage] * len(regime.seeds_of(stage))

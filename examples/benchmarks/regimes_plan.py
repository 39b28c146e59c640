"""Regimes of `regimes.py`: their YAML files, and the stages in which their arms are trained.

`regimes.py` explains the terms regime, arm, knob and stage.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from regimes_results import MOST_SAMPLES, REPORTED_STAGES, Row, settings_of, to_runs

from trl_explore.compare.costs import mean_along
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name

HERE = Path(__file__).resolve().parent
STAGES = (  # in the order in which they are trained
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
STAGES_WITH_SEEDS = ("development", "verdict", "seconds")  # keys of `seeds` in the file of a regime
ROLES = ("baseline", "more samples", "rival", "method", "control")
# Roles that are tuned in the same two stages, by the prefix of these stages. Rivals are tuned after the baseline,
# because they get the best value of its knob.
GROUPS = {"": ("baseline", "more samples"), "rival ": ("rival",), "method ": ("method", "control")}
AGAINST_COLLAPSE = ("entropy bonus", "KL penalty")  # rivals that the stage "collapse" may choose instead of GRPO
LARGE = {"hidden_size": 768, "num_layers": 10}  # 77 million parameters
ARM_FIELDS = ("name", "method", "role", "of", "options", "knob")

Arm = dict[str, Any]


def default_seeds() -> dict[str, list[int]]:
    """Return the seeds for tuning (`development`), and the fresh seeds for the final comparison (`verdict`)."""
    return {"development": [100, 101, 102, 103], "verdict": list(range(30, 40))}


_CHECKED: set[str] = set()  # contents of the files of regimes without a mistake; a check takes seconds


@dataclass(frozen=True)
class Regime:
    """
    Contents of a file in `regimes/`.

    Args:
        name (`str`):
            Name of the file, without its suffix.
        claim (`str`):
            Text that says which method should help here, and why. Reports show it.
        metric (`str`):
            Metric by which arms are tuned and compared, such as `"greedy_accuracy"`.
        comparison (`dict`):
            Fields of the YAML file of `trl-explore compare`, except `seeds` and `arms`.
        admission_steps (`int`):
            Optimizer steps of each run in the stages *admission rates* and *admission*.
        learning_rates (`list[float]`):
            Learning rates to try for every arm.
        arms (`list[dict]`):
            Arms, each with `name`, `method`, `role`, `options` and `knob`. The first arm is the baseline, the second
            has more samples per prompt. Then come the rivals, which the file names under `rivals`. `knob` has one
            field of the configuration with two values. While learning rates are tried, the field has the first value.
            A control also has `of`, the name of its method.
        variety (`str`, *optional*):
            Metric of the variety of completions, such as `"pass_at_16"`. If None, the stage *collapse* is left out.
        seeds (`dict[str, list[int]]`, *optional*):
            Seeds: `development` for tuning, `verdict` for the stages that reports show, and `seconds` for timing. By
            default, arms are timed on the first verdict seed.
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
        """
        Read the file of a regime, and check it.

        Raises:
            UsageError: If the file has a mistake. The message names the file and the mistake.
        """
        text = path.read_text(encoding="utf-8")
        document = yaml.safe_load(text)
        if not isinstance(document, dict):
            raise UsageError(f"{path.name} has no fields")
        known = [spec.name for spec in fields(cls) if spec.name != "name"]
        known.append("rivals")
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
            if text not in _CHECKED:
                regime.check()
        except UsageError as error:
            raise UsageError(f"{path.name}: {error}") from None
        _CHECKED.add(text)
        return regime

    def check(self) -> None:
        """
        Check the arms and the metrics.

        `trl-explore compare` must accept each arm at every learning rate and with both values of its knob.

        Raises:
            UsageError: If an arm has a mistake, or a metric is not measured.
        """
        from trl_explore.compare.settings import read_comparison

        if "tokens" not in self.comparison.get("budget", {}):
            raise UsageError("comparison: give the budget in tokens, because arms are compared at equal tokens")
        for arm in self.arms:
            for name in ("name", "method", "knob"):
                if name not in arm:
                    raise UsageError(f"arm {arm.get('name')}: give it a {name}")
            for name in arm:
                if name not in ARM_FIELDS:
                    raise UsageError(f"arm {arm.get('name')}: {unknown_name('field', name, ARM_FIELDS)}")
            if arm.get("role") not in ROLES:
                raise UsageError(f"arm {arm.get('name')}: role={arm.get('role')!r}: choose one of {', '.join(ROLES)}")
            if arm["role"] == "control" and arm.get("of") not in [other["name"] for other in self.arms]:
                raise UsageError(
                    f"arm {arm['name']}: of={arm.get('of')!r}: name the method that this arm is a control of"
                )
        roles = [arm["role"] for arm in self.arms]
        first_roles = ["baseline", "more samples"]
        if roles[:2] != first_roles or any(role in first_roles for role in roles[2:]):
            raise UsageError(
                "arms: the first arm must have the role baseline, the second the role more samples, "
                "and every other arm another role"
            )
        for arm in self.arms:
            if [len(values) for values in arm["knob"].values()] != [2]:
                raise UsageError(
                    f"arm {arm['name']}: knob={arm['knob']!r}: give one field with two values, "
                    "so that all arms are tuned with equal effort"
                )
        candidates = []
        for arm in self.arms:
            candidates += [*at_each_rate(self, arm), _at_second_knob_value(arm)]
        comparison = read_comparison(self.document("verdict", candidates))
        for name, metric in {"metric": self.metric, "variety": self.variety}.items():
            if metric is not None and metric not in comparison.metrics:
                raise UsageError(f"{name}={metric!r} is not measured; add it to the comparison's metrics")
        if comparison.num_samples > MOST_SAMPLES:
            raise UsageError(
                f"metrics: they need {comparison.num_samples} samples per problem, but a results file can hold the "
                f"successes of at most {MOST_SAMPLES} samples"
            )

    @property
    def path(self) -> Path:
        """Path of the results file."""
        return folder() / "results" / f"{self.name}.csv"

    def seeds_of(self, stage: str) -> list[int]:
        """Return the seeds of a stage."""
        if stage == "seconds":
            return self.seeds.get(stage, self.seeds["verdict"][:1])
        return self.seeds["verdict" if stage in REPORTED_STAGES else "development"]

    def document(self, stage: str, arms: list[Arm]) -> dict[str, Any]:
        """Return the fields of the YAML file with which `trl-explore compare` trains arms in a stage."""
        budget = {"steps": self.admission_steps} if stage.startswith("admission") else self.comparison["budget"]
        document = {**self.comparison, "budget": budget, "seeds": self.seeds_of(stage), "arms": arms}
        if stage not in ("verdict", "seconds"):
            document.pop("samples_at_ends", None)  # reports need many samples of verdict runs only
        return document


def folder() -> Path:
    """Return the folder with the files of the regimes. The environment variable `REGIMES` may name another folder."""
    return Path(os.environ.get("REGIMES", HERE / "regimes"))


def load_regimes(names: Sequence[str]) -> list[Regime]:
    """Return the regimes of these names, or all regimes if there are no names.

    Raises:
        UsageError: If there is no regime of a name, or its file has a mistake.
    """
    files = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    for name in names:
        if name not in files:
            raise UsageError(unknown_name("regime", name, files))
    return [Regime.load(path) for name, path in files.items() if not names or name in names]


def read_rivals(names: list[str]) -> list[Arm]:
    """Return the arms of `rivals.yaml` that have these names."""
    known = {arm["name"]: arm for arm in yaml.safe_load((HERE / "rivals.yaml").read_text(encoding="utf-8"))}
    for name in names:
        if name not in known:
            raise UsageError(f"rivals: {unknown_name('rival', str(name), known)}")
    return [{**known[name], "role": "rival"} for name in names]


def enlarged(regime: Regime) -> Regime:
    """
    Return a regime for a GPU: a larger model in bfloat16, a tenth of the learning rates, and two verdict seeds.

    The stage *seconds* has no seeds and is skipped. A GPU may be available for short periods only, too short to time
    all arms in one sitting. Reports use the seconds of the verdict runs instead. They can be compared, because nothing
    else runs on the GPU.

    Args:
        regime ([`Regime`]):
            A regime of the tiny model.

    Returns:
        [`Regime`]: The new regime. Its name ends in `-large`, so its results go to another file.
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
    Return the arms that a stage trains, with the options that earlier stages chose.

    Args:
        regime ([`Regime`]):
            The regime.
        stage (`str`):
            One of `STAGES`.
        rows (`list[dict]`):
            Results of the earlier stages.

    Returns:
        `list[dict]`: Arms for `trl-explore compare`, with `name`, `method` and `options`.
    """
    if stage == "admission rates":
        candidates = []
        for arm in regime.arms[:2]:
            candidates += at_each_rate(regime, arm)
        return candidates
    if stage == "admission":
        chosen = []
        for arm in regime.arms[:2]:
            best = _best_candidate(regime, at_each_rate(regime, arm), rows, ("admission rates",), cost="step")
            chosen.append({**best, "name": arm["name"]})
        return chosen
    if stage == "collapse":
        return [_most_varied(regime, rows)] if regime.variety else []
    for group, roles in GROUPS.items():
        if stage not in (f"{group}rates", f"{group}knob"):
            continue
        candidates = []
        for arm in regime.arms:
            if arm["role"] in roles:
                arm = _with_knob_of_baseline(regime, arm, rows)
                if stage == f"{group}rates":
                    candidates += at_each_rate(regime, arm)
                else:
                    candidates.append(_at_best_rate_and_second_knob_value(regime, arm, rows))
        return candidates
    return [best_setting(regime, arm, rows) for arm in regime.arms]


def tuning_stages(role: str) -> tuple[str, str]:
    """Return the two stages in which arms of a role are tuned."""
    group = next(name for name, roles in GROUPS.items() if role in roles)
    return f"{group}rates", f"{group}knob"


def at_each_rate(regime: Regime, arm: Arm) -> list[Arm]:
    """Return an arm once per learning rate, with the first value of its knob."""
    options = {name: values[0] for name, values in arm["knob"].items()} | arm.get("options", {})
    return [_candidate(arm, options, "learning_rate", rate) for rate in regime.learning_rates]


def tried_settings(regime: Regime, arm: Arm, rows: list[Row]) -> list[Arm]:
    """Return an arm once per setting that was tried in its two tuning stages."""
    arm = _with_knob_of_baseline(regime, arm, rows)
    return [*at_each_rate(regime, arm), _at_best_rate_and_second_knob_value(regime, arm, rows)]


def best_setting(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """Return an arm at the best setting of its two tuning stages."""
    best = _best_candidate(regime, tried_settings(regime, arm, rows), rows, tuning_stages(arm["role"]))
    return {**best, "name": arm["name"]}


def _with_knob_of_baseline(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """Add the best value of the baseline's knob to the options of a rival. Other arms stay unchanged, and so does a
    rival while the baseline's knob has no results."""
    if arm["role"] != "rival" or not any(row["stage"] == "knob" for row in rows):
        return arm
    baseline = regime.arms[0]
    tuned = best_setting(regime, baseline, rows)["options"]
    return {**arm, "options": {name: tuned[name] for name in baseline["knob"]} | arm.get("options", {})}


def _at_best_rate_and_second_knob_value(regime: Regime, arm: Arm, rows: list[Row]) -> Arm:
    """Return an arm at its best learning rate, with the second value of its knob."""
    best = _best_candidate(regime, at_each_rate(regime, arm), rows, tuning_stages(arm["role"])[:1])
    return _at_second_knob_value({**arm, "options": best["options"]})


def _at_second_knob_value(arm: Arm) -> Arm:
    """Return an arm with its options and the second value of its knob."""
    ((name, values),) = arm["knob"].items()
    return _candidate(arm, arm.get("options", {}), name, values[1])


def _most_varied(regime: Regime, rows: list[Row]) -> Arm:
    """Return the setting of GRPO, of the entropy bonus or of the KL penalty that had the highest variety at the end of
    the tuning runs. The rivals count only if the regime has them."""
    arms = [regime.arms[0], *(arm for arm in regime.arms if arm["name"] in AGAINST_COLLAPSE)]
    candidates = []
    for arm in arms:
        candidates += tried_settings(regime, arm, rows)
    stages = (*tuning_stages("baseline"), *tuning_stages("rival"))
    best = _best_candidate(regime, candidates, rows, stages, metric=regime.variety, along=False)
    arm_name = best["name"].split(":")[0]
    return {**best, "name": f"{arm_name}, tuned on {regime.variety}"}


def _candidate(arm: Arm, options: Mapping[str, Any], name: str, value: Any) -> Arm:
    """Return an arm with `options` and the option `name`, which also becomes part of the arm's name."""
    return {"name": f"{arm['name']}: {name} {value}", "method": arm["method"], "options": {**options, name: value}}


def _best_candidate(
    regime: Regime,
    candidates: list[Arm],
    rows: list[Row],
    stages: tuple[str, ...],
    *,
    cost: str = "tokens",
    metric: str | None = None,
    along: bool = True,
) -> Arm:
    """
    Return the candidate with the highest metric, averaged over seeds.

    Args:
        regime ([`Regime`]):
            The regime.
        candidates (`list[dict]`):
            Arms to choose from.
        rows (`list[dict]`):
            Results of the regime.
        stages (`tuple[str, ...]`):
            Stages whose runs count.
        cost (`str`, *optional*, defaults to `"tokens"`):
            Cost that is equal for all candidates: as much as the shortest run spent.
        metric (`str`, *optional*):
            The metric. By default the metric of the regime.
        along (`bool`, *optional*, defaults to `True`):
            Whether to average the metric along the learning curve. If False, the last evaluation counts.
    """
    runs = []
    for stage in stages:
        runs += to_runs(rows, stage)
    smallest_cost = min(run.points[-1][cost] for run in runs)
    name = f"eval/{metric or regime.metric}"

    def mean_metric(candidate: Arm) -> float:
        values = []
        for run in runs:
            if run.arm == candidate["name"]:
                values.append(mean_along(run.points, cost, smallest_cost, name) if along else run.points[-1][name])
        return statistics.mean(values)

    return max(candidates, key=mean_metric)


def asked_for(regime: Regime, row: Row) -> bool:
    """
    Return whether a result belongs to the regime as its file is now.

    If the file was changed after a run, the run may have other settings, or an arm or seed that is no longer in the
    file.

    Args:
        regime ([`Regime`]):
            The regime.
        row (`dict`):
            A line of its results file.

    Returns:
        `bool`: Always `True` for stages that reports do not show. They are not checked.
    """
    if row["stage"] not in REPORTED_STAGES:
        return True
    arm_name = row["arm"]
    if row["stage"] == "collapse":
        arm_name = arm_name.split(", tuned on")[0]  # the stage adds this to the name of the arm
    arm = next((arm for arm in regime.arms if arm["name"] == arm_name), None)
    if arm is None or row["seed"] not in regime.seeds_of(row["stage"]):
        return False
    options = json.loads(row["options"])
    document = regime.document(row["stage"], [])
    if row["settings"] != settings_of(document, {"method": arm["method"], "options": options}):
        return False
    has_fixed_options = all(options.get(name) == value for name, value in arm.get("options", {}).items())
    tuned = {"learning_rate": regime.learning_rates, **arm["knob"]}
    has_tuned_options = all(options.get(name) in values for name, values in tuned.items())
    return has_fixed_options and has_tuned_options


def expected(regime: Regime, stage: str) -> int:
    """Return the number of runs of a stage. It does not depend on the settings that earlier stages choose."""
    num_arms = {
        "admission rates": 2 * len(regime.learning_rates),
        "admission": 2,
        "collapse": 1 if regime.variety else 0,
        "verdict": len(regime.arms),
        "seconds": len(regime.arms),
    }
    for group, roles in GROUPS.items():
        count = sum(arm["role"] in roles for arm in regime.arms)
        num_arms[f"{group}rates"] = count * len(regime.learning_rates)
        num_arms[f"{group}knob"] = count
    return num_arms[stage] * len(regime.seeds_of(stage))

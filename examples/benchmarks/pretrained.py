"""Does exploration help a pretrained model? SmolLM2-135M on five tasks, from the learning rate to the tables.

    python examples/benchmarks/pretrained.py train countdown --processes 2 --minutes 120
    python examples/benchmarks/pretrained.py collect            # after `train` was killed: keep its finished runs
    python examples/benchmarks/pretrained.py status             # the missing runs, and how long they will take
    python examples/benchmarks/pretrained.py report             # tables and a picture of the results

`pretrained.yaml` has the tasks and the arms. Each task has these stages:

- *rates*: GRPO at three learning rates, on one development seed. All arms of the task get the best rate. Before this
  stage is finished, they get the rate `first_rate`. If another rate turns out best, these runs no longer count.
- *fields*: each rival and each method with two values of its main field, on the development seed.
- *verdict*: all arms with the best values, on fresh seeds. `auto` has its defaults, and also runs with the better one
  of two advantages. Before *fields* is finished, only the arms without a choice are known.
- *shuffled*: GRPO with rewards that are shuffled within the batch. This is a check: it should not improve.

`--stages` names the stages to train, and `--arms` the arms. To continue after an interruption, use the same `--arms`.
Finished runs are in `pretrained_results/<task>.csv`, and
their steps in `<task>_steps.csv`. They are not trained again, also on another machine. All runs of a seed should come
from one machine, because another one teaches the model slightly differently. The report names the seeds whose models
differed before training. The folder `earlier_rule` has runs with the earlier rule of `auto`, beside GRPO's on the same
machine.
"""

import argparse
import signal
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from auto_regimes import Runs, gaps, reading_of, shown
from regimes_effects import label
from regimes_results import Row, by_arm_and_seed, read_results
from stages import Stage

from trl_explore.compare.costs import mean_along, mean_curve, other_starts, value_at
from trl_explore.errors import UsageError
from trl_explore.names import unknown_name

HERE = Path(__file__).resolve().parent
SETTINGS, RESULTS = HERE / "pretrained.yaml", HERE / "pretrained_results"
PICTURE = HERE.parent.parent / "docs" / "images" / "pretrained.png"
BASE = "GRPO"
SHUFFLED = "examples.benchmarks.pretrained:advantages_of_shuffled_rewards"
OVERHEAD = 1.3  # duration of a run, with loading and evaluation, divided by its seconds of training
FIRST_GUESS = 30 * 40.0  # CPU seconds of a run's training, if no run is finished: 30 steps of 40 seconds
COSTS = {"tokens": "generated tokens", "cpu_seconds": "CPU seconds"}
Arm = dict[str, Any]


def advantages_of_shuffled_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """Return GRPO's advantages of rewards that were shuffled within the batch, `(P, G)`."""
    # The seed is the sum of the rewards, because all processes have the same rewards but different random states.
    order = torch.randperm(rewards.numel(), generator=torch.Generator().manual_seed(int(rewards.sum() * 1000)))
    mixed = rewards.flatten()[order.to(rewards.device)].view_as(rewards)
    centred = mixed - mixed.mean(dim=1, keepdim=True)
    return centred / (mixed.std(dim=1, keepdim=True) + 1e-4)


@dataclass(frozen=True)
class Task:
    """
    A task of `pretrained.yaml`.

    Args:
        name (`str`):
            Name of the task.
        comparison (`dict`):
            Comparison without budget, seeds and arms.
        stages (`dict[str, dict]`):
            Seeds, budget and number of evaluations of each stage.
        arms (`list[dict]`):
            Arms with `name`, `method`, `options` and `choice`.
        learning_rates (`list[float]`):
            Rates of the first stage.
        first_rate (`float`):
            Rate of the other stages before the first stage is finished.
        judged_by (`list[str]`):
            Metrics by which settings are chosen.
        advantages (`list[str]`):
            Names of the arms with another advantage. `auto` also runs with the better of these advantages.
    """

    name: str
    comparison: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    arms: list[Arm]
    learning_rates: list[float]
    first_rate: float
    judged_by: list[str]
    advantages: list[str]

    @property
    def path(self) -> Path:
        """Path of the results."""
        return RESULTS / f"{self.name}.csv"

    def document(self, stage: str, rows: list[Row]) -> dict[str, Any]:
        """Return the comparison of a stage for `trl-explore compare`."""
        if stage == "rates":
            arms = [self.at_rate(rate) for rate in self.learning_rates]
        elif stage == "fields":
            arms = [entry for arm in self.arms for entry in self.variants(arm, rows)]
        elif stage == "shuffled":
            arms = [{"name": stage, "method": "exploration", "options": {"advantage": SHUFFLED, **self.rate(rows)}}]
        elif self.missing("fields", rows):
            arms = [self.chosen(arm, rows) for arm in self.arms if "choice" not in arm]
        else:
            arms = [self.chosen(arm, rows) for arm in self.arms]
            better = self.better_advantage(rows)
            auto = {"name": f"auto, {better['name']}", "method": "auto", "options": better["options"]}
            arms.insert(2, auto)
        return {**self.comparison, **self.stages[stage], "arms": arms}

    def stage(self, name: str, rows: list[Row], folder: Path = Path(), arms: Sequence[str] | None = None) -> Stage:
        """Return a stage. `folder` is for checkpoints of the task. Only the arms in `arms` are trained."""
        steps = self.path.with_name(f"{self.name}_steps.csv")
        return Stage(name, self.document(name, rows), self.path, folder, steps, arms)

    def runs(self, stage: str, rows: list[Row]) -> Runs:
        """Return the evaluations of a stage with the settings of today, by arm and seed."""
        return by_arm_and_seed(self.stage(stage, rows).without_stale(rows), stage)

    def runs_with_earlier_rule(self) -> Runs:
        """Return the evaluations of GRPO and of `auto` with its earlier rule, by arm and seed. Empty if there are
        none."""
        return by_arm_and_seed(read_results(RESULTS / "earlier_rule" / self.path.name), "verdict")

    def missing(self, stage: str, rows: list[Row]) -> int:
        """Return the number of missing runs of a stage."""
        count = len(self.stage(stage, rows).missing(rows))
        if stage == "verdict" and self.missing("fields", rows):
            # These arms are not in the comparison yet: the arms with a choice, and `auto` with an advantage.
            num_unknown = sum("choice" in arm for arm in self.arms) + 1
            count += num_unknown * len(self.stages[stage]["seeds"])
        return count

    def at_rate(self, rate: float) -> Arm:
        """Return GRPO at a learning rate."""
        return {"name": f"{BASE}, {rate:g}", "method": "grpo", "options": {"learning_rate": rate}}

    def rate(self, rows: list[Row]) -> dict[str, Any]:
        """Return the field of the best learning rate, or of the first rate if no rate was tried."""
        if self.missing("rates", rows):
            return {"learning_rate": self.first_rate}
        return self.best([self.at_rate(rate) for rate in self.learning_rates], "rates", rows)["options"]

    def variants(self, arm: Arm, rows: list[Row]) -> list[Arm]:
        """Return an arm with each value of its main field, at the best learning rate. Empty if it has no choice."""
        found = []
        for field, values in arm.get("choice", {}).items():
            for value in values:
                options = {**self.rate(rows), **arm.get("options", {}), field: value}
                found.append({"name": f"{arm['name']}, {field} {value}", "method": arm["method"], "options": options})
        return found

    def chosen(self, arm: Arm, rows: list[Row]) -> Arm:
        """Return an arm with the better value of its main field, at the best learning rate."""
        variants = self.variants(arm, rows)
        if variants:
            options = self.best(variants, "fields", rows)["options"]
        else:
            options = {**self.rate(rows), **arm.get("options", {})}
        return {"name": arm["name"], "method": arm["method"], "options": options}

    def better_advantage(self, rows: list[Row]) -> Arm:
        """Return the better one of the arms with another advantage, with the better value of its field."""
        variants, name_of = [], {}
        for arm in self.arms:
            if arm["name"] in self.advantages:
                own = self.variants(arm, rows)
                variants += own
                name_of |= {variant["name"]: arm["name"] for variant in own}
        best = self.best(variants, "fields", rows)
        return {**best, "name": name_of[best["name"]]}

    def best(self, entries: list[Arm], stage: str, rows: list[Row]) -> Arm:
        """Return the arm of a finished stage whose learning curves are highest: by the mean of `judged_by` along the
        curve, up to the tokens that all runs of the stage reached."""
        runs = self.runs(stage, rows)
        reading = reading_of(runs, "tokens")

        def height(entry: Arm) -> float:
            values = []
            for points in runs[entry["name"]].values():
                values += [mean_along(points, "tokens", reading, metric) for metric in self.judged_by]
            return statistics.mean(values)

        return max(entries, key=height)


def read_tasks(path: Path = SETTINGS) -> dict[str, Task]:
    """Read the tasks, by name."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    tasks = {}
    for name, entry in document["tasks"].items():
        own = {"budget": entry["budget"]} if "budget" in entry else {}
        tasks[name] = Task(
            name=name,
            comparison={**document["comparison"], **entry["comparison"]},
            stages={stage: {**settings, **own} for stage, settings in document["stages"].items()},
            arms=[*document["arms"], *entry["arms"]],
            learning_rates=document["learning_rates"],
            first_rate=document["first_rate"],
            judged_by=document["judged_by"],
            advantages=document["advantages"],
        )
    return tasks


def status(tasks: Sequence[Task]) -> str:
    """Return the missing runs of each task, and the time that they take."""
    lines = []
    for task in tasks:
        rows = read_results(task.path)
        counts = {stage: task.missing(stage, rows) for stage in task.stages}
        if not any(counts.values()):
            lines.append(f"{task.name}: complete")
            continue
        seconds = []
        for stage in task.stages:
            for of_seeds in task.runs(stage, rows).values():
                seconds += [points[-1]["cpu_seconds"] for points in of_seeds.values()]
        each = statistics.mean(seconds) if seconds else FIRST_GUESS
        missing = ", ".join(f"{stage} {count}" for stage, count in counts.items() if count)
        hours = OVERHEAD * each * sum(counts.values()) / 3600
        lines.append(f"{task.name}: missing: {missing}; about {hours:.1f} core hours")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- report


def report(tasks: Sequence[Task]) -> str:
    """Return the tables of all tasks with results."""
    blocks = []
    for task in tasks:
        rows = read_results(task.path)
        if rows:
            blocks += [f"**{task.name}**", "", *stage_table(task, rows), ""]
            blocks += verdict_tables(task, task.runs("verdict", rows))
            earlier = task.runs_with_earlier_rule()
            if earlier:
                blocks += [f"{task.name} with the earlier rule of `auto`:", "", *verdict_tables(task, earlier)]
    return "\n".join(blocks).rstrip() + "\n"


def stage_table(task: Task, rows: list[Row]) -> list[str]:
    """Return the table of the development runs: the metrics at the end of each run, in percent."""
    metrics = task.comparison["metrics"]
    labels = " | ".join(label(metric) for metric in metrics)
    lines = [f"| development | tokens | {labels} | entropy | groups without contrast |"]
    lines.append("| --- |" + " ---: |" * (len(metrics) + 3))
    for stage in ("rates", "fields", "shuffled"):
        for arm, of_seeds in task.runs(stage, rows).items():
            for points in of_seeds.values():
                end = points[-1]
                cells = [arm, f"{end['tokens']:,.0f}", *(f"{100 * end[metric]:.1f}" for metric in metrics)]
                cells += [f"{end['entropy']:.2f}", f"{end['frac_reward_zero_std']:.2f}"]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdict_tables(task: Task, runs: Runs) -> list[str]:
    """Return a table of these runs of the verdict for each kind of cost. By metric and arm, it has the metric before
    training and at a cost that all runs reached, and the difference to GRPO along the curve."""
    if BASE not in runs or len(runs) == 1:
        return []
    metrics = task.comparison["metrics"]
    lines = []
    for cost, name in COSTS.items():
        reading = reading_of(runs, cost)
        lines.append(f"| equal {name} ({reading:,.0f}) | arm | seeds | start | end | along the curve, minus GRPO |")
        lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
        for metric in metrics:
            for arm, of_seeds in runs.items():
                start = percent(points[0][metric] for points in of_seeds.values())
                ends = [value_at(points, cost, reading, metric) for points in of_seeds.values()]
                end = percent(end for end in ends if end is not None)
                is_compared = arm != BASE and of_seeds.keys() & runs[BASE].keys()
                gap = shown(*gaps(runs, arm, BASE, cost=cost, metric=metric)) if is_compared else ""
                cells = [label(metric), arm, str(len(of_seeds)), start, end, gap]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    starts = []
    for arm, of_seeds in runs.items():
        starts += [{"arm": arm, "seed": seed, "points": points} for seed, points in of_seeds.items()]
    others = other_starts(starts, BASE, metrics)
    if others:
        names = "; ".join(f"{arm}: {', '.join(map(str, seeds))}" for arm, seeds in others.items())
        lines += [f"Seeds whose model before training was not GRPO's: {names}.", ""]
    return lines


def percent(values: Iterable[float]) -> str:
    """Return the mean of shares, in percent."""
    return f"{100 * statistics.mean(values):.1f}"


def draw(tasks: Sequence[Task], path: Path) -> None:
    """Draw pass@1 and pass@8 of GRPO and `auto` over generated tokens. Thin lines are seeds, thick lines are means. If
    `auto` has no runs with its present rule, draw the runs with the earlier rule."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs_by_task = {}
    for task in tasks:
        runs, title = task.runs("verdict", read_results(task.path)), task.name.replace("_", " ")
        if "auto" not in runs:
            runs, title = task.runs_with_earlier_rule(), f"{title}, earlier rule"
        if runs:
            runs_by_task[title] = runs
    if not runs_by_task:
        return
    size = (1 + 3.2 * len(runs_by_task), 5)
    figure, axes = plt.subplots(2, len(runs_by_task), figsize=size, squeeze=False, sharex="col")
    for column, (name, runs) in enumerate(runs_by_task.items()):
        for axis, metric in zip(axes[:, column], ("pass_at_1", "pass_at_8"), strict=True):
            for arm, color in ((BASE, "0.45"), ("auto", "C0")):
                curves = list(runs.get(arm, {}).values())
                if not curves:
                    continue
                for points in curves:
                    x = [point["tokens"] / 1000 for point in points]
                    y = [100 * point[metric] for point in points]
                    axis.plot(x, y, color=color, linewidth=0.7, alpha=0.5)
                mean = mean_curve(curves, "tokens", metric)
                x, y = [point[0] / 1000 for point in mean], [100 * point[1] for point in mean]
                axis.plot(x, y, color=color, linewidth=2.5, label=arm)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("thousand generated tokens")
    axes[0, 0].set_ylabel("pass@1, %")
    axes[1, 0].set_ylabel("pass@8, %")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Train, collect finished runs, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "collect", "status", "report"))
    parser.add_argument("tasks", nargs="*", help="tasks of pretrained.yaml (default: all)")
    parser.add_argument("--stages", nargs="+", help="only these stages (default: all, one after the other)")
    parser.add_argument("--arms", nargs="+", help="only these arms, which every named stage must have")
    parser.add_argument("--processes", type=int, help="worker processes (default: none, one run at a time)")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command continues")
    parser.add_argument("--output_dir", type=Path, default=Path("out/pretrained"), help="checkpoints")
    args = parser.parse_intermixed_args()
    known = read_tasks()
    try:
        for name in args.tasks:
            if name not in known:
                raise UsageError(unknown_name("task", name, known))
        tasks = [known[name] for name in args.tasks or known]
        for stage in args.stages or ():
            if stage not in tasks[0].stages:
                raise UsageError(unknown_name("stage", stage, tasks[0].stages))
        run(tasks, args)
    except UsageError as error:
        parser.error(str(error))


def run(tasks: Sequence[Task], args: argparse.Namespace) -> None:
    """Run the command for these tasks."""
    if args.command == "status":
        print(status(tasks))
        return
    if args.command == "report":
        if args.tasks:
            raise UsageError("report: leave out the names of tasks; it always has all tasks with results")
        if not RESULTS.is_dir():
            print("no results yet: train a task first")
            return
        text = report(tasks)
        (RESULTS / "results.md").write_text(text, encoding="utf-8")
        draw(tasks, PICTURE)
        print(text)
        return
    if args.command == "train" and args.minutes:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup ... &` ignores the signal
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
    for task in tasks:
        for name in args.stages or task.stages:
            stage = task.stage(name, read_results(task.path), args.output_dir / task.name, args.arms)
            if args.command == "train":
                stage.train(processes=args.processes)
            else:
                stage.collect()


if __name__ == "__main__":
    main()

"""Does exploration help a pretrained model? SmolLM2-135M on five tasks, from the learning rate to the tables.

    python examples/benchmarks/pretrained.py train countdown --processes 2 --minutes 120
    python examples/benchmarks/pretrained.py status             # the missing runs, and how long they will take
    python examples/benchmarks/pretrained.py report             # tables and pictures of the results

`pretrained.yaml` has the tasks and the arms. Each task has these stages:

- *rates*: GRPO at three learning rates, on one development seed. All arms of the task get the best rate. Before this
  stage is finished, they get the rate `first_rate`.
- *fields*: each rival and each method with two values of its main field, on the development seed.
- *verdict*: all arms with the best values, on fresh seeds. `auto` has its defaults, and also runs with the better one
  of two advantages. Before *fields* is finished, only the arms without a choice are known.
- *shuffled*: GRPO with rewards that are shuffled within the batch. It must not learn.

`--stages` names the stages to train, and `--arms` the arms. Finished runs are in `pretrained_results/<task>.csv`, and
their steps in `<task>_steps.csv`. They are not trained again, also on another machine. All runs of a seed should come
from one machine, because another one teaches the model slightly differently. The report names the seeds whose models
differed before training.
"""

import argparse
import csv
import signal
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from regimes_results import Row, read_results, to_runs
from stages import collect, folder_of_stage, runs_of_stage, train_missing, with_arms

from trl_explore.compare.costs import interval, mean_along, mean_curve, other_starts, value_at
from trl_explore.compare.folder import RESULT
from trl_explore.compare.run import Run
from trl_explore.compare.settings import arm_folder

HERE = Path(__file__).resolve().parent
SETTINGS, RESULTS = HERE / "pretrained.yaml", HERE / "pretrained_results"
BASE = "GRPO"
SHUFFLED = "examples.benchmarks.pretrained:shuffled_rewards"
SHORT_RUN, OVERHEAD = 600.0, 1.4  # seconds of a run if none is finished; loading and evaluation next to training
COSTS = {"tokens": "generated tokens", "cpu_seconds": "CPU seconds"}
STEP_METRICS = ("step", "tokens", "reward", "entropy", "frac_reward_zero_std", "completions/mean_length")
Arm = dict[str, Any]


def shuffled_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """Advantages of GRPO from rewards that are shuffled within the batch, `(P, G)`. They contain no information."""
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
            Arms with the advantages of which `auto` gets the better one.
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

    def missing(self, stage: str, rows: list[Row]) -> int:
        """Return the number of missing runs of a stage, with the arms that are known so far."""
        _, known, wanted = runs_of_stage(self.document(stage, rows), stage, rows)
        return len(wanted - known.keys())

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
        """Return the better one of the arms with an advantage, with its name and the better value of its field."""
        arms = [arm for arm in self.arms if arm["name"] in self.advantages]
        best = self.best([entry for arm in arms for entry in self.variants(arm, rows)], "fields", rows)
        name = best["name"].split(", ")[0]
        return {"name": name, "method": best["method"], "options": best["options"]}

    def best(self, entries: list[Arm], stage: str, rows: list[Row]) -> Arm:
        """Return the arm of a finished stage whose learning curves are highest: by the mean of `judged_by` along the
        curve, up to the tokens that all runs of the stage reached."""
        runs = to_runs(rows, stage)
        reading = min(run.points[-1]["tokens"] for run in runs)

        def height(entry: Arm) -> float:
            own = [run.points for run in runs if run.arm == entry["name"]]
            values = []
            for points in own:
                values += [mean_along(points, "tokens", reading, f"eval/{metric}") for metric in self.judged_by]
            return statistics.mean(values)

        return max(entries, key=height)


def read_tasks(path: Path = SETTINGS) -> dict[str, Task]:
    """Read the tasks, by name."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    tasks = {}
    for name, entry in document["tasks"].items():
        tasks[name] = Task(
            name=name,
            comparison={**document["comparison"], **entry["comparison"]},
            stages=document["stages"],
            arms=[*document["arms"], *entry["arms"]],
            learning_rates=document["learning_rates"],
            first_rate=document["first_rate"],
            judged_by=document["judged_by"],
            advantages=document["advantages"],
        )
    return tasks


# ----------------------------------------------------------------------------------------------------------- training


def train(task: Task, args: argparse.Namespace) -> None:
    """Train the missing runs of a task, stage by stage."""
    folder = args.output_dir / task.name
    for stage in args.stages or task.stages:
        document = task.document(stage, read_results(task.path))
        try:
            train_missing(task.path, document, stage, folder, arms=args.arms, processes=args.processes)
        finally:
            add_steps(task, document, stage, folder, args.arms)


def add_steps(
    task: Task, document: dict[str, Any], stage: str, folder: Path, arms: Sequence[str] | None = None
) -> None:
    """Add the logs of finished runs to the file with the steps of a task, one row per training step."""
    rows = read_steps(task)
    known = {(row["stage"], row["arm"], int(row["seed"])) for row in rows}
    trained = with_arms(document, arms)
    place = folder_of_stage(trained, stage, folder)
    for arm in trained["arms"]:
        for seed in trained["seeds"]:
            path = place / f"{arm_folder(arm['name'])}-seed{seed}" / RESULT
            if (stage, arm["name"], seed) in known or not path.is_file():
                continue
            for logs in Run.load(path).steps:
                row = {"stage": stage, "arm": arm["name"], "seed": seed}
                row |= {name: f"{value:.6g}" for name, value in logs.items() if is_kept(name)}
                rows.append(row)
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with open(task.path.with_name(f"{task.name}_steps.csv"), "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def is_kept(name: str) -> bool:
    """Return whether the file with the steps has this metric."""
    return name in STEP_METRICS or name.startswith("explore/share/")


def read_steps(task: Task) -> list[dict[str, str]]:
    """Return the rows of the file with the steps of a task. Empty if there is no file."""
    path = task.path.with_name(f"{task.name}_steps.csv")
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def status(tasks: Sequence[Task]) -> str:
    """Return the missing runs of each task, and the time that they take."""
    lines = []
    for task in tasks:
        rows, counts = read_results(task.path), {}
        for stage in task.stages:
            counts[stage] = task.missing(stage, rows)
            if stage == "verdict" and counts["fields"]:  # the other arms are known when their fields are chosen
                counts[stage] += expected(task, stage) - len(task.document(stage, rows)["arms"]) * num_seeds(task)
        seconds = []
        for stage in task.stages:
            seconds += [run.points[-1]["cpu_seconds"] for run in to_runs(rows, stage)]
        each = OVERHEAD * statistics.mean(seconds) if seconds else SHORT_RUN
        missing = ", ".join(f"{stage} {count}" for stage, count in counts.items() if count)
        hours = each * sum(counts.values()) / 3600
        lines.append(f"{task.name}: {f'missing: {missing}; about {hours:.1f} core hours' if missing else 'complete'}")
    return "\n".join(lines)


def num_seeds(task: Task) -> int:
    """Return the number of seeds of the verdict."""
    return len(task.stages["verdict"]["seeds"])


def expected(task: Task, stage: str) -> int:
    """Return the number of runs of a stage whose arms are not known yet."""
    num_arms = len(task.arms) + 1  # `auto` has one arm more
    if stage == "fields":
        num_arms = sum(len(values) for arm in task.arms for values in arm.get("choice", {}).values())
    return (1 if stage == "shuffled" else num_arms) * len(task.stages[stage]["seeds"])


# ------------------------------------------------------------------------------------------------------------- report


def report(tasks: Sequence[Task]) -> str:
    """Return the tables of all tasks with results."""
    blocks = []
    for task in tasks:
        rows = read_results(task.path)
        if rows:
            blocks += [f"**{task.name}**", "", *stage_table(task, rows), "", *verdict_tables(task, rows)]
    return "\n".join(blocks).rstrip() + "\n"


def stage_table(task: Task, rows: list[Row]) -> list[str]:
    """Return the table of the development runs: the metrics at the end of each run, in percent."""
    metrics = task.comparison["metrics"]
    lines = ["| development | tokens | " + " | ".join(metrics) + " | entropy | groups without contrast |"]
    lines.append("| --- |" + " ---: |" * (len(metrics) + 3))
    for stage in ("rates", "fields", "shuffled"):
        for run in to_runs(rows, stage):
            last = run.points[-1]
            cells = [run.arm, f"{last['tokens']:,.0f}", *(f"{100 * last[f'eval/{metric}']:.1f}" for metric in metrics)]
            cells += [f"{last['train/entropy']:.2f}", f"{last['train/frac_reward_zero_std']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdict_tables(task: Task, rows: list[Row]) -> list[str]:
    """Return the tables of the verdict: by arm, each metric at the end, and the difference to GRPO along the curve."""
    runs = to_runs(rows, "verdict")
    by_arm: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, {})[run.seed] = run
    if BASE not in by_arm:
        return []
    metrics = task.comparison["metrics"]
    lines = []
    for cost, label in COSTS.items():
        reading = min(run.points[-1][cost] for run in runs)
        header = [f"equal {label} ({reading:,.0f})", "seeds"]
        for metric in metrics:
            header += [f"{metric}, start", "end", "along the curve"]
        lines += ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
        for arm, of_seeds in by_arm.items():
            cells = [arm, str(len(of_seeds))]
            for metric in metrics:
                name = f"eval/{metric}"
                cells.append(percent(run.points[0][name] for run in of_seeds.values()))
                ends = [value_at(run.points, cost, reading, name) for run in of_seeds.values()]
                cells.append(percent(end for end in ends if end is not None))
                cells.append("" if arm == BASE else difference(of_seeds, by_arm[BASE], cost, reading, name))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    starts = other_starts(
        [{"arm": run.arm, "seed": run.seed, "points": run.points} for run in runs],
        BASE,
        [f"eval/{metric}" for metric in metrics],
    )
    if starts:
        names = "; ".join(f"{arm}: {', '.join(map(str, seeds))}" for arm, seeds in starts.items())
        lines += [f"Seeds whose model before training was not GRPO's: {names}.", ""]
    return lines


def percent(values: Any) -> str:
    """Return the mean of shares, in percent."""
    return f"{100 * statistics.mean(values):.1f}"


def difference(runs: dict[int, Run], base: dict[int, Run], cost: str, reading: float, metric: str) -> str:
    """Return the difference to another arm along the curve, in percentage points, paired by seed, with an interval."""
    found = []
    for seed, run in runs.items():
        if seed in base:
            own = mean_along(run.points, cost, reading, metric)
            found.append(100 * (own - mean_along(base[seed].points, cost, reading, metric)))
    if not found:
        return ""
    mean, half = interval(found)
    return f"{mean:+.1f}" if half is None else f"{mean:+.1f} ± {half:.1f}"


def draw(tasks: Sequence[Task], path: Path) -> None:
    """Draw pass@1 and pass@8 of GRPO and `auto` over generated tokens. Thin lines are seeds, thick lines are means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {task.name: to_runs(read_results(task.path), "verdict") for task in tasks}
    shown = {name: runs for name, runs in shown.items() if runs}
    if not shown:
        return
    figure, axes = plt.subplots(2, len(shown), figsize=(1 + 3.2 * len(shown), 5), squeeze=False, sharex="col")
    for column, (name, runs) in enumerate(shown.items()):
        for axis, metric in zip(axes[:, column], ("pass_at_1", "pass_at_8"), strict=True):
            for arm, color in ((BASE, "0.45"), ("auto", "C0")):
                curves = [run.points for run in runs if run.arm == arm]
                if not curves:
                    continue
                for points in curves:
                    x = [point["tokens"] / 1000 for point in points]
                    y = [100 * point[f"eval/{metric}"] for point in points]
                    axis.plot(x, y, color=color, linewidth=0.7, alpha=0.5)
                mean = mean_curve(curves, "tokens", f"eval/{metric}")
                x, y = [point[0] / 1000 for point in mean], [100 * point[1] for point in mean]
                axis.plot(x, y, color=color, linewidth=2.5, label=arm)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(name.replace("_", " "))
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
    parser.add_argument("--stages", nargs="+", help="only these stages")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--processes", type=int, help="runs at a time, each with one thread (default: 1)")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command continues")
    parser.add_argument("--output_dir", type=Path, default=Path("out/pretrained"), help="checkpoints")
    args = parser.parse_intermixed_args()
    known = read_tasks()
    for name in args.tasks:
        if name not in known:
            parser.error(f"{name!r} is no task: choose from {', '.join(known)}")
    tasks = [known[name] for name in args.tasks or known]
    stages = tasks[0].stages
    for stage in args.stages or ():
        if stage not in stages:
            parser.error(f"--stages {stage}: choose from {', '.join(stages)}")
    if args.command == "status":
        print(status(tasks))
    elif args.command == "report":
        text = report(tasks)
        (RESULTS / "results.md").write_text(text, encoding="utf-8")
        draw(tasks, RESULTS / "curves.png")
        print(text)
    elif args.command == "collect":
        for task in tasks:
            for stage in args.stages or stages:
                document = task.document(stage, read_results(task.path))
                count = collect(task.path, document, stage, args.output_dir / task.name, arms=args.arms)
                add_steps(task, document, stage, args.output_dir / task.name, args.arms)
                print(f"{task.name}, {stage}: {count} runs missing")
    else:
        if args.minutes:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup ... &` ignores the signal
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, 60 * args.minutes)
        for task in tasks:
            train(task, args)


if __name__ == "__main__":
    main()

"""Learning curves of a pretrained model from a quarter of an hour on one GPU.

    python examples/real/gpu_quarter_hour.py                                   # a CUDA device
    python examples/real/gpu_quarter_hour.py --device cpu --steps 2 --processes 2   # a check that everything runs
    python examples/real/gpu_quarter_hour.py --report --output_dir out/gpu     # table and picture of an earlier call

A model of 135 million parameters does not fill a GPU: most of a step, the GPU waits for the next kernel. So many runs
share the GPU, each in a process of its own. The YAML file lists waves of runs. Up to `--processes` runs of a wave
train side by side. They stop `--seconds` after the beginning of the wave, and then evaluate their models. They do not
end at the same step, so the table compares them at equal tokens and at equal seconds.

The script first converts the model and teaches it each task. During training, every run writes its evaluations and
steps to a file of its own. At the end they are joined in `points.csv` and `steps.csv` of the output folder. With
`--costs`, the script then measures what a token costs with each method at 128 rows, and a step of BranPO next to GRPO
with the same tool. With `--tests`, it also runs the tests that need a GPU.
"""

import argparse
import copy
import csv
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
Points = list[dict[str, float]]  # evaluations of a run
Arms = dict[str, dict[int, Points]]  # runs of a comparison, by arm and seed

RUN = ("comparison", "arm", "seed")
COSTS = ("step", "tokens", "trained_tokens", "seconds")
STEP_METRICS = ("reward", "entropy", "frac_reward_zero_std", "completions/mean_length")
GRACE_SECONDS = 60  # after training a run may take this long to evaluate its model
GPU_TESTS = ("tests/test_gpu.py",)


# ---------------------------------------------------------------------------------------------------------- one run


def run_job(
    comparison: Any,
    arm: Any,
    seed: int,
    *,
    name: str,
    tokens_between: float,
    start: str,
    stop_at: float | None,
    first: bool,
    path: Path,
) -> None:
    """
    Train one run until a time, and write its evaluations and steps as lines of JSON.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        arm ([`~trl_explore.compare.settings.Arm`]):
            The arm.
        seed (`int`):
            Seed of the run.
        name (`str`):
            Name of the comparison.
        tokens_between (`float`):
            Generated tokens between two evaluations.
        start (`str`):
            Folder of the taught model.
        stop_at (`float`, *optional*):
            Time at which training stops, as `time.time()` returns it. None if only the budget limits the run.
        first (`bool`):
            Whether the run evaluates the model before training. All runs of a comparison start from the same model.
        path (`Path`):
            File to write.
    """
    import torch
    from transformers import PrinterCallback, TrainerCallback

    from trl_explore.compare.run import CostCallback, build_run, of_step
    from trl_explore.runs.quiet import quiet

    quiet()
    torch.set_num_threads(1)
    run = {"comparison": name, "arm": arm.name, "seed": seed}
    with tempfile.TemporaryDirectory() as folder, open(path, "w", encoding="utf-8") as lines:
        trainer, evaluate = build_run(comparison, arm, seed=seed, folder=Path(folder), start=start)
        costs = CostCallback(comparison.budget)
        costs.count_sampled(trainer)
        costs.count_trained(trainer)

        def write(kind: str, values: dict[str, Any]) -> None:
            spent = {name: getattr(costs.cost, name) for name in COSTS}
            lines.write(json.dumps({"kind": kind, **run, **spent, **values}) + "\n")
            lines.flush()

        class Recorder(TrainerCallback):
            def __init__(self) -> None:
                self.evaluated_at = 0.0  # generated tokens at the newest evaluation

            def evaluate(self) -> None:
                found = evaluate("middle")
                names = [f"eval/{metric}" for metric in comparison.metrics]
                write("point", {name: found[name] for name in names})
                self.evaluated_at = costs.cost.tokens

            def on_train_begin(self, args, state, control, **kwargs):
                if first:
                    self.evaluate()

            def on_log(self, args, state, control, logs=None, **kwargs):
                if not of_step(logs):
                    return
                write("step", {name: logs.get(name) for name in STEP_METRICS})
                if stop_at is not None and time.time() >= stop_at:
                    control.should_training_stop = True
                elif costs.cost.tokens - self.evaluated_at >= tokens_between:
                    self.evaluate()

        recorder = Recorder()
        trainer.add_callback(costs)
        trainer.add_callback(recorder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if recorder.evaluated_at < costs.cost.tokens:
            recorder.evaluate()


# ------------------------------------------------------------------------------------------------------------ waves


def comparisons_of(settings: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """
    Check the settings, and return the comparisons of each wave by name.

    Raises:
        UsageError: If a field is wrong. The message names it.
    """
    from trl_explore.compare.settings import read_comparison
    from trl_explore.errors import UsageError

    waves = []
    for number, wave in enumerate(settings["waves"]):
        comparisons: dict[str, Any] = {}
        for entry in wave:
            document = {**settings["shared"], **entry}
            if "name" not in document or "/" in str(document["name"]):
                raise UsageError(f"waves[{number}]: give each comparison a name without '/'")
            name = str(document.pop("name"))
            document["common"] = {**document.get("common", {}), "use_cpu": args.device == "cpu"}
            document["evaluations"] = 1
            document["budget"] = {"steps": args.steps} if args.steps else {"tokens": 1e9}
            if args.device == "cpu":
                shrink(document)
            try:
                comparisons[name] = read_comparison(document)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from error
        num_runs = sum(len(comparison.arms) * len(comparison.seeds) for comparison in comparisons.values())
        if num_runs > args.processes and not args.steps:
            raise UsageError(
                f"waves[{number}] has {num_runs} runs, but --processes is {args.processes}. The waiting runs would "
                "begin when the wave ends: raise --processes, or move comparisons to another wave"
            )
        waves.append(comparisons)
    return waves


def shrink(document: dict[str, Any]) -> None:
    """Make a comparison small enough for a check on a CPU."""
    document.update(num_eval=8, warm_start_steps=2)
    document["common"].update(per_device_train_batch_size=16, gradient_accumulation_steps=1)
    arms = copy.deepcopy(document["arms"])  # the settings keep theirs
    for arm in arms:
        if "per_device_train_batch_size" in arm.get("options", {}):
            arm["options"]["per_device_train_batch_size"] = arm["options"]["num_generations"]
    document["arms"] = arms


def convert_job() -> None:
    """Convert the packaged model once, before several processes want it."""
    from trl_explore.pretrained.smollm2 import find_pretrained

    find_pretrained("smollm2")


def teach_job(comparison: Any) -> str:
    """Teach a comparison's task to the model, or find the taught model in the cache. Return its folder."""
    from trl_explore.compare.folder import teach
    from trl_explore.runs.quiet import quiet

    quiet()
    return teach(comparison, comparison.seeds[0], progress=False)


def teach_all(context: Any, waves: list[dict[str, Any]], *, processes: int) -> dict[str, str]:
    """Convert the packaged model, and teach it all tasks side by side. Return the folders of the taught models by
    comparison. Comparisons with the same model, task and number of warm start steps share a taught model."""
    with ProcessPoolExecutor(min(processes, 4), mp_context=context) as pool:
        if any(c.subject["model_name_or_path"] == "smollm2" for wave in waves for c in wave.values()):
            pool.submit(convert_job).result()
        jobs: dict[str, Any] = {}
        job_of = {}
        for comparisons in waves:
            for name, comparison in comparisons.items():
                key = json.dumps([comparison.subject, comparison.warm_start_steps], sort_keys=True, default=str)
                if key not in jobs:
                    jobs[key] = pool.submit(teach_job, comparison)
                job_of[name] = jobs[key]
        return {name: job.result() for name, job in job_of.items()}


def train_wave(
    context: Any, comparisons: dict[str, Any], starts: dict[str, str], args: argparse.Namespace, tokens_between: float
) -> int:
    """
    Train all runs of a wave side by side. A run that does not end in time is killed, and keeps what it wrote.

    Returns:
        `int`: Number of runs that failed or were killed.
    """
    from trl_explore.compare.settings import arm_folder

    stop_at = None if args.steps else time.time() + args.seconds
    waiting = []
    for name, comparison in comparisons.items():
        folder = args.output_dir / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        for arm in comparison.arms:
            for seed in comparison.seeds:
                first = arm is comparison.arms[0] and seed == comparison.seeds[0]
                path = folder / f"{len(waiting):02d}-{arm_folder(arm.name)}-{seed}.jsonl"
                given = dict(name=name, tokens_between=tokens_between, start=starts[name], stop_at=stop_at)
                given |= dict(first=first, path=path)
                process = context.Process(target=run_job, args=(comparison, arm, seed), kwargs=given)
                waiting.append((f"{name}, {arm.name}, seed {seed}", process))
    running: list[tuple[str, Any]] = []
    num_failed = 0
    while waiting or running:
        while waiting and len(running) < args.processes:
            what, process = waiting.pop(0)
            process.start()
            running.append((what, process))
        time.sleep(0.2)
        for what, process in list(running):
            is_late = stop_at is not None and time.time() > stop_at + GRACE_SECONDS
            if is_late and process.is_alive():
                process.kill()
                process.join()
            if not process.is_alive():
                running.remove((what, process))
                num_failed += process.exitcode != 0
                print(f"{time.strftime('%X')} {what}: exit code {process.exitcode}", flush=True)
    return num_failed


def gather(output_dir: Path) -> None:
    """Join the files of all runs in `points.csv` and `steps.csv`, in the order in which the runs began. So the first
    arm of the YAML file comes first, to which the table has differences."""
    rows: dict[str, list[dict[str, Any]]] = {"point": [], "step": []}
    for path in sorted(output_dir.glob("runs/*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.endswith("}"):
                continue  # the run was killed while it wrote this line
            row = json.loads(line)
            rows[row.pop("kind")].append(row)
    for kind, of_kind in rows.items():
        columns: list[str] = []
        for row in of_kind:
            columns += [name for name in row if name not in columns]
        with open(output_dir / f"{kind}s.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(of_kind)


def run_command(name: str, command: list[str], output_dir: Path, *, seconds: float) -> None:
    """Run a Python command in the root of the checkout, and write what it prints to a file."""
    started = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with open(output_dir / f"{name}.txt", "w", encoding="utf-8") as file:
        try:
            code: Any = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} seconds"
    print(f"{name}: {code}, {time.perf_counter() - started:.0f} seconds", flush=True)


def measure_costs(args: argparse.Namespace) -> None:
    """Measure what a token costs with each method, and a step of BranPO next to GRPO with the same tool."""
    on_cpu = args.device == "cpu"
    command = ["examples/benchmarks/step_breakdown.py", "--model", "smollm2", "--prompt_tokens", "30", "--rounds", "1"]
    command += ["--rows", "8", "--steps", "2"] if on_cpu else ["--rows", "128", "--steps", "3"]
    run_command("costs", command, args.output_dir, seconds=300)
    for name in ("grpo_agent", "branpo"):
        command = ["examples/benchmarks/gpu_check.py", "--device", args.device, "--only", name, "--steps", "4"]
        command += ["--output", str(args.output_dir.resolve() / "check")]
        if on_cpu:
            command.append("--tiny")
        run_command(name, command, args.output_dir, seconds=120)


# ----------------------------------------------------------------------------------------------------------- report


def read_points(path: Path) -> dict[str, Arms]:
    """Return the evaluations by comparison, arm and seed. Each run begins with the model before training, which one
    run of the comparison has evaluated for all."""
    found: dict[str, Arms] = {}
    starts: dict[str, dict[str, float]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            comparison, arm, seed = (row.pop(name) for name in RUN)
            point = {name: float(value) for name, value in row.items() if value}
            if point["step"] == 0:
                starts[comparison] = point
            else:
                found.setdefault(comparison, {}).setdefault(arm, {}).setdefault(int(seed), []).append(point)
    for comparison, arms in found.items():
        for seeds in arms.values():
            for points in seeds.values():
                if comparison in starts:  # missing if the run that evaluates it has failed
                    points.insert(0, starts[comparison])
    return found


def values_at(seeds: dict[int, Points], cost: str, reading: float, metric: str) -> dict[int, float]:
    """Return the value of each seed's curve at a cost. A seed whose curve does not reach from before to after the cost
    is left out."""
    from trl_explore.compare.costs import value_at

    values = {seed: value_at(points, cost, reading, metric) for seed, points in seeds.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def mean_of(values: dict[int, float], *, scale: float, digits: int) -> str:
    """Return the mean as text, or a dash if there is no value."""
    return f"{scale * statistics.mean(values.values()):.{digits}f}" if values else "-"


def table_of(arms: Arms) -> list[str]:
    """Return the table of a comparison: each metric before training and at the largest number of tokens, and of
    seconds, that all runs reached. Differences are to the first arm, paired by seed."""
    from trl_explore.compare.costs import mean_with_interval

    runs = [points for seeds in arms.values() for points in seeds.values()]
    metrics = [name for name in runs[0][0] if name.startswith("eval/")]
    base = next(iter(arms))
    header = ["arm", "at", "steps"]
    for metric in metrics:
        header += [metric.removeprefix("eval/"), "difference"]
    lines = ["| " + " | ".join(header) + " |", "| --- | --- |" + " ---: |" * (len(header) - 2)]
    if runs[0][0]["step"] == 0:
        before = ["before training", "", "0"]
        for metric in metrics:
            before += [f"{100 * runs[0][0][metric]:.1f}", ""]
        lines.append("| " + " | ".join(before) + " |")
    for cost in ("tokens", "seconds"):
        reading = min(points[-1][cost] for points in runs)
        for arm, seeds in arms.items():
            cells = [
                arm,
                f"{reading:,.0f} {cost}",
                mean_of(values_at(seeds, cost, reading, "step"), scale=1, digits=0),
            ]
            for metric in metrics:
                values = values_at(seeds, cost, reading, metric)
                others = values_at(arms[base], cost, reading, metric)
                differences = [value - others[seed] for seed, value in values.items() if seed in others]
                text = "" if arm == base or not differences else mean_with_interval(differences)
                cells += [mean_of(values, scale=100, digits=1), " ".join(text.split())]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(folder: Path) -> str:
    """Return the tables of all comparisons. Also write them to `results.md`, and draw the curves to `curves.png`."""
    found = read_points(folder / "points.csv")
    if not found:
        return "No run has an evaluation after its start, so there is no table.\n"
    text = ""
    for comparison, arms in found.items():
        text += f"**{comparison}**\n\n" + "\n".join(table_of(arms)) + "\n\n"
    draw(found, folder / "curves.png")
    text = text.rstrip() + "\n"
    (folder / "results.md").write_text(text, encoding="utf-8")
    return text


def draw(found: dict[str, Arms], path: Path) -> None:
    """Draw the first two metrics over generated tokens. Thin lines are seeds, thick lines their means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trl_explore.compare.costs import mean_curve

    figure, axes = plt.subplots(len(found), 2, figsize=(9, 3 * len(found)), squeeze=False)
    for (comparison, arms), row in zip(found.items(), axes, strict=True):
        first_run = next(iter(next(iter(arms.values())).values()))
        metrics = [name for name in first_run[0] if name.startswith("eval/")][:2]
        for metric, axis in zip(metrics, row, strict=False):
            for number, (arm, seeds) in enumerate(arms.items()):
                color = f"C{number}"
                for points in seeds.values():
                    x = [point["tokens"] / 1000 for point in points]
                    axis.plot(x, [100 * point[metric] for point in points], color=color, linewidth=0.6, alpha=0.5)
                mean = mean_curve(list(seeds.values()), "tokens", metric)
                axis.plot([p[0] / 1000 for p in mean], [100 * p[1] for p in mean], color=color, linewidth=2, label=arm)
            axis.set_title(f"{comparison}: {metric.removeprefix('eval/').replace('_at_', '@')}, %")
            axis.set_xlabel("thousand generated tokens")
        row[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Teach, train wave after wave, measure costs, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=210, help="of training per wave (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="optimizer steps at most, for a check")
    parser.add_argument("--processes", type=int, default=16, help="runs at a time (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/gpu"))
    parser.add_argument("--costs", action="store_true", help="also measure what a token costs with each method")
    parser.add_argument("--tests", action="store_true", help="also run the tests that need a GPU")
    parser.add_argument(
        "--report", action="store_true", help="only rebuild table and picture from the files of the output folder"
    )
    args = parser.parse_args()
    if args.report:
        if not (args.output_dir / "points.csv").is_file():
            parser.error(f"--report: {args.output_dir} has no points.csv; train first, or name another --output_dir")
        print(report(args.output_dir))
        return

    import torch
    import yaml

    from trl_explore.errors import UsageError

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu --steps 2 --processes 2 runs the same code")
    if (args.output_dir / "runs").exists():
        parser.error(f"{args.output_dir} has the runs of an earlier call: remove it, or name another --output_dir")
    settings = yaml.safe_load(args.config.read_text())
    tokens_between = settings["shared"].pop("tokens_between", None)
    if not isinstance(tokens_between, int | float) or tokens_between <= 0:
        parser.error(f"shared.tokens_between={tokens_between}: give the generated tokens between two evaluations")
    try:
        waves = comparisons_of(settings, args)
    except UsageError as error:
        parser.error(f"{args.config}: {error}")
    began = time.perf_counter()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # The libraries are imported once, and all runs are forked from that process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl_explore.compare.run", "trl_explore.methods", "trl"])
    starts = teach_all(context, waves, processes=args.processes)
    print(f"taught after {time.perf_counter() - began:.0f} seconds", flush=True)
    num_failed = 0
    for comparisons in waves:
        num_failed += train_wave(context, comparisons, starts, args, tokens_between)
        gather(args.output_dir)
        print(f"wave done after {time.perf_counter() - began:.0f} seconds", flush=True)
    if args.costs:
        measure_costs(args)
    if args.tests:
        tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *GPU_TESTS]
        run_command("tests", tests, args.output_dir, seconds=180)
    print(report(args.output_dir))
    print(f"all in {time.perf_counter() - began:.0f} seconds")
    if num_failed:
        sys.exit(f"{num_failed} runs failed or were killed: see the exit codes above")


if __name__ == "__main__":
    main()

"""Show what SmolLM2 writes before and after training: greedy completions of held-out problems, with their rewards.

    python examples/benchmarks/pretrained_samples.py countdown

The script needs the checkpoints of `pretrained.py`, which are not in the repository. It takes those of the first seed
of the stage `verdict`. It writes a table to `pretrained_results/<task>_samples.md`. The rewards come from the task's
own verifier.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pretrained
from regimes_results import read_results
from stages import Stage

from trl_explore.compare.folder import teach
from trl_explore.errors import UsageError
from trl_explore.evaluation.completions import read_completions
from trl_explore.evaluation.evaluate import SCORES, evaluate
from trl_explore.evaluation.samplers import Sampling
from trl_explore.names import unknown_name
from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.saving.records import read_records

if TYPE_CHECKING:
    from datasets import Dataset

    from trl_explore.runs.tasks import RunTask

ARMS = ("GRPO", "auto")
START = "before training"


def models_of(stage: Stage) -> dict[str, str]:
    """
    Return the folders of the warm start and of the trained models, for the first seed.

    Raises:
        UsageError: If an arm has no checkpoint.
    """
    folder = stage.runs_folder
    comparison = folder.comparison
    seed = comparison.seeds[0]
    warm_start_seed = comparison.warm_start_seed(seed)
    assert warm_start_seed is not None
    models = {START: teach(comparison, warm_start_seed)}
    for arm in comparison.arms:
        path = folder.of_run(arm, seed)
        checkpoint, _ = last_complete_checkpoint(path)
        if checkpoint is None:
            raise UsageError(f"{arm.name}: no checkpoint in {path}; train the stage on this machine")
        models[arm.name] = checkpoint
    return models


def completions_of(model_folder: str, task: "RunTask", rows: "Dataset") -> list[tuple[str, float | None]]:
    """Return a greedy completion of each problem, and its reward."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sampling = Sampling(temperature=0.0, max_new_tokens=task.options["max_completion_length"])
    with tempfile.TemporaryDirectory() as output_dir:
        evaluate(
            AutoModelForCausalLM.from_pretrained(model_folder),
            rows,
            processing_class=AutoTokenizer.from_pretrained(model_folder),
            reward_funcs=task.reward_funcs,
            sampling=sampling,
            output_dir=output_dir,
        )
        _, records = read_completions(Path(output_dir, "completions.jsonl"))
        _, scores = read_records(Path(output_dir, "scores.jsonl"), SCORES, is_valid=lambda record: True)
    found = []
    for index, score in enumerate(scores):
        found.append((records[index]["completions"][0], score["rewards"][0]))
    return found


def table(problems: Sequence[str], completions: dict[str, list[tuple[str, float | None]]]) -> str:
    """Return a table with a row per problem, and a column per model."""
    lines = ["| problem | " + " | ".join(completions) + " |", "| --- |" + " --- |" * len(completions)]
    for number, problem in enumerate(problems):
        cells = [in_cell(problem)]
        for of_model in completions.values():
            text, reward = of_model[number]
            shown = "no reward" if reward is None else f"reward {reward:g}"
            cells.append(f"{in_cell(text)}<br>*{shown}*")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def in_cell(text: str) -> str:
    """Return a text as the content of a table's cell."""
    lines = [line.replace("|", r"\|") for line in text.strip().splitlines()]
    return "<br>".join(lines)


def last_message(prompt: str | list[dict[str, str]]) -> str:
    """Return the text of a prompt, or of the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def main() -> None:
    """Write the table of a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="a task of pretrained.yaml")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="the `--arms` of the training")
    parser.add_argument("--problems", type=int, default=6, help="number of problems (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/pretrained"), help="checkpoints")
    args = parser.parse_args()
    tasks = pretrained.read_tasks()
    try:
        if args.task not in tasks:
            raise UsageError(unknown_name("task", args.task, tasks))
        task = tasks[args.task]
        stage = task.stage("verdict", read_results(task.path), args.output_dir / task.name, args.arms)
        models = models_of(stage)
    except UsageError as error:
        parser.error(str(error))
    run_task = stage.runs_folder.comparison.task
    assert run_task is not None
    rows = run_task.held_out_rows(args.problems)
    completions = {name: completions_of(folder, run_task, rows) for name, folder in models.items()}
    text = table([last_message(prompt) for prompt in rows["prompt"]], completions)
    path = task.path.with_name(f"{task.name}_samples.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""The folder of a comparison: what it holds is not trained again, and what does not belong there is refused."""

import gc
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from trl_explore.compare.run import Run, build_run, train_run
from trl_explore.compare.settings import Arm, Comparison, arm_folder
from trl_explore.errors import UsageError
from trl_explore.machine.threads import limit_threads
from trl_explore.runs.inputs import check_output_dir
from trl_explore.saving.whole_files import whole_file
from trl_explore.tasks.tiny_model import build_model

SETTINGS, RESULT = "comparison.yaml", "run.json"


def free_memory() -> None:
    """Gives a finished trainer's memory back: callbacks refer to it in circles."""
    gc.collect()
    torch.cuda.empty_cache()


def teach(comparison: Comparison, seed: int, *, progress: bool = True) -> str:
    """Teaches a comparison's task to its model, or finds that it has been taught; the model's folder."""
    assert comparison.task is not None
    return comparison.task.teach(
        comparison.subject.get("model_name_or_path"),
        steps=comparison.warm_start_steps,
        seed=seed,
        use_cpu=bool(comparison.common.get("use_cpu")),
        progress=progress,
        **comparison.model_size,
    )


class ComparisonFolder:
    """A comparison's folder: settings, and a folder per arm and seed. UsageError if another comparison made it."""

    def __init__(self, comparison: Comparison, path: str | Path) -> None:
        self.comparison, self.path = comparison, check_output_dir(path)
        settings = self.path / SETTINGS
        if settings.is_file():
            found = differences(yaml.safe_load(settings.read_text()), comparison.document())
            if found:
                more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
                raise UsageError(
                    f"output_dir={str(path)!r} holds another comparison: {'; '.join(found[:3])}{more}. Only arms and "
                    "seeds can be added; name another folder with --output_dir"
                )

    def write_settings(self) -> None:
        """Writes the settings; their file can be given to `trl-explore compare --config` again."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.comparison.document(), sort_keys=False, allow_unicode=True)
        with whole_file(self.path / SETTINGS) as part:
            part.write_text(text)

    def of_run(self, arm: Arm, seed: int) -> Path:
        """Folder of one arm on one seed."""
        return self.path / f"{arm_folder(arm.name)}-seed{seed}"

    @property
    def num_runs(self) -> int:
        """Runs in all."""
        return len(self.comparison.arms) * len(self.comparison.seeds)

    def missing(self) -> list[tuple[Arm, int]]:
        """Runs that are not finished, seed by seed."""
        pairs = ((arm, seed) for seed in self.comparison.seeds for arm in self.comparison.arms)
        return [(arm, seed) for arm, seed in pairs if not (self.of_run(arm, seed) / RESULT).is_file()]

    def unfinished_seeds(self) -> list[int]:
        """Seeds on which an arm is not finished."""
        return list(dict.fromkeys(seed for _, seed in self.missing()))

    def finished(self) -> list[dict[str, Any]]:
        """The runs of all seeds on which every arm is finished."""
        unfinished = self.unfinished_seeds()
        seeds = [seed for seed in self.comparison.seeds if seed not in unfinished]
        pairs = [(arm, seed) for arm in self.comparison.arms for seed in seeds]
        return [asdict(Run.load(self.of_run(arm, seed) / RESULT)) for arm, seed in pairs]

    def check_arms(self) -> None:
        """Constructs the trainer of every arm that is to be trained, so that what one refuses, and how many threads
        suit their models, is known before the first."""
        with tempfile.TemporaryDirectory() as folder:
            start = None
            if self.comparison.builds_model:
                # In place of the warm start, which takes a while.
                build_model(seed=0, **self.comparison.model_size).save_pretrained(folder)
                start = folder
            for name, arm in {arm.name: arm for arm, _ in self.missing()}.items():
                try:
                    trainer = build_run(self.comparison, arm, seed=0, folder=Path(folder), start=start)[0]
                except (UsageError, ValueError, NotImplementedError) as error:  # what a trainer refuses, it explains
                    raise UsageError(f"arm {name}: {error}") from error
                limit_threads(trainer.model, trainer.accelerator.device)
                del trainer
                free_memory()

    def warm_starts(self) -> dict[int, str]:
        """Return the folders of the models that were taught the task, by the seed of the warm start. The mapping is
        empty if the runs begin without a warm start."""
        return {seed: teach(self.comparison, seed) for seed in self.warm_start_seeds()}

    def warm_start_seeds(self) -> list[int]:
        """Return the seeds of the warm starts that the missing runs begin with."""
        seeds = [self.comparison.warm_start_seed(seed) for seed in self.unfinished_seeds()]
        return list(dict.fromkeys(seed for seed in seeds if seed is not None))

    def start_of(self, seed: int, starts: Mapping[int, str]) -> str | None:
        """Return the folder of the model that a run begins with; `starts` are the folders that
        [`~ComparisonFolder.warm_starts`] returned."""
        warm_start = self.comparison.warm_start_seed(seed)
        return None if warm_start is None else starts[warm_start]

    def train(self, starts: Mapping[int, str], bar: Any) -> Iterator[int]:
        """Trains what is missing, one run after the other; yields a seed when all its runs are finished. `starts` are
        what [`~ComparisonFolder.warm_starts`] returned, and `bar` shows the budgets of all runs."""
        missing = self.missing()
        for number, (arm, seed) in enumerate(missing, start=self.num_runs - len(missing) + 1):
            folder = self.of_run(arm, seed)
            bar.set_description(f"{number}/{self.num_runs} {arm.name}, seed {seed}")
            start = self.start_of(seed, starts)
            run = train_run(self.comparison, arm, seed=seed, folder=folder, start=start, bar=bar)
            run.save(folder / RESULT)
            bar.update(int(number * self.comparison.amount) - bar.n)
            free_memory()
            if seed not in self.unfinished_seeds():
                yield seed


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why the runs of two comparisons cannot stand side by side, by their documents: one phrase per field. The new one
    may have more arms and more seeds."""
    missing = [f"seeds: {seed} there, not now" for seed in old["seeds"] if seed not in new["seeds"]]
    arms = {arm["name"]: arm for arm in new["arms"]}
    for arm in old["arms"]:
        here = arms.get(arm["name"])
        missing += _changed(f"arms.{arm['name']}", arm, here) if here else [f"arms: {arm['name']} there, not now"]
    rest = [{name: value for name, value in side.items() if name not in ("seeds", "arms")} for side in (old, new)]
    return _changed("", *rest) + missing


def _changed(place: str, old: Any, new: Any) -> list[str]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [f"{place}: {old} there, {new} now"]
    names = [*old, *(name for name in new if name not in old)]
    parts = [
        (f"{place}.{name}" if place else name, old.get(name, "nothing"), new.get(name, "nothing")) for name in names
    ]
    return [phrase for part in parts for phrase in _changed(*part)]

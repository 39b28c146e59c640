"""Folder of a comparison. Finished runs in it are not trained again. A folder of another comparison is refused."""

import gc
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from trl_explore.compare.run import Run
from trl_explore.compare.settings import FINGERPRINTS, Arm, Comparison, arm_folder
from trl_explore.errors import UsageError
from trl_explore.runs.inputs import check_output_dir
from trl_explore.saving.whole_files import whole_file

SETTINGS, RESULT = "comparison.yaml", "run.json"


def free_memory() -> None:
    """Free the memory of a finished trainer."""
    gc.collect()  # trainer and callbacks refer to each other, so reference counting does not free them
    torch.cuda.empty_cache()


def teach(comparison: Comparison, seed: int, *, progress: bool = True) -> str:
    """Train the warm start of a comparison's model, unless the cache holds it, and return the model's folder."""
    assert comparison.task is not None
    return comparison.task.teach(
        comparison.subject.get("model_name_or_path"),
        steps=comparison.warm_start_steps,
        seed=seed,
        use_cpu=bool(comparison.common.get("use_cpu")),
        progress=progress,
        **comparison.model_size,
    )


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a comparison. Raise a UsageError if somebody has damaged the file."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is no YAML file ({' '.join(str(error).split())}); restore it, or remove the folder"
        ) from None
    complete = isinstance(document, dict) and all(isinstance(document.get(name), list) for name in ("arms", "seeds"))
    complete = complete and isinstance(document.get(FINGERPRINTS, {}), dict)
    if not complete or not all(isinstance(arm, dict) and isinstance(arm.get("name"), str) for arm in document["arms"]):
        raise UsageError(f"{path} holds no comparison; restore it, or remove the folder")
    return document


class ComparisonFolder:
    """
    Folder of a comparison: its settings, and a subfolder per arm and seed.

    Args:
        comparison ([`~trl_explore.compare.settings.Comparison`]):
            The comparison.
        path (`str` or `Path`):
            The folder; it need not exist.

    Raises:
        UsageError: If the folder holds another comparison. Only arms and seeds may have been added.
    """

    def __init__(self, comparison: Comparison, path: str | Path) -> None:
        self.comparison, self.path = comparison, check_output_dir(path)
        self.fingerprints: dict[str, str] = {}  # of the rows and the model of the runs in the folder, if known
        settings = self.path / SETTINGS
        if settings.is_file():
            old = _read_settings(settings)
            self.fingerprints = old.pop(FINGERPRINTS, {})
            found = differences(old, comparison.document())
            if found:
                more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
                raise UsageError(
                    f"output_dir={str(path)!r} holds another comparison: {'; '.join(found[:3])}{more}. Only arms and "
                    "seeds can be added; name another folder with --output_dir"
                )

    def check_fingerprints(self, now: Mapping[str, str]) -> None:
        """
        Compare the fingerprints of a comparison's inputs with those in the folder, and add them.

        Args:
            now (`Mapping[str, str]`):
                Fingerprints of the inputs of the runs to train, by their names. Inputs whose fingerprint is not in the
                folder are accepted, because folders of earlier versions have none.

        Raises:
            UsageError: If an input has changed.
        """
        changed = [name for name, value in now.items() if self.fingerprints.get(name, value) != value]
        if changed:
            names = ", ".join(name.replace("_", " ") for name in changed)
            raise UsageError(
                f"output_dir={str(self.path)!r} holds runs of other inputs. Changed under the same name: {names}. "
                "Restore them, or name another folder with --output_dir"
            )
        self.fingerprints |= now

    def write_settings(self) -> None:
        """Write the settings and the fingerprints to a file that `trl-explore compare --config` reads."""
        self.path.mkdir(parents=True, exist_ok=True)
        document = self.comparison.document()
        if self.fingerprints:
            document[FINGERPRINTS] = self.fingerprints
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        with whole_file(self.path / SETTINGS) as part:
            part.write_text(text, encoding="utf-8")

    def of_run(self, arm: Arm, seed: int) -> Path:
        """Return the folder of one arm on one seed."""
        return self.path / f"{arm_folder(arm.name)}-seed{seed}"

    @property
    def num_runs(self) -> int:
        """Number of runs of the comparison, finished or not."""
        return len(self.comparison.arms) * len(self.comparison.seeds)

    def missing(self) -> list[tuple[Arm, int]]:
        """Return arm and seed of the runs that are not finished, ordered by seed, then by arm."""
        found = []
        for seed in self.comparison.seeds:
            for arm in self.comparison.arms:
                if not (self.of_run(arm, seed) / RESULT).is_file():
                    found.append((arm, seed))
        return found

    def unfinished_seeds(self) -> list[int]:
        """Return the seeds on which a run is missing."""
        return list(dict.fromkeys(seed for _, seed in self.missing()))

    def finished(self) -> list[dict[str, Any]]:
        """Return the runs of the seeds on which every arm is finished, ordered by arm, then by seed."""
        unfinished = self.unfinished_seeds()
        runs = []
        for arm in self.comparison.arms:
            for seed in self.comparison.seeds:
                if seed not in unfinished:
                    runs.append(asdict(Run.load(self.of_run(arm, seed) / RESULT)))
        return runs

    def warm_start_seeds(self) -> list[int]:
        """Return the seeds of the warm starts that the missing runs begin with."""
        seeds = [self.comparison.warm_start_seed(seed) for seed in self.unfinished_seeds()]
        return list(dict.fromkeys(seed for seed in seeds if seed is not None))

    def start_of(self, seed: int, starts: Mapping[int, str]) -> str | None:
        """
        Return the folder of the model that a run begins with, or None if it begins without a warm start.

        Args:
            seed (`int`):
                Seed of the run.
            starts (`Mapping[int, str]`):
                Folders of the warm starts, by their seeds.
        """
        warm_start = self.comparison.warm_start_seed(seed)
        if warm_start is None:
            return None
        return starts[warm_start]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """
    Return the reasons why a comparison cannot continue another one, one phrase per changed field.

    Args:
        old (`Mapping[str, Any]`):
            Document of the comparison that made the folder.
        new (`Mapping[str, Any]`):
            Document of the comparison that is to continue. It may have more arms and more seeds.

    Returns:
        `list[str]`: The differences. Empty if the comparison can continue.
    """
    found = _changed("", _without_runs(old), _without_runs(new))
    found += [
        f"seeds: {seed} in the folder, not in this comparison" for seed in old["seeds"] if seed not in new["seeds"]
    ]
    arms = {arm["name"]: arm for arm in new["arms"]}
    for arm in old["arms"]:
        name = arm["name"]
        if name in arms:
            found += _changed(f"arms.{name}", arm, arms[name])
        else:
            found.append(f"arms: {name} in the folder, not in this comparison")
    return found


def _without_runs(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in ("seeds", "arms")}


def _changed(place: str, old: Any, new: Any) -> list[str]:
    """Return a phrase per field that differs; `place` is the path of the two values in their documents."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old == new:
            return []
        return [f"{place}: {old} in the folder, {new} now"]
    phrases = []
    for name in dict.fromkeys([*old, *new]):
        inner = f"{place}.{name}" if place else name
        phrases += _changed(inner, old.get(name, "not set"), new.get(name, "not set"))
    return phrases

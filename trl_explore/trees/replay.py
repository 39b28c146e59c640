"""Cache of correct completions of hard prompts, in memory and in a file.

Prompts and completions are token ids, so that a replayed completion has exactly the tokens that were sampled.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_explore.saving.fingerprints import tokenizer_fingerprint
from trl_explore.saving.records import FileRefusedError, read_records, write_records
from trl_explore.saving.whole_files import append_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOLUTIONS = "trl-explore solutions"

Entry = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt, token ids of one completion


class SolutionCache:
    """
    Keeps correct completions of prompts that are rarely solved.

    The cache keeps the newest completions of a prompt, because they are closest to the current policy. A completion
    that is found again keeps its place.

    Args:
        solutions_per_prompt (`int`):
            Largest number of completions of a prompt, at least 1.
        threshold (`float`):
            A prompt is kept if its share of successes is at most this, from 0 to 1. With 0, no prompt is kept.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, *, solutions_per_prompt: int, threshold: float) -> None:
        if solutions_per_prompt < 1:
            raise ValueError(
                f"solutions_per_prompt must be at least 1, got {solutions_per_prompt}; threshold=0 keeps nothing."
            )
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is a share of successes and must be in [0, 1], got {threshold}.")
        self.solutions_per_prompt, self.threshold = solutions_per_prompt, threshold
        self._solutions: dict[tuple[int, ...], list[list[int]]] = {}

    def __len__(self) -> int:
        return len(self._solutions)

    @property
    def num_solutions(self) -> int:
        """Number of completions of all prompts."""
        return sum(map(len, self._solutions.values()))

    def offer(
        self, prompt_ids: Sequence[int], completions: Iterable[Sequence[int]], success_ratio: float
    ) -> list[list[int]]:
        """Keep correct completions of a prompt if `0 < success_ratio <= threshold`. Return the completions that are
        new in the cache, oldest first."""
        if 0 < success_ratio <= self.threshold:
            return self._store(prompt_ids, completions)
        return []

    def refilter(self, prompt_ids: Sequence[int], success_ratio: float) -> bool:
        """Drop a prompt if it is not hard any more: `success_ratio > threshold` (Eq. 12). Return whether a prompt was
        dropped."""
        if success_ratio <= self.threshold:
            return False
        return self._solutions.pop(tuple(prompt_ids), None) is not None

    def drop(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> None:
        """Drop a completion of a prompt. Do nothing if the cache does not hold it."""
        kept = [ids for ids in self.get(prompt_ids) if ids != list(completion_ids)]
        if kept:
            self._solutions[tuple(prompt_ids)] = kept
        else:
            self._solutions.pop(tuple(prompt_ids), None)

    def get(self, prompt_ids: Sequence[int]) -> list[list[int]]:
        """Return a copy of the completions of a prompt, oldest first."""
        return [list(completion) for completion in self._solutions.get(tuple(prompt_ids), [])]

    def state_dict(self) -> dict[str, Any]:
        """Return the contents: a list of `[prompt_ids, completion_ids]` under `"solutions"`. Prompts are in order of
        addition, and so are the completions of each prompt."""
        solutions = []
        for prompt, kept in self._solutions.items():
            for ids in kept:
                solutions.append([list(prompt), list(ids)])
        return {"solutions": solutions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents. If `state` has more completions per prompt than allowed, keep the newest ones."""
        self._solutions = {}
        for prompt_ids, completion_ids in state["solutions"]:
            self._store(prompt_ids, [completion_ids])

    def _store(self, prompt_ids: Sequence[int], completions: Iterable[Sequence[int]]) -> list[list[int]]:
        """Add completions of a prompt. Return the new ones that are kept, oldest first."""
        kept = self._solutions.get(tuple(prompt_ids), [])
        new: list[list[int]] = []
        for completion in map(list, completions):
            if completion not in kept and completion not in new:
                new.append(completion)
        if new:
            self._solutions[tuple(prompt_ids)] = (kept + new)[-self.solutions_per_prompt :]
        return [list(completion) for completion in new[-self.solutions_per_prompt :]]


def replace_failures(succeeded: Sequence[bool], num_cached: int) -> list[tuple[int, int]]:
    """Return pairs of a failed row and the number of the cached solution that replaces it. Each solution is used at
    most once. Rows are in order."""
    failures = [row for row, success in enumerate(succeeded) if not success]
    return list(zip(failures, range(num_cached), strict=False))


def write_cache(path: str | Path, cache: SolutionCache, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write a cache as JSON lines. If the write is interrupted, the old file stays."""
    named = {"tokenizer": tokenizer_fingerprint(tokenizer), "tokenizer_name": tokenizer.name_or_path}
    write_records(path, SOLUTIONS, named, map(_as_record, cache.state_dict()["solutions"]))


def append_solutions(path: str | Path, entries: Iterable[Entry]) -> None:
    """Append solutions to a file that [`write_cache`] has written. Raise a FileNotFoundError if there is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; begin it with write_cache, which names the tokenizer.")
    append_lines(Path(path), map(_as_record, entries))


def read_cache(
    path: str | Path, tokenizer: "PreTrainedTokenizerBase", *, solutions_per_prompt: int, threshold: float
) -> SolutionCache:
    """Read a cache, without an incomplete last line. Raise a FileRefusedError if another tokenizer made the tokens."""
    header, records = read_records(path, SOLUTIONS, is_valid=_is_solution)
    fingerprint = tokenizer_fingerprint(tokenizer)
    if header.get("tokenizer") != fingerprint:
        raise FileRefusedError(
            f"{path} holds solutions of the tokenizer {header.get('tokenizer_name')!r} "
            f"({str(header.get('tokenizer'))[:8]}), and this run has {tokenizer.name_or_path!r} ({fingerprint[:8]}), "
            "where the ids mean other text. Delete it, or name another file."
        )
    cache = SolutionCache(solutions_per_prompt=solutions_per_prompt, threshold=threshold)
    solutions = []
    for record in records:
        solutions.append((record["prompt_ids"], record["completion_ids"]))
    cache.load_state_dict({"solutions": solutions})
    return cache


def _as_record(entry: Entry) -> dict[str, Any]:
    prompt_ids, completion_ids = entry
    return {"prompt_ids": list(prompt_ids), "completion_ids": list(completion_ids)}


def _is_solution(record: dict[str, Any]) -> bool:
    return _is_tokens(record.get("prompt_ids")) and _is_tokens(record.get("completion_ids"))


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)

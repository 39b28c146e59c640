"""Compare scores of `ReasoningGymSpec` with the package's own, for every data set that the package has.

A program of its own: with the hash seed 0, it makes the very entries that the worker makes.

    PYTHONHASHSEED=0 python tests/reasoning_gym_scores.py [NAME ...]
"""

import random
import signal
import sys
import tempfile
import time
import warnings

from datasets import Dataset, load_from_disk
from reasoning_gym.factory import create_dataset

from trl_explore.environments.gym_worker import CPU_SECONDS, _seed_global
from trl_explore.environments.reasoning_gym import ReasoningGymSpec, entry_of, find_answer, list_names

SEED = 7
ROWS = 100
FEWER_ROWS = {"futoshiki": 25, "knight_swap": 25}  # a row takes 0.2 to 0.5 seconds, and all are made twice
GARBAGE = [
    "I do not know.",
    "1, 2; [3",
    "",
    "{}",
    "no",
    "0 0 0\n0 0 0",
    "A",
    "x**2 + C",
    "(1 + 2",
    "True",
    "1e5",
    "é√7",
]


def perturbed(answer, rng):
    """A text that is near the answer: one character left out, doubled, or replaced."""
    if not answer:
        return rng.choice(GARBAGE)
    at = rng.randrange(len(answer))
    middle = rng.choice(["", answer[at] * 2, rng.choice("0123456789AZaz ,-")])
    return answer[:at] + middle + answer[at + 1 :]


def out_of_time(signum, frame):
    raise TimeoutError


def expected(data_set, answer, entry):
    """The package's score; 0 where it raises, or needs more time than the worker gives it."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return float(data_set.score_answer(answer, entry))
    except Exception:
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def compare(name, folder):
    """Return the mistakes of one data set."""
    size = FEWER_ROWS.get(name, ROWS)
    spec = ReasoningGymSpec(name, size=size, seed=SEED)
    original = create_dataset(name, size=size, seed=SEED)
    entries = []
    for index in range(size):
        _seed_global(SEED + index)
        entries.append(original[index])
    spec.train_dataset.save_to_disk(f"{folder}/{name}")
    spec.train_dataset.to_json(f"{folder}/{name}.jsonl")
    saved = load_from_disk(f"{folder}/{name}")
    lines = Dataset.from_json(f"{folder}/{name}.jsonl", cache_dir=f"{folder}/cache")
    rng = random.Random(0)
    mistakes = []
    for index, entry in enumerate(entries):
        if repr(entry_of(saved[index])) != repr(entry):
            mistakes.append(f"{name}[{index}]: the entry changed")
        if lines[index] != saved[index]:
            mistakes.append(f"{name}[{index}]: JSON lines change the row")
        texts = [f"<answer>{entry['answer']}</answer>", f"<answer>{perturbed(entry['answer'], rng)}</answer>"]
        texts += [f"<answer>{rng.choice(GARBAGE)}</answer>", "no mark"]
        for text in texts:
            wanted = expected(original, find_answer(text, "tags"), entry)
            columns = {column: [value] for column, value in lines[index].items() if column != "prompt"}
            found = spec.reward_funcs([text], **columns)
            if found != [wanted]:
                mistakes.append(f"{name}[{index}]: {text!r} scores {found}, not {wanted}")
    return mistakes


def main():
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, out_of_time)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or list_names():
            start = time.perf_counter()
            mistakes = compare(name, folder)
            failed += bool(mistakes)
            print(f"{name}: {time.perf_counter() - start:.1f} s", *mistakes[:5], sep="\n  ", flush=True)
    print(f"{failed} data sets with mistakes")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

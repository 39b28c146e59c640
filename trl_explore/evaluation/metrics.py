"""Metrics over several samples per prompt: pass@k, majority vote at k, coverage at k."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from trl_explore.rewards.success import is_success


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""
    Unbiased estimate of the probability that at least one of `k` samples is correct.

    \\( 1 - \binom{n-c}{k} / \binom{n}{k} \\), of https://huggingface.co/papers/2107.03374, as a product.

    Args:
        num_samples (`int`):
            Samples drawn for the prompt, \\( n \\).
        num_correct (`int`):
            Correct ones, \\( c \\). In `[0, num_samples]`.
        k (`int`):
            Attempts. In `[1, num_samples]`; a `ValueError` otherwise.

    Returns:
        `float`: The estimate, in `[0, 1]`.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"num_correct must be between 0 and num_samples, got num_correct={num_correct}, num_samples={num_samples}."
        )
    _check_k(k, num_samples)
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool | float], k: int) -> float:
    r"""
    Expected correctness of a majority vote over `k` of the given samples, exact over all subsets of size `k`.

    The most frequent answer of a subset wins, and of several equally frequent ones each with the same probability.
    A sample without an answer takes up its place but never wins: a subset without any answer is wrong.

    The expectation needs no enumeration: for each answer and each number of votes it could win with, the subsets in
    which the other answers have fewer votes, or as many, are counted answer by answer.

    Args:
        answers (`Sequence` of `Hashable` or `None`):
            Answer of each sample, of shape `(N,)`; `None` for no answer.
        correct (`Sequence[bool]` or `Sequence[float]`):
            Whether each sample is correct, parallel to `answers`. Where samples of the same answer differ (another
            reward played a part), the answer is worth their mean.
        k (`int`):
            Number of votes. In `[1, N]`.

    Returns:
        `float`: The expectation, in `[0, 1]`.

    Raises:
        `ValueError`: If the lengths differ or `k` is outside its range.

    Example:
    ```python
    >>> maj_at_k(["a", "a", "b"], [True, True, False], 2)  # {a, a} wins, {a, b} twice is a tie
    0.6666666666666666
    ```
    """
    if len(answers) != len(correct):
        raise ValueError(f"correct must have one entry per answer, got {len(correct)} for {len(answers)} answers.")
    _check_k(k, len(answers))
    flags: defaultdict[Hashable, list[float]] = defaultdict(list)
    for answer, flag in zip(answers, correct, strict=True):
        if answer is not None:
            flags[answer].append(float(flag))
    num_blank = len(answers) - sum(len(group) for group in flags.values())
    counts = {answer: len(group) for answer, group in flags.items()}
    total = math.comb(len(answers), k)

    expectation = 0.0
    wins: dict[int, float] = {}  # by number of samples: equally frequent answers win equally often
    for answer, group in flags.items():
        if any(group):
            if len(group) not in wins:
                others = [count for other, count in counts.items() if other != answer]
                wins[len(group)] = _win_probability(len(group), others, num_blank, k, total)
            expectation += sum(group) / len(group) * wins[len(group)]
    return expectation


def _win_probability(count: int, others: list[int], num_blank: int, k: int, total: int) -> float:
    """Probability that an answer of `count` samples wins a subset of `k`, ties shared."""
    probability = 0.0
    for votes in range(1, min(count, k) + 1):
        # subsets[(drawn, tied)]: ways to draw `drawn` samples of the other answers, `tied` of these with `votes` votes
        subsets = {(0, 0): 1}
        for other in others:
            extended: defaultdict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), ways in subsets.items():
                for extra in range(min(other, votes, k - votes - drawn) + 1):
                    extended[drawn + extra, tied + (extra == votes)] += ways * math.comb(other, extra)
            subsets = extended
        for (drawn, tied), ways in subsets.items():
            ways *= math.comb(count, votes) * math.comb(num_blank, k - votes - drawn)
            probability += ways / (total * (tied + 1))
    return probability


def coverage_at_k(candidates: Sequence[Hashable], targets: Iterable[Hashable], k: int) -> float:
    """
    Share of the distinct targets that are among the first `k` candidates.

    Args:
        candidates (`Sequence[Hashable]`):
            Candidates in order of preference; repeated ones take up their places. May be fewer than `k`.
        targets (`Iterable[Hashable]`):
            What should be found. Not empty; repeated targets count once.
        k (`int`):
            How many candidates count. At least 1.

    Returns:
        `float`: The share, in `[0, 1]`.

    Raises:
        `ValueError`: If there is no target or `k` is less than 1.

    Example:
    ```python
    >>> coverage_at_k(["a", "a", "b"], {"a", "b"}, 2)
    0.5
    ```
    """
    wanted = set(targets)
    if not wanted:
        raise ValueError("targets is empty, and a share of nothing is undefined: leave prompts without targets out.")
    if k < 1:
        raise ValueError(f"k must be at least 1, got k={k}.")
    return len(wanted.intersection(candidates[:k])) / len(wanted)


def prompt_values(
    rewards: Sequence[Sequence[float | None]],
    answers: Sequence[Sequence[Hashable | None]],
    *,
    threshold: float,
    k: Sequence[int],
    maj_k: Sequence[int] = (),
) -> dict[str, list[float]]:
    """`pass_at_{k}` and `maj_at_{k}` of each prompt, by the rewards and answers `(P, N)` of its samples."""
    success = [[is_success(reward, threshold=threshold) for reward in of_prompt] for of_prompt in rewards]
    voted = list(zip(answers, success, strict=True))
    return {
        **{f"pass_at_{value}": [pass_at_k(len(row), sum(row), value) for row in success] for value in k},
        **{f"maj_at_{value}": [maj_at_k(of_prompt, row, value) for of_prompt, row in voted] for value in maj_k},
    }


def sample_metrics(
    rewards: Sequence[Sequence[float | None]],
    answers: Sequence[Sequence[Hashable | None]],
    greedy_rewards: Sequence[float | None] | None = None,
    *,
    threshold: float,
    k: Sequence[int],
    maj_k: Sequence[int] = (),
    totals: Sequence[Sequence[float | None]] | None = None,
) -> dict[str, float]:
    """Averages over prompts of the metrics of their samples. A prompt none of whose samples has a reward is left out;
    a single missing reward is a failure."""
    scored = [i for i, of_prompt in enumerate(rewards) if any(reward is not None for reward in of_prompt)]
    if not scored:
        raise ValueError(
            "No sample of any prompt has a reward: every reward function returned None. Check the column of the gold "
            "answers."
        )
    chosen = [rewards[i] for i in scored], [answers[i] for i in scored]
    values = prompt_values(*chosen, threshold=threshold, k=k, maj_k=maj_k)
    if greedy_rewards is not None:
        values["greedy_accuracy"] = [float(is_success(greedy_rewards[i], threshold=threshold)) for i in scored]
    values["reward"] = [total for i in scored for total in (totals or rewards)[i] if total is not None]
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k must be between 1 and the number of samples, got k={k} for {num_samples} samples; lower k."
        )

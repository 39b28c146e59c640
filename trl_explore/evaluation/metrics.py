"""Metrics over several samples per prompt: pass@k, majority vote at k, coverage at k."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from trl_explore.rewards.success import is_success


class NoRewardError(ValueError):
    """Raised if no completion of an evaluation got a reward."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""
    Unbiased estimate of the probability that at least one of `k` samples is correct.

    \\( 1 - \binom{n-c}{k} / \binom{n}{k} \\) of https://huggingface.co/papers/2107.03374, computed as a product.

    Args:
        num_samples (`int`):
            Number of samples of the prompt, \\( n \\).
        num_correct (`int`):
            Number of correct samples, \\( c \\). In `[0, num_samples]`.
        k (`int`):
            Number of attempts. In `[1, num_samples]`.

    Returns:
        `float`: The estimate, in `[0, 1]`.

    Raises:
        `ValueError`: If an argument is outside its range.
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

    The most frequent answer of a subset wins. If several answers are equally frequent, each wins with the same
    probability. A sample without an answer counts towards `k` but never wins, so a subset without any answer is wrong.

    The subsets are not enumerated. For each answer and each number of votes with which it could win, dynamic
    programming over the other answers counts the subsets in which no other answer has more votes.

    Args:
        answers (`Sequence` of `Hashable` or `None`):
            Answer of each sample, of shape `(N,)`; `None` for no answer.
        correct (`Sequence[bool]` or `Sequence[float]`):
            Correctness of each sample, of shape `(N,)`. If samples with the same answer differ (because of a
            format reward, say), the correctness of the answer is their mean.
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
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)  # correctness of the samples with each answer
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            groups[answer].append(float(is_correct))
    counts = {answer: len(group) for answer, group in groups.items()}
    num_blank = len(answers) - sum(counts.values())
    total = math.comb(len(answers), k)

    expectation = 0.0
    # Probability that an answer wins, by its number of samples. Answers with equally many samples share one entry.
    win_probabilities: dict[int, float] = {}
    for answer, group in groups.items():
        count = len(group)
        if any(group):  # an answer without a correct sample adds nothing, so its probability is not needed
            if count not in win_probabilities:
                others = [other_count for other, other_count in counts.items() if other != answer]
                win_probabilities[count] = _win_probability(count, others, num_blank, k, total)
            expectation += sum(group) / count * win_probabilities[count]
    return expectation


def _win_probability(count: int, others: list[int], num_blank: int, k: int, total: int) -> float:
    """
    Return the probability that an answer with `count` samples wins in a random subset of size `k`.

    If n answers tie, each of them wins with probability 1 / n.

    Args:
        count (`int`):
            Number of samples with the answer.
        others (`list[int]`):
            Number of samples with each other answer.
        num_blank (`int`):
            Number of samples without an answer.
        k (`int`):
            Size of the subsets.
        total (`int`):
            Number of subsets of size `k`.
    """
    probability = 0.0
    for votes in range(1, min(count, k) + 1):
        # subsets[drawn, tied]: number of ways to choose `drawn` samples of the other answers so far, such that `tied`
        # of these answers have exactly `votes` votes and none has more.
        subsets = {(0, 0): 1}
        for other in others:
            extended: defaultdict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), ways in subsets.items():
                for extra in range(min(other, votes, k - votes - drawn) + 1):
                    extended[drawn + extra, tied + (extra == votes)] += ways * math.comb(other, extra)
            subsets = extended
        for (drawn, tied), ways in subsets.items():
            # The rest of the subset are samples without an answer.
            ways *= math.comb(count, votes) * math.comb(num_blank, k - votes - drawn)
            probability += ways / (total * (tied + 1))
    return probability


def coverage_at_k(candidates: Sequence[Hashable], targets: Iterable[Hashable], k: int) -> float:
    """
    Share of the distinct targets that are among the first `k` candidates.

    Args:
        candidates (`Sequence[Hashable]`):
            Candidates in order of preference. Repeated candidates count towards `k`. May be fewer than `k`.
        targets (`Iterable[Hashable]`):
            Targets to find. Not empty. Repeated targets count once.
        k (`int`):
            Number of candidates that count. At least 1.

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
        raise ValueError("targets is empty, so that coverage is undefined: leave out prompts without targets.")
    if k < 1:
        raise ValueError(f"k must be at least 1, got k={k}.")
    return len(wanted.intersection(candidates[:k])) / len(wanted)


def has_reward(rewards: Sequence[float | None]) -> bool:
    """Return whether at least one sample has a reward."""
    return any(reward is not None for reward in rewards)


def prompt_values(
    rewards: Sequence[Sequence[float | None]],
    answers: Sequence[Sequence[Hashable | None]],
    *,
    threshold: float,
    k: Sequence[int],
    maj_k: Sequence[int] = (),
) -> dict[str, list[float]]:
    """
    Compute `pass_at_{k}` and `maj_at_{k}` of each prompt.

    Args:
        rewards (`Sequence[Sequence[float | None]]`):
            Rewards of the samples of each prompt, `(P, N)`. A missing reward is a failure.
        answers (`Sequence[Sequence[Hashable | None]]`):
            Answers of the samples of each prompt, `(P, N)`. Only the majority vote reads them.
        threshold (`float`):
            Smallest reward that counts as success.
        k (`Sequence[int]`):
            Values of k for pass@k.
        maj_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for the majority vote.

    Returns:
        `dict[str, list[float]]`: For each name of a metric, one value per prompt, `(P,)`.
    """
    values: dict[str, list[float]] = {f"pass_at_{number}": [] for number in k}
    values |= {f"maj_at_{number}": [] for number in maj_k}
    for prompt_rewards, prompt_answers in zip(rewards, answers, strict=True):
        correct = [is_success(reward, threshold=threshold) for reward in prompt_rewards]
        for number in k:
            values[f"pass_at_{number}"].append(pass_at_k(len(correct), sum(correct), number))
        for number in maj_k:
            values[f"maj_at_{number}"].append(maj_at_k(prompt_answers, correct, number))
    return values


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
    """
    Average the metrics over prompts, and the reward over samples.

    A sample without a reward is a failure, and the mean reward leaves it out. If no sample of a prompt has a reward,
    all metrics leave the prompt out.

    Args:
        rewards (`Sequence[Sequence[float | None]]`):
            Rewards that decide success, for the samples of each prompt, `(P, N)`.
        answers (`Sequence[Sequence[Hashable | None]]`):
            Answers of the samples, `(P, N)`. Only the majority vote reads them.
        greedy_rewards (`Sequence[float | None]`, *optional*):
            Reward of each prompt's greedy completion, `(P,)`. `None` leaves out `greedy_accuracy`.
        threshold (`float`):
            Smallest reward that counts as success.
        k (`Sequence[int]`):
            Values of k for pass@k.
        maj_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for the majority vote.
        totals (`Sequence[Sequence[float | None]]`, *optional*):
            Rewards that the metric `reward` averages, `(P, N)`. `None` uses `rewards`.

    Returns:
        `dict[str, float]`: `pass_at_{k}`, `maj_at_{k}`, `reward` and, with `greedy_rewards`, `greedy_accuracy`.

    Raises:
        `NoRewardError`: If no sample of any prompt has a reward.
    """
    if totals is None:
        totals = rewards
    scored = [index for index, row in enumerate(rewards) if has_reward(row)]
    if not scored:
        raise NoRewardError(
            "No sample of any prompt has a reward: every reward function returned None. Check the column of the gold "
            "answers."
        )
    values = prompt_values(
        [rewards[index] for index in scored],
        [answers[index] for index in scored],
        threshold=threshold,
        k=k,
        maj_k=maj_k,
    )
    if greedy_rewards is not None:
        values["greedy_accuracy"] = [float(is_success(greedy_rewards[i], threshold=threshold)) for i in scored]
    values["reward"] = []
    for index in scored:
        values["reward"] += [total for total in totals[index] if total is not None]
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"k must be between 1 and the number of samples, got k={k} for {num_samples} samples; lower k."
        )

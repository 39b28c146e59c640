"""Allocate a fixed number of rows to the prompts of a batch, depending on their success rates. After Knapsack RL
(https://huggingface.co/papers/2509.25849) and VIP (https://huggingface.co/papers/2602.01601)."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from trl_explore.credit.normalised import normalised
from trl_explore.names import shown

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

# Returns the gain of one more row, for the number of rows that a prompt has and its success rate.
Gain = Callable[[int, float], float]
# Probability of contrast, which means that a group has both successes and failures. If some prompts were never solved,
# the other prompts get only enough rows for this probability.
CONTRAST = 0.9


def knapsack_gain(number: int, rate: float) -> float:
    """Return the gain of one more row in `(1 - p^n - (1-p)^n) p (1-p)^2`, the probability of contrast times its value.
    `number` is n, the number of rows before, and `rate` is p. The gain decreases with n."""
    gained = rate**number * (1 - rate) + (1 - rate) ** number * rate
    return gained * rate * (1 - rate) ** 2


def vip_gain(number: int, rate: float) -> float:
    """Return the decrease of `p (1-p) / (n-1)`, the variance of a prompt's gradient, by one more row. `number` is n,
    the number of rows before, and `rate` is p. The decrease is infinite below two rows, and 0 if the variance is 0."""
    spread = rate * (1 - rate)
    if spread == 0:
        return 0.0
    if number < 2:
        return math.inf
    return spread / ((number - 1) * number)


GAINS: dict[str, Gain] = {"knapsack": knapsack_gain, "vip": vip_gain}


def enough(rate: float) -> float:
    """Return the number of rows with which a prompt has contrast with a probability of about [`CONTRAST`]. It is
    infinite for success rates of 0 and 1."""
    if not 0 < rate < 1:
        return math.inf
    return math.ceil(math.log(1 - CONTRAST) / math.log(max(rate, 1 - rate)))


def allocate(rates: Sequence[float | None], *, kind: str, usual: int, low: int, high: int) -> list[int]:
    """
    Return the number of rows of each prompt.

    Start with `low` rows per prompt, and give one row after another to the prompt with the largest gain, the first of
    equal prompts. Gains decrease with the number of rows, so the result has the largest possible total gain. If no
    prompt gains from a row, distribute the remaining rows evenly. With `"knapsack"`, if some prompts were never
    solved, the other prompts get at most [`enough`] rows, and the unsolved prompts get the rest.

    Args:
        rates (`Sequence[float | None]`):
            Success rate of each prompt, `[P]`. A prompt whose rate is None (unknown) starts with `usual` rows.
        kind (`str`):
            `"knapsack"` or `"vip"`.
        usual (`int`):
            Mean number of rows per prompt.
        low (`int`):
            Least number of rows of a prompt.
        high (`int`):
            Largest number of rows of a prompt.

    Returns:
        `list[int]`: Numbers of rows, `[P]`; their sum is `usual * P`.
    """
    gain = GAINS[kind]
    counts = [usual if rate is None else low for rate in rates]
    left = usual * len(rates) - sum(counts)
    some_unsolved = kind == "knapsack" and 0.0 in rates
    heap: list[tuple[float, int]] = []  # negative gain and place of each prompt that gains from one more row
    for place, rate in enumerate(rates):
        if rate is not None and gain(low, rate) > 0 and low < high:
            heap.append((-gain(low, rate), place))
    heapq.heapify(heap)
    while left and heap:
        _, place = heapq.heappop(heap)
        rate = rates[place]
        assert rate is not None
        if some_unsolved and counts[place] >= enough(rate):
            continue
        counts[place] += 1
        left -= 1
        if counts[place] < high:
            heapq.heappush(heap, (-gain(counts[place], rate), place))
    # Remaining rows go to prompts that were never solved, then to prompts that were always solved, then to all prompts
    # with a known rate, and last to prompts whose rate is unknown.
    known = [rate for rate in rates if rate is not None]
    for group in ([0.0], [1.0], known, [None]):
        places = [place for place, rate in enumerate(rates) if rate in group]
        while left:
            open_places = [place for place in places if counts[place] < high]
            if not open_places:
                break
            fewest = min(open_places, key=counts.__getitem__)
            counts[fewest] += 1
            left -= 1
    return counts


def unequal_advantages(
    rewards: torch.Tensor, counts: Sequence[int], *, scale: str, usual: int, deviation: float
) -> torch.Tensor:
    """
    Return GRPO's advantages of groups of different sizes, scaled so that all prompts have the same weight.

    Args:
        rewards (`torch.Tensor`):
            Total rewards, `(B,)`.
        counts (`Sequence[int]`):
            Number of rows of each group.
        scale (`str`):
            TRL's `scale_rewards`: `"group"`, `"batch"` or `"none"`.
        usual (`int`):
            Mean number of rows per group. The advantages of a group of `count` rows are multiplied by `usual / count`.
        deviation (`float`):
            Standard deviation of the rewards of the batch, for `scale="batch"`.

    Returns:
        `torch.Tensor`: Advantages, `(B,)`.
    """
    group_scale = "none" if scale == "batch" else scale
    groups = []
    for group in rewards.split(list(counts)):
        own = normalised(group[None], scale=group_scale)[0]
        if scale == "batch":
            own = own / (deviation + 1e-4)
        groups.append(own * (usual / len(group)))
    return torch.cat(groups)


def check_budget(args: "ExplorationConfig") -> None:
    """Raise a ValueError if a budget is impossible, or if another field needs groups of equal size. `args` may
    be the configuration of any method."""
    if args.budget == "uniform":
        return
    size, field = args.num_generations, f"`budget={args.budget!r}`"
    most = 2 * size if args.max_generations is None else args.max_generations
    if args.min_generations > size or most < size:
        raise ValueError(
            f"{field} spreads `num_generations={size}` rows per prompt: `min_generations={args.min_generations}` must "
            f"be at most that, and `max_generations={args.max_generations}` at least."
        )
    neutral = {
        "dynamic_sampling": "off",
        "drop_zero_advantage": False,
        "advantage": "grpo",
        "count_bonus": 0.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "explore_prompts": "all",
        "explore_share_end": 1.0,
        "branch_from": "failures",
    }
    for name, value in neutral.items():
        found = getattr(args, name, value)  # a configuration has only the fields of its method
        if found == value or (name == "branch_from" and found == "all"):
            continue
        raise ValueError(
            f"{field} gives prompts unequally many rows, and `{name}={shown(found)!r}` compares groups of one size: "
            "leave one of them out."
        )

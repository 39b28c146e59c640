"""How many rows each prompt of a batch gets, where all prompts have so many together: after Knapsack RL
(https://huggingface.co/papers/2509.25849) and VIP (https://huggingface.co/papers/2602.01601)."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl_explore.credit.normalised import normalised

Gain = Callable[[int, float], float]  # of one more row, for a prompt that has so many and such a success rate
CONTRAST = 0.9  # probability of contrast that a prompt is given rows for while others were never solved


def knapsack_gain(number: int, rate: float) -> float:
    """Growth of `(1 - p^n - (1-p)^n) p (1-p)^2`: contrast times what it is worth; it falls with n."""
    gained = rate**number * (1 - rate) + (1 - rate) ** number * rate
    return gained * rate * (1 - rate) ** 2


def vip_gain(number: int, rate: float) -> float:
    """Fall of the variance of a prompt's gradient, `p (1-p) / (n-1)`; all of it for the second row."""
    spread = rate * (1 - rate)
    return math.inf * spread if number < 2 and spread else spread / ((number - 1) * number) if spread else 0.0


GAINS: dict[str, Gain] = {"knapsack": knapsack_gain, "vip": vip_gain}


def enough(rate: float) -> float:
    """Rows from which a prompt has contrast with probability [`CONTRAST`], nearly."""
    return math.ceil(math.log(1 - CONTRAST) / math.log(max(rate, 1 - rate))) if 0 < rate < 1 else math.inf


def allocate(rates: Sequence[float | None], *, kind: str, usual: int, low: int, high: int) -> list[int]:
    """
    Rows for each prompt: `usual` times their number in all, from `low` to `high` each, `usual` where the success rate
    is unknown (`None`).

    One row after another goes where it gains most, the first of equal prompts first; both gains fall, so nothing
    better can be had. With `"knapsack"`, where there are prompts that were never solved, others get what is
    [`enough`], and the rest goes to those. What gains nothing is spread evenly.
    """
    gain = GAINS[kind]
    counts = [usual if rate is None else low for rate in rates]
    left = usual * len(rates) - sum(counts)
    never = kind == "knapsack" and 0.0 in rates
    heap = [
        (-gain(low, rate), place)
        for place, rate in enumerate(rates)
        if rate is not None and gain(low, rate) > 0 and low < high
    ]
    heapq.heapify(heap)
    while left and heap:
        _, place = heapq.heappop(heap)
        rate = rates[place]
        assert rate is not None
        if never and counts[place] >= enough(rate):
            continue
        counts[place] += 1
        left -= 1
        if counts[place] < high:
            heapq.heappush(heap, (-gain(counts[place], rate), place))
    # The hard ones first, then whoever has room; prompts that nothing is known of last.
    for group in ([0.0], [1.0], [r for r in rates if r is not None], [None]) if left else ():
        places = [place for place, rate in enumerate(rates) if rate in group]
        while left and (open_places := [place for place in places if counts[place] < high]):
            place = min(open_places, key=counts.__getitem__)
            counts[place] += 1
            left -= 1
    return counts


def unequal_advantages(
    rewards: torch.Tensor, counts: Sequence[int], *, scale: str, usual: int, deviation: float
) -> torch.Tensor:
    """GRPO's advantages `(B,)` of rewards `(B,)` in groups of `counts` rows, each times `usual / count`, so that all
    prompts weigh the same; `deviation` is that of the batch."""
    groups = []
    for group in rewards.split(list(counts)):
        own = normalised(group[None], scale="none" if scale == "batch" else scale)[0]
        groups.append((own / (deviation + 1e-4) if scale == "batch" else own) * (usual / len(group)))
    return torch.cat(groups)


def check_budget(args: Any) -> None:
    """`ValueError` where a budget cannot be spent, or meets what needs groups of one size."""
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
        if vars(args).get(name, value) not in (value, *["all"] * (name == "branch_from")):
            raise ValueError(
                f"{field} gives prompts unequally many rows, and `{name}={vars(args)[name]!r}` compares groups of one "
                "size: leave one of them out."
            )

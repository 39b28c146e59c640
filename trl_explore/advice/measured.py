"""The regimes of `examples/benchmarks/regimes.py`, as `regimes.py report` writes them beside this file."""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trl_explore.advice.signs import Signs

FILE = Path(__file__).with_name("measured.json")
PAGE = "docs/evidence.md"  # where the evidence stands
# Root mean square difference of signs up to which runs are alike: 19 of 20 are as near to another of their regime.
NEAR = 0.2


@dataclass(frozen=True)
class Tried:
    """
    What an arm did in a regime, beside tuned GRPO at equal cost.

    Args:
        name (`str`):
            Its name there.
        method (`str`):
            Its method, as `trl-explore train` takes it.
        options (`dict`):
            The fields that it was given.
        tokens (`list[float]`):
            Points more than GRPO along the curve for as many generated tokens, and the ends of their 95 % interval.
        seconds (`list[float]`):
            The same for as many seconds.
    """

    name: str
    method: str
    options: dict[str, Any]
    tokens: list[float]
    seconds: list[float]

    @property
    def paid(self) -> bool:
        """Whether it was clearly ahead for as many generated tokens."""
        return self.tokens[1] > 0


@dataclass(frozen=True)
class Measured:
    """
    A regime: how GRPO's runs look there, and what its arms did.

    Args:
        name (`str`):
            Its name.
        metric (`str`):
            What arms were judged by.
        agent (`bool`):
            Whether its runs call tools.
        places (`list[list[float]]`):
            [`~trl_explore.advice.signs.Signs.place`] of each of GRPO's runs.
        limits (`list[str]`):
            What GRPO lacks there: `"samples"`, `"variety"`, both or nothing.
        seeds (`int`):
            Seeds of the differences.
        arms (`list[Tried]`):
            Rivals and methods.
    """

    name: str
    metric: str
    agent: bool
    places: list[list[float]]
    limits: list[str]
    seeds: int
    arms: list[Tried]

    @property
    def link(self) -> str:
        """Where its numbers stand."""
        return f"{PAGE}#{self.name}"


@lru_cache
def read_measured() -> tuple[Measured, ...]:
    """All measured regimes."""
    regimes = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(Measured(**{**regime, "arms": [Tried(**arm) for arm in regime["arms"]]}) for regime in regimes)


def nearest(signs: Signs) -> tuple[Measured | None, float | None]:
    """The regime of the GRPO run that looks most like a run of GRPO, if it is near, and how far it is."""
    ours = signs.place
    alike = [regime for regime in read_measured() if regime.agent == signs.agent]
    if ours is None or not signs.plain or not alike:
        return None, None

    def distance(regime: Measured) -> float:
        return min(math.dist(ours, theirs) / math.sqrt(len(ours)) for theirs in regime.places)

    found = min(alike, key=distance)
    away = distance(found)
    return (found if away <= NEAR else None), away

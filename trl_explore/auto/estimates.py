"""Estimates of the contrast that a generated token buys, by source of rows, and the choice between sources."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

PLAIN = "plain"  # the source of GRPO's own rows: fresh prompts


@dataclass
class Bought:
    """Discounted sums of what a source of rows bought."""

    contrast: float = 0.0  # groups with contrast
    tokens: float = 0.0  # generated tokens, including discarded completions


class Estimates:
    """
    Estimates contrast per generated token of each source, and chooses sources by Thompson sampling.

    The contrast per token of a source has a Gamma posterior. The prior of an explorer has the mean of the plain rows
    and the weight of one group with contrast, so an explorer that was not tried yet is as attractive as fresh prompts.

    Args:
        explorers (`Sequence[str]`):
            Names of the explorers.
        discount (`float`):
            Factor of the sums of a source whenever new rows are added, in (0, 1]. 1 forgets nothing.
        min_share (`float`):
            Share of the choices that are a uniformly random explorer, in [0, 1].
    """

    def __init__(self, explorers: Sequence[str], *, discount: float, min_share: float) -> None:
        self.explorers, self.discount, self.min_share = tuple(explorers), discount, min_share
        self.sums = {name: Bought() for name in (PLAIN, *self.explorers)}
        self.num_asked = 0  # unsolved prompts so far
        self.num_compared = 0  # prompts of these for which fresh prompts were compared with an explorer
        self.num_worth = 0  # prompts of the compared ones for which an explorer was worth more

    def add(self, source: str, *, contrast: float, tokens: float) -> None:
        """Add the rows of a generation batch: their number of groups with contrast, and their generated tokens."""
        bought = self.sums[source]
        bought.contrast = self.discount * bought.contrast + contrast
        bought.tokens = self.discount * bought.tokens + tokens

    def rate(self, source: str) -> float | None:
        """Return groups with contrast per generated token. None if the source was never used."""
        bought = self.sums[source]
        return bought.contrast / bought.tokens if bought.tokens else None

    def choose(self, possible: Sequence[Collection[str]], *, random: Random) -> list[str]:
        """
        Choose a source for each unsolved prompt.

        Args:
            possible (`Sequence[Collection[str]]`):
                Names of the explorers that can explore each prompt.
            random (`random.Random`):
                Source of randomness.

        Returns:
            `list[str]`: Names of explorers, or [`PLAIN`] for prompts that are not explored.
        """
        chosen = []
        for names in possible:
            self.num_asked += 1
            explorers = [name for name in self.explorers if name in names]
            if not explorers:
                chosen.append(PLAIN)
            elif random.random() < self.min_share:
                chosen.append(random.choice(explorers))
            else:
                values = {source: self._draw(source, random) for source in (PLAIN, *explorers)}
                chosen.append(max(values, key=values.__getitem__))
                self.num_compared += 1
                self.num_worth += chosen[-1] != PLAIN
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts, for a checkpoint."""
        sums = {name: [bought.contrast, bought.tokens] for name, bought in self.sums.items()}
        counts = {"num_asked": self.num_asked, "num_compared": self.num_compared, "num_worth": self.num_worth}
        return {"sums": sums, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Sources that the run did not have before start without rows."""
        for name, bought in self.sums.items():
            bought.contrast, bought.tokens = state["sums"].get(name, (0.0, 0.0))
        self.num_asked, self.num_worth = state["num_asked"], state["num_worth"]
        self.num_compared = state["num_compared"]

    def _draw(self, source: str, random: Random) -> float:
        """Draw contrast per token from the posterior of a source."""
        bought, plain = self.sums[source], self.sums[PLAIN]
        # Tokens of fresh prompts per group with contrast.
        prior_tokens = max(plain.tokens, 1.0) / max(plain.contrast, 1.0)
        return random.gammavariate(1.0 + bought.contrast, 1.0 / (prior_tokens + bought.tokens))

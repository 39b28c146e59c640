"""Estimates of contrast per generated token, and the choice between fresh prompts and explorers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

PLAIN = "plain"  # source of GRPO's own rows: tokens that are not spent on exploring sample fresh prompts


@dataclass
class SourceSums:
    """Discounted sums over the rows of one source."""

    contrast: float = 0.0  # number of groups with contrast; may be a fraction
    tokens: float = 0.0  # generated tokens, including discarded completions; trained tokens if these are more


class Estimates:
    """
    Estimates contrast per generated token of each source, and chooses sources by Thompson sampling.

    A source of rows is `PLAIN` or the name of an explorer. The estimate of a source is a Gamma posterior. Every source
    has the same prior: its mean is the contrast per token of `PLAIN`, and it weighs as much as one group with
    contrast. An explorer that was not tried yet is therefore as attractive as fresh prompts.

    Args:
        explorers (`Sequence[str]`):
            Names of the explorers.
        discount (`float`):
            Factor by which the sums of a source are multiplied before new rows are added, in (0, 1]. 1 forgets
            nothing.
        min_share (`float`):
            Probability that the choice for a prompt is a uniformly random explorer, in [0, 1].
    """

    def __init__(self, explorers: Sequence[str], *, discount: float, min_share: float) -> None:
        self.explorers, self.discount, self.min_share = tuple(explorers), discount, min_share
        self.sums = {name: SourceSums() for name in (PLAIN, *self.explorers)}
        # Numbers of unsolved prompts so far: all; those for which Thompson sampling compared explorers with fresh
        # prompts; and those for which it chose an explorer.
        self.num_unsolved = self.num_compared = self.num_preferred = 0

    def add(self, source: str, *, contrast: float, tokens: float) -> None:
        """Add the number of groups with contrast and the number of tokens of a generation batch to a source."""
        bought = self.sums[source]
        bought.contrast = self.discount * bought.contrast + contrast
        bought.tokens = self.discount * bought.tokens + tokens

    def rate(self, source: str) -> float | None:
        """Return groups with contrast per token. None if the source was never used."""
        bought = self.sums[source]
        if not bought.tokens:
            return None
        return bought.contrast / bought.tokens

    def choose(self, possible: Sequence[Collection[str]], *, random: Random) -> list[str]:
        """
        Choose a source for each unsolved prompt.

        Args:
            possible (`Sequence[Collection[str]]`):
                Names of the explorers that can explore each prompt.
            random (`random.Random`):
                Source of randomness.

        Returns:
            `list[str]`: The name of an explorer for each prompt, or [`PLAIN`] if the prompt is not explored.
        """
        chosen = []
        for names in possible:
            self.num_unsolved += 1
            explorers = [name for name in self.explorers if name in names]
            if not explorers:
                chosen.append(PLAIN)
            elif random.random() < self.min_share:
                chosen.append(random.choice(explorers))
            else:
                values = {source: self._draw(source, random) for source in (PLAIN, *explorers)}
                chosen.append(max(values, key=values.__getitem__))
                self.num_compared += 1
                self.num_preferred += chosen[-1] != PLAIN
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts, for a checkpoint."""
        sums = {name: [bought.contrast, bought.tokens] for name, bought in self.sums.items()}
        counts = [self.num_unsolved, self.num_compared, self.num_preferred]
        return {"sums": sums, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. An explorer that is not in the checkpoint starts with empty sums."""
        for name, bought in self.sums.items():
            bought.contrast, bought.tokens = state["sums"].get(name, (0.0, 0.0))
        self.num_unsolved, self.num_compared, self.num_preferred = state["counts"]

    def _draw(self, source: str, random: Random) -> float:
        """Sample contrast per token from the posterior of a source."""
        bought, plain = self.sums[source], self.sums[PLAIN]
        # Tokens that fresh prompts need for one group with contrast: the weight of the prior.
        prior_tokens = max(plain.tokens, 1.0) / max(plain.contrast, 1.0)
        return random.gammavariate(1.0 + bought.contrast, 1.0 / (prior_tokens + bought.tokens))

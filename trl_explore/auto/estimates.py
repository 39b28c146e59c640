"""Estimates of contrast per generated token, and the choice between fresh prompts and explorers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

# Name of the source of GRPO's own rows. The alternative to exploring a prompt is to sample fresh prompts with GRPO, so
# the explorers compete with this source.
PLAIN = "plain"


@dataclass
class SourceSums:
    """Discounted sums over the rows of one source."""

    contrast: float = 0.0  # number of groups with contrast; may be a fraction
    tokens: float = 0.0  # generated tokens, including discarded completions; trained tokens if these are more


class Estimates:
    """
    Estimates contrast per generated token of each source, and chooses sources by Thompson sampling.

    A source of rows is `PLAIN` or the name of an explorer. The model of a source: its number of groups with contrast
    has a Poisson distribution, whose mean is a rate times the number of tokens. The rate has a Gamma prior, which is
    the same for every source. The mean of the prior is the contrast per token of `PLAIN`, and the prior weighs as much
    as one group with contrast. So an explorer that was not tried yet is expected to yield as much as fresh prompts.

    Thompson sampling chooses a source for a prompt: sample a rate from the posterior of each source, and take the
    source with the largest sampled rate. So a source that is probably better is chosen more often, and a source with
    few observations, whose posterior is wide, is still tried.

    Args:
        explorers (`Sequence[str]`):
            Names of the explorers.
        discount (`float`):
            Factor by which the sums of a source are multiplied before the rows of a generation batch are added, in
            (0, 1]. 1 forgets nothing.
        min_share (`float`):
            Probability that the choice for a prompt is a uniformly random explorer, in [0, 1].
    """

    def __init__(self, explorers: Sequence[str], *, discount: float, min_share: float) -> None:
        self.explorers, self.discount, self.min_share = tuple(explorers), discount, min_share
        self.sums = {name: SourceSums() for name in (PLAIN, *self.explorers)}
        # Three numbers of prompts so far. `num_unsolved` counts all unsolved prompts, and `num_compared` the prompts
        # for which Thompson sampling compared explorers with fresh prompts. `num_preferred` counts the prompts for
        # which it then chose an explorer.
        self.num_unsolved = self.num_compared = self.num_preferred = 0

    def add(self, source: str, *, contrast: float, tokens: float, same_batch: bool = False) -> None:
        """Add rows of a generation batch to a source: the number of groups with contrast, and of tokens. With
        `same_batch=True`, other rows of this batch were added before, so the sums are not discounted again."""
        sums = self.sums[source]
        discount = 1.0 if same_batch else self.discount
        sums.contrast = discount * sums.contrast + contrast
        sums.tokens = discount * sums.tokens + tokens

    def rate(self, source: str) -> float | None:
        """Return groups with contrast per token. None if the source was never used."""
        sums = self.sums[source]
        if not sums.tokens:
            return None
        return sums.contrast / sums.tokens

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
        saved = {name: [sums.contrast, sums.tokens] for name, sums in self.sums.items()}
        counts = [self.num_unsolved, self.num_compared, self.num_preferred]
        return {"sums": saved, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. An explorer that is not in the checkpoint starts with empty sums."""
        for name, sums in self.sums.items():
            sums.contrast, sums.tokens = state["sums"].get(name, (0.0, 0.0))
        self.num_unsolved, self.num_compared, self.num_preferred = state["counts"]

    def _draw(self, source: str, random: Random) -> float:
        """Sample contrast per token from the posterior of a source."""
        sums, plain = self.sums[source], self.sums[PLAIN]
        # The prior counts as one group with contrast, in the number of tokens that fresh prompts need for one.
        # If fresh prompts have yielded less than one such group, use the number of all their tokens.
        # Observed groups are added to the shape of the Gamma distribution, and observed tokens to its inverse scale.
        prior_tokens = max(plain.tokens, 1.0) / max(plain.contrast, 1.0)
        return random.gammavariate(1.0 + sums.contrast, 1.0 / (prior_tokens + sums.tokens))

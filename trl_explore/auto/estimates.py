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
    prompts: float = 0.0  # prompts that the source sampled


class Estimates:
    """
    Estimates contrast per generated token of each source, and chooses sources by Thompson sampling.

    A source of rows is `PLAIN` or the name of an explorer. The model of a source: its number of groups with contrast
    has a Poisson distribution, whose mean is a rate times the number of tokens. The rate has a Gamma prior, which is
    the same for every source. The mean of the prior is the contrast per token of `PLAIN`, and the prior weighs as much
    as one group with contrast. So an explorer that was not tried yet is expected to yield as much as fresh prompts.

    Thompson sampling chooses a source for a prompt: sample a rate from the posterior of each source, and take the
    source with the largest sampled rate. So a source that is probably better is chosen more often, and a source with
    few observations, whose posterior is wide, is still tried. Before the comparison, the sampled rate of `PLAIN` is
    divided by the share of fresh prompts without contrast. If nearly all groups of a batch have contrast already, more
    contrast hardly improves this update, and it costs tokens that later updates could use.

    Tries have a limit. Each explorer has a credit, in tokens. Tokens of fresh prompts add to it: `max_cost` times
    their number, divided equally among the explorers. The tokens of the explorer are subtracted. For contrast that it
    yielded, the tokens are added that fresh prompts need for as much contrast. An explorer without credit is not
    chosen. The less contrast fresh prompts have, the smaller is the part of the explorer's tokens that is subtracted.

    Args:
        explorers (`Sequence[str]`):
            Names of the explorers.
        discount (`float`):
            Factor by which all sums are multiplied at the beginning of a generation batch, in (0, 1]. 1 forgets
            nothing.
        min_share (`float`):
            Probability that the choice for a prompt is a uniformly random explorer, in [0, 1].
        max_cost (`float`, *optional*):
            Share of the tokens of fresh prompts that is added to the credits of all explorers, at least 0. With 0, no
            explorer is chosen. `None`: no limit.
    """

    def __init__(
        self, explorers: Sequence[str], *, discount: float, min_share: float, max_cost: float | None = None
    ) -> None:
        self.explorers, self.discount, self.min_share, self.max_cost = tuple(explorers), discount, min_share, max_cost
        self.sums = {name: SourceSums() for name in (PLAIN, *self.explorers)}
        self.credit = dict.fromkeys(self.explorers, 0.0)  # tokens that each explorer may still use
        self.fresh_with_contrast = 0.0  # discounted number of fresh prompts whose groups have contrast
        # Three numbers of prompts so far. `num_unsolved` counts all unsolved prompts, and `num_compared` the prompts
        # for which explorers were compared with fresh prompts, also if no explorer had credit. `num_preferred` counts
        # the prompts for which an explorer was then chosen.
        self.num_unsolved = self.num_compared = self.num_preferred = 0

    def begin_batch(self) -> None:
        """Discount all sums. Call it at the beginning of every generation batch."""
        for sums in self.sums.values():
            sums.contrast *= self.discount
            sums.tokens *= self.discount
            sums.prompts *= self.discount
        self.fresh_with_contrast *= self.discount

    def add(self, source: str, *, contrast: float, tokens: float, prompts: float) -> None:
        """Add the rows of some prompts to a source: the number of groups with contrast, of tokens and of prompts."""
        sums = self.sums[source]
        sums.contrast += contrast
        sums.tokens += tokens
        sums.prompts += prompts
        if self.max_cost is None:
            return
        share = self.max_cost / max(len(self.explorers), 1)
        for name in self.explorers:
            if source == PLAIN:
                self.credit[name] += share * tokens
            elif source == name:
                self.credit[name] -= self._cost(tokens, contrast=contrast)
            # Without this bound, an explorer could save credit over a long time, and later use all of it without
            # finding contrast.
            self.credit[name] = min(self.credit[name], share * self.sums[PLAIN].tokens)

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
        num_chosen = dict.fromkeys((PLAIN, *self.explorers), 0)
        chosen = []
        for names in possible:
            self.num_unsolved += 1
            explorers = [name for name in self.explorers if name in names]
            affordable = [name for name in explorers if self._is_affordable(name, num_chosen[name])]
            source = PLAIN
            if affordable and random.random() < self.min_share:
                source = random.choice(affordable)
            elif explorers:
                source = self._best(affordable, random)
                self.num_compared += 1
                self.num_preferred += source != PLAIN
            num_chosen[source] += 1
            chosen.append(source)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts, for a checkpoint."""
        saved = {name: [sums.contrast, sums.tokens, sums.prompts] for name, sums in self.sums.items()}
        counts = [self.num_unsolved, self.num_compared, self.num_preferred]
        return {
            "sums": saved,
            "counts": counts,
            "fresh_with_contrast": self.fresh_with_contrast,
            "credit": self.credit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. An explorer that is not in the checkpoint starts with empty sums."""
        for name, sums in self.sums.items():
            values = [*state["sums"].get(name, []), 0.0, 0.0, 0.0]  # older checkpoints have no `prompts`
            sums.contrast, sums.tokens, sums.prompts = values[:3]
        self.num_unsolved, self.num_compared, self.num_preferred = state["counts"]
        self.fresh_with_contrast = state.get("fresh_with_contrast", 0.0)
        for name in self.explorers:
            self.credit[name] = state.get("credit", {}).get(name, 0.0)

    def _cost(self, tokens: float, *, contrast: float) -> float:
        """Return by how much the credit of an explorer decreases for these tokens and this contrast."""
        # If fresh prompts have no contrast, tokens for tries are not missed, so they do not count. If they have one
        # group with contrast, half of the tokens count.
        plain = self.sums[PLAIN].contrast
        weight = plain / (1 + plain)
        return weight * tokens - contrast * self._prior_tokens()

    def _is_affordable(self, name: str, num_pending: int) -> bool:
        """Return whether an explorer has credit. It has `num_pending` further prompts in this batch, whose rows are
        not counted yet."""
        if self.max_cost is None:
            return True
        if not num_pending:
            return self.credit[name] > 0
        own, plain = self.sums[name], self.sums[PLAIN]
        # A pending prompt is expected to cost the explorer's mean number of tokens per prompt. If the explorer was not
        # used yet, use the mean of fresh prompts.
        seen = own if own.prompts else plain
        tokens = num_pending * seen.tokens / seen.prompts if seen.prompts else 0.0
        # Assume the explorer's contrast per token, but with the tokens of the prior added to its tokens. So an
        # explorer with few tokens counts as having little contrast.
        contrast = tokens * own.contrast / (own.tokens + self._prior_tokens())
        return self.credit[name] > self._cost(tokens, contrast=contrast)

    def _best(self, explorers: Sequence[str], random: Random) -> str:
        """Return the source with the largest sampled rate: one of these explorers, or `PLAIN`."""
        # The share is below 1, because the unsolved prompt itself is a fresh prompt without contrast.
        share = self.fresh_with_contrast / max(self.sums[PLAIN].prompts, 1.0)
        rates = {PLAIN: self._draw(PLAIN, random) / (1 - share)}
        for name in explorers:
            rates[name] = self._draw(name, random)
        return max(rates, key=rates.__getitem__)

    def _draw(self, source: str, random: Random) -> float:
        """Sample contrast per token from the posterior of a source."""
        sums = self.sums[source]
        # The prior counts as one group with contrast. Observed groups are added to the shape of the Gamma
        # distribution, and observed tokens to its inverse scale.
        return random.gammavariate(1.0 + sums.contrast, 1.0 / (self._prior_tokens() + sums.tokens))

    def _prior_tokens(self) -> float:
        """Return the number of tokens in which fresh prompts yield one group with contrast. If they have yielded less
        than one such group, return the number of all their tokens."""
        plain = self.sums[PLAIN]
        return max(plain.tokens, 1.0) / max(plain.contrast, 1.0)

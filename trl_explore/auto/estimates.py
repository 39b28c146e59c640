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
    of it hardly improves the update, but the tokens are missing for later updates.

    Tries have a limit. The debt of an explorer is the contrast that fresh prompts would have yielded for its tokens,
    minus the contrast that it yielded. All explorers together may have a debt of `max_cost` times the contrast of
    `PLAIN`, each an equal share of it. An explorer with a larger debt is not chosen. The sums are discounted, so it
    is tried again later.

    Args:
        explorers (`Sequence[str]`):
            Names of the explorers.
        discount (`float`):
            Factor by which all sums are multiplied at the beginning of a generation batch, in (0, 1]. 1 forgets
            nothing.
        min_share (`float`):
            Probability that the choice for a prompt is a uniformly random explorer, in [0, 1].
        max_cost (`float`, *optional*):
            Limit of the debts of all explorers together, as a share of the contrast of `PLAIN`, at least 0. `None`: no
            limit.
    """

    def __init__(
        self, explorers: Sequence[str], *, discount: float, min_share: float, max_cost: float | None = None
    ) -> None:
        self.explorers, self.discount, self.min_share, self.max_cost = tuple(explorers), discount, min_share, max_cost
        self.sums = {name: SourceSums() for name in (PLAIN, *self.explorers)}
        self.fresh_with_contrast = 0.0  # discounted number of fresh prompts whose groups have contrast
        # Three numbers of prompts so far. `num_unsolved` counts all unsolved prompts, and `num_compared` the prompts
        # for which explorers were compared with fresh prompts. `num_preferred` counts the prompts for which an
        # explorer was then chosen.
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

    def rate(self, source: str) -> float | None:
        """Return groups with contrast per token. None if the source was never used."""
        sums = self.sums[source]
        if not sums.tokens:
            return None
        return sums.contrast / sums.tokens

    def debt(self, name: str) -> float:
        """Return the contrast that fresh prompts would have yielded for the tokens of an explorer, minus the contrast
        that it yielded."""
        plain, own = self.sums[PLAIN], self.sums[name]
        return plain.contrast / max(plain.tokens, 1.0) * own.tokens - own.contrast

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
        return {"sums": saved, "counts": counts, "fresh_with_contrast": self.fresh_with_contrast}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint. An explorer that is not in the checkpoint starts with empty sums."""
        for name, sums in self.sums.items():
            values = [*state["sums"].get(name, []), 0.0, 0.0, 0.0]  # older checkpoints have no `prompts`
            sums.contrast, sums.tokens, sums.prompts = values[:3]
        self.num_unsolved, self.num_compared, self.num_preferred = state["counts"]
        self.fresh_with_contrast = state.get("fresh_with_contrast", 0.0)

    def _is_affordable(self, name: str, num_pending: int) -> bool:
        """Return whether the debt of an explorer is within its share of the limit. It has `num_pending` further
        prompts in this batch, whose rows are not counted yet."""
        if self.max_cost is None:
            return True
        plain, own = self.sums[PLAIN], self.sums[name]
        plain_rate = plain.contrast / max(plain.tokens, 1.0)
        # Assume as many tokens for a pending prompt as for earlier prompts of this explorer. Without such prompts,
        # assume as many as for a fresh prompt.
        seen = own if own.prompts else plain
        pending_tokens = num_pending * seen.tokens / max(seen.prompts, 1.0)
        # Assume a low rate, as if the explorer had also sampled the tokens of the prior without any contrast.
        low_rate = own.contrast / (own.tokens + self._prior_tokens())
        debt = self.debt(name) + pending_tokens * (plain_rate - low_rate)
        return debt <= self.max_cost * plain.contrast / len(self.explorers)

    def _best(self, explorers: Sequence[str], random: Random) -> str:
        """Return the source with the largest sampled rate: one of these explorers, or `PLAIN`."""
        share = self.fresh_with_contrast / max(self.sums[PLAIN].prompts, 1.0)
        if share >= 1:
            return PLAIN
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

"""How often each prompt of the data is solved, as the run goes on."""

from collections.abc import Iterable

NEWEST = 0.5  # weight of the newest group in a prompt's rate: the policy that sampled the older ones is gone
FORGOTTEN = 0.9  # what is left of a rate each time its prompt is passed over, so that it comes back to be tried again


class SuccessRates:
    """Running success rates by place in the data."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def note(self, found: Iterable[tuple[int, float]]) -> None:
        """Share of a group's completions that succeeded, by place."""
        for place, rate in found:
            before = self.rates.get(place, rate)
            self.rates[place] = before + NEWEST * (rate - before)

    def passes_over(self, place: int, threshold: float) -> bool:
        """Whether a prompt's rate is over the threshold; it is a little lower the next time."""
        over = self.rates.get(place, 0.0) > threshold
        if over:
            self.rates[place] *= FORGOTTEN
        return over

"""Success rates of the prompts of the data during a run."""

from collections.abc import Iterable

NEWEST = 0.5  # weight of the newest group in a prompt's rate; an older policy sampled the earlier groups
FORGOTTEN = 0.9  # factor of a rate each time its prompt is skipped, so that the prompt is tried again later


class SuccessRates:
    """Moving average of each prompt's success rate, by place (row number) in the data."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def note(self, found: Iterable[tuple[int, float]]) -> None:
        """Update the rates. `found` are places and the shares of their newest completions that succeeded."""
        for place, rate in found:
            before = self.rates.get(place, rate)
            self.rates[place] = before + NEWEST * (rate - before)

    def passes_over(self, place: int, threshold: float) -> bool:
        """Return whether to skip a prompt, because its rate exceeds the threshold. If so, reduce the rate by 10 %."""
        over = self.rates.get(place, 0.0) > threshold
        if over:
            self.rates[place] *= FORGOTTEN
        return over

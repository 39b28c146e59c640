"""The interface of an explorer that samples the turns of an agent in its own way."""

from typing import Any

from trl_explore.explorers.explorer import Explorer, PlainSampling
from trl_explore.rows.rollouts import Rollout


class TurnExplorer(Explorer):
    """
    Base class of explorers that sample the turns of an agent, instead of whole completions.

    TRL's tool loop calls the tools and asks for the next turn. `credit` gets all completions of the batch, with
    rewards.
    """

    def sample_turn(self, contexts: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling) -> Rollout:
        """
        Sample the next turn of the rows that are in the tool loop.

        Args:
            contexts (`list[list[int]]`):
                Tokens of each of these rows so far.
            examples (`list[dict]`):
                Rows of the data set for all main rows of this process, `[B]`.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: it returns one turn for each list of tokens.

        Returns:
            [`Rollout`]: One turn for each context.
        """
        raise NotImplementedError

    def columns_of(self, group: int) -> dict[str, list[Any]]:
        """Return the columns of the completions table for the rows of one prompt, given by its number."""
        return {}

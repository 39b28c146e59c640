"""Embedded task for search agents: multi-hop questions, with a search engine as TRL's `environment_factory`.

`z.dm?` asks for the mother (m) of the director (d) of z. A turn is one search, `!find:q=zd`. The search engine returns
two passages, `zd=q;xd=e`; the second is about something similar. The turn `=n` is the answer. The demonstrations
search well, but often end with a wrong answer. The probability of a right answer depends on the last relation.
"""

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from datasets import Dataset

from trl_explore.agents.snapshots import not_a_tool
from trl_explore.rewards.answers import completion_text
from trl_explore.tasks.held_out import HeldOutTask, as_prompts, is_held_out
from trl_explore.tasks.multihop_world import (
    LAST_RELATIONS,
    MAX_HOPS,
    PASSAGES,
    draw_question,
    puzzle,
    retrieve,
    split_question,
)
from trl_explore.tasks.tiny_model import ASSISTANT, EOS, MAX_LENGTH, USER

ANSWER_MARK = "="
SEPARATOR = ";"
ANSWER = re.compile(rf"{ANSWER_MARK}[a-z]")
FAULTS = ("early_stop", "guess", "distractor")


class SearchState(NamedTuple):
    """State of an episode. Question and seed determine its world."""

    question: str
    seed: int
    searches: int


class MultiHopSearch:
    """
    Environment with a search engine over the world of one question. It does not know the answer and gives no reward.

    Args:
        task ([`MultiHopTask`]):
            The task.
    """

    state: SearchState

    def __init__(self, task: "MultiHopTask") -> None:
        self.max_searches = task.max_searches

    def __deepcopy__(self, memo: dict) -> "MultiHopSearch":
        # All attributes are immutable, so a shallow copy is independent. Tree methods copy after every turn.
        return copy.copy(self)

    def reset(self, question: str, seed: int, **columns: Any) -> None:
        """Start an episode. TRL passes the columns of a row. Return nothing, because the prompt has the question."""
        self.state = SearchState(question, seed, 0)

    def find(self, q: str) -> str:
        """
        Searches for a fact.

        Args:
            q: A name and the letter of a relation, for example "zd".

        Returns:
            The best passages.
        """
        question, seed, searches = self.state
        if searches >= self.max_searches:
            return "no more"
        self.state = SearchState(question, seed, searches + 1)
        facts = puzzle(question, seed).facts
        return SEPARATOR.join(f"{key}={facts[key]}" for key in retrieve(facts, str(q))) or "nothing"

    @not_a_tool
    def snapshot(self) -> SearchState:
        """Return the state, which is immutable, so that several environments may continue from it."""
        return self.state

    @not_a_tool
    def restore(self, state: SearchState) -> None:
        """Continue from a snapshot of this or another environment."""
        self.state = state


@dataclass(frozen=True, kw_only=True)
class MultiHopTask(HeldOutTask):
    """
    Task of multi-hop questions for agents, a [`TeachableTask`] whose answers have several turns.

    Args:
        name (`str`):
            Name of the task.
        warm_start_steps (`int`):
            Supervised steps until a tiny model has converged.
        hops (`tuple[int, ...]`, *optional*, defaults to `(2, 3, 4)`):
            Numbers of look-ups, which are equally likely.
        max_searches (`int`, *optional*, defaults to `5`):
            Maximum number of searches per episode, and the trainer's `max_tool_calling_iterations`.
        right_probabilities (`tuple[float, ...]`, *optional*):
            Probabilities of a right answer in the demonstrations. The last relations take them one after the other.
        fault_weights (`tuple[float, float, float]`, *optional*):
            Weights of the wrong endings: the answer is the last entity but one, a guess without the last search, or
            the entity in the wrong passage of the last search.
        redundant_share (`float`, *optional*, defaults to `0.25`):
            Share of right demonstrations that repeat the last search.
        format_penalty (`float`, *optional*, defaults to `0.0`):
            Penalty for a trajectory without a search or an answer; its reward is minus this number.
        table_seed (`int`, *optional*, defaults to `1234`):
            Seed of the order in which the last relations take the probabilities.
    """

    name: str
    warm_start_steps: int
    hops: tuple[int, ...] = (2, 3, 4)
    max_searches: int = 5
    right_probabilities: tuple[float, ...] = (0.95, 0.75, 0.5, 0.2)
    fault_weights: tuple[float, float, float] = (0.4, 0.3, 0.3)
    redundant_share: float = 0.25
    format_penalty: float = 0.0
    table_seed: int = 1234
    tools: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not self.hops or not set(self.hops) <= set(range(2, MAX_HOPS + 1)):
            raise ValueError(f"`hops` is {self.hops}; give numbers of look-ups from 2 to {MAX_HOPS}.")
        if self.max_searches < max(self.hops):
            raise ValueError(f"`max_searches` is {self.max_searches}; `hops` needs at least {max(self.hops)}.")
        longest = self.max_prompt_length + self.max_completion_length
        if longest > MAX_LENGTH:
            raise ValueError(
                f"`max_searches` is {self.max_searches}, which takes {longest} of {MAX_LENGTH} tokens; give fewer."
            )
        if not self.right_probabilities or not all(0 <= p <= 1 for p in self.right_probabilities):
            raise ValueError(f"`right_probabilities` is {self.right_probabilities}; give probabilities in [0, 1].")
        if len(self.fault_weights) != len(FAULTS) or min(self.fault_weights) < 0 or not any(self.fault_weights):
            raise ValueError(f"`fault_weights` is {self.fault_weights}; give {len(FAULTS)} weights, not all 0.")
        if not 0 <= self.redundant_share <= 1:
            raise ValueError(f"`redundant_share` is {self.redundant_share}; give a share between 0 and 1.")
        if self.redundant_share and self.max_searches == max(self.hops):
            raise ValueError(
                f"`redundant_share` is {self.redundant_share}, but `max_searches` leaves no search to spare; "
                f"give 0, or `max_searches={max(self.hops) + 1}`."
            )
        if self.format_penalty < 0:
            raise ValueError(f"`format_penalty` is {self.format_penalty}; give a penalty of at least 0.")

    @property
    def environment_factory(self) -> Callable[[], MultiHopSearch]:
        return lambda: MultiHopSearch(self)

    @property
    def options(self) -> dict[str, Any]:
        return {"max_tool_calling_iterations": self.max_searches}

    @property
    def max_prompt_length(self) -> int:
        return len("z.?") + max(self.hops) + len([USER, ASSISTANT])

    @property
    def max_completion_length(self) -> int:
        # A call, its passages, the marks of the two turns and the end of sequence.
        turn = len(_call("zd") + SEPARATOR.join(["zd=q"] * PASSAGES)) + 3
        return self.max_searches * turn + len(ANSWER_MARK + "q") + 1

    @cached_property
    def habits(self) -> dict[str, float]:
        """Probability that a demonstration gives the right answer, by the last relation."""
        relations = random.Random(f"habits/{self.table_seed}").sample(LAST_RELATIONS, len(LAST_RELATIONS))
        return dict(zip(relations, itertools.cycle(self.right_probabilities), strict=False))

    def accuracy_reward(self, completions: list, answer: list[str], **columns: Any) -> list[float]:
        """Return 1 for a right answer, 0 for a wrong answer, and minus `format_penalty` without search or answer."""
        return [self._score(messages, right) for messages, right in zip(completions, answer, strict=True)]

    def _score(self, messages: list[dict[str, Any]], right: str) -> float:
        given = final_answer(messages)
        if given is None or without_search(messages):
            return 0.0 - self.format_penalty  # not `-self.format_penalty`, which would log a reward of -0.0
        return float(given == right)

    def sample_problem(self, rng: random.Random) -> str:
        return next(question for question in self._draws(rng) if not is_held_out(question))

    def demonstration(self, prompt: str, rng: random.Random) -> str:
        return self.demonstrate(prompt, rng.getrandbits(32), rng)

    def demonstrate(self, question: str, seed: int, rng: random.Random) -> str:
        """Sample a trajectory in the world of a seed, with the marks of the chat template between its turns."""
        search, turns, shown = MultiHopSearch(self), "", ""
        search.reset(question, seed)
        name, path = split_question(question)
        right = rng.random() < self.habits[path[-1]]
        fault = None
        if not right:
            fault = rng.choices(FAULTS, self.fault_weights)[0]
        # The right queries. `chain` also has the answer, which is not queried, so it is longer than `path`.
        queries = [entity + relation for entity, relation in zip(puzzle(question, seed).chain, path, strict=False)]
        if fault in ("early_stop", "guess"):
            queries.pop()
        elif right and rng.random() < self.redundant_share:
            queries.append(queries[-1])
        for query in queries:
            shown = search.find(query)
            turns += f"{_call(query)}{EOS}{USER}{shown}{ASSISTANT}"
        # Each passage ends with an entity, and the first passage is the right one. Without the last search, its entity
        # is the last but one of the chain, so it is the answer of an "early_stop".
        best, second = shown.split(SEPARATOR)
        answer = best[-1]
        if fault in ("guess", "distractor"):
            answer = second[-1]
        return turns + ANSWER_MARK + answer

    def verdict(self, question: str, seed: int, queries: list[str], answer: str | None) -> str:
        """
        Classify a trajectory by its searches and its answer.

        Args:
            question (`str`):
                The question.
            seed (`int`):
                Seed of its world.
            queries (`list[str]`):
                Queries of the searches.
            answer (`str`, *optional*):
                The answer, or None if there is none.

        Returns:
            `str`: `"malformed"` (no search or no answer), `"right"`, `"strayed"` (a wrong search before the last
            look-up), one of the `FAULTS`, or `"other"`.
        """
        facts, chain = puzzle(question, seed)
        _, path = split_question(question)
        *early, last = [name + relation for name, relation in zip(chain, path, strict=False)]  # the right queries
        if not queries or not answer:
            return "malformed"
        if answer == chain[-1]:
            return "right"
        if queries[: len(early)] != early:
            return "strayed"
        if len(queries) == len(early):
            return "early_stop" if answer == chain[-2] else "guess"
        if last in queries and answer == facts[retrieve(facts, last)[1]]:
            return "distractor"
        return "other"

    def _draws(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield draw_question(rng, rng.choice(self.hops))

    def _dataset(self, num_examples: int, rng: random.Random, *, held_out: bool) -> Dataset:
        fitting = (question for question in self._draws(rng) if is_held_out(question) == held_out)
        questions = list(itertools.islice(fitting, num_examples))
        # A question may occur several times: each row has a seed, and so its own world and answer.
        seeds = [rng.getrandbits(32) for _ in questions]
        answers = [puzzle(question, seed).chain[-1] for question, seed in zip(questions, seeds, strict=True)]
        columns = {"prompt": as_prompts(questions), "question": questions, "seed": seeds, "answer": answers}
        return Dataset.from_dict(columns)


def final_answer(completion: str | list[dict[str, Any]]) -> str | None:
    """Return the answer at the end of a trajectory, without its mark, or None if the last turn is not an answer."""
    text = completion_text(completion)
    if ANSWER.fullmatch(text):
        return text.removeprefix(ANSWER_MARK)
    return None


def without_search(completion: str | list[dict[str, Any]]) -> bool:
    """Return whether a trajectory contains no search."""
    return isinstance(completion, str) or all(message["role"] != "tool" for message in completion)


def _call(query: str) -> str:
    return f"!find:q={query}"


MULTI_HOP = MultiHopTask(name="multi_hop", warm_start_steps=700)

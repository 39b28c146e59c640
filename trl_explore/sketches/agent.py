"""SESA for agents: at every decision, actions are proposed one after another, each knowing those before it."""

import inspect
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from trl_explore.agents.turns import Turn, Turns
from trl_explore.explorers.explorer import PlainSampling
from trl_explore.rows.rollouts import Rollout
from trl_explore.sketches.actions import action_of, decision_blocks, share_out
from trl_explore.sketches.drafts import diversity, fill_prompt, first_distinct, newest_that_fit
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.weights import Drawn


class Proposal(NamedTuple):
    """A turn that a block of rows may take."""

    action: str
    token_ids: list[int]
    goes_on: bool
    context: list[int]


class Actions(Mode):
    """`mode="agent"`; section 3.1 of the paper. Rows before the same decision share out proposed actions."""

    def __init__(self, *args: Any, turns: Turns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns = turns
        self.max_drawn = self.args.branch_depth
        self._prompt_lengths: list[int] = []

    @property
    def turn(self) -> Turn:
        """The turn that is sampled."""
        assert self.turns.turn is not None
        return self.turns.turn

    name = "actions"

    def rollout(self, contexts: list[list[int]], plain: PlainSampling) -> Rollout:
        """Return a turn for each row that is in the tool loop, sampled behind `contexts`."""
        turn, args, size = self.turn, self.args, self.size
        if turn.number == 0:
            names = "tokens", "sampled_tokens", "drafting_seconds", "solving_seconds", "dropped", *diversity([])
            self.metrics = dict.fromkeys(names, 0.0)
            self.drawn = [[] for _ in contexts]
            self.columns = {"actions": ["" for _ in contexts]}
            self._prompt_lengths = [len(context) for context in contexts]
        start = time.perf_counter()
        branches = [row % size < self.num_explored and turn.number < args.branch_depth for row in turn.rows]
        blocks = decision_blocks([row // size for row in turn.rows], contexts, branches)
        with self.sample.rollout():
            proposed = self._propose(contexts, blocks)
        spoken: dict[int, list[int]] = {}
        for block, proposals in zip(blocks, proposed, strict=True):
            actions = {proposal.action: proposal for proposal in reversed(proposals)}  # the first of equal ones
            distinct = [actions[action] for action in first_distinct([p.action for p in proposals], len(block))]
            shares = share_out(len(block), [proposal.goes_on for proposal in distinct])
            for place, share in zip(block, shares, strict=True):
                spoken[place] = list(distinct[share].token_ids)
                self._note_action(turn.rows[place], distinct[share].action)
                if distinct[share].context != contexts[place]:
                    row = turn.rows[place]
                    offset = len(contexts[place]) - self._prompt_lengths[row]
                    self.drawn[row].append(Drawn(offset, distinct[share].context, distinct[share].token_ids))
        draft_seconds = time.perf_counter() - start

        start = time.perf_counter()
        scored: dict[int, list[float | None]] = {}  # what was proposed to a row was sampled behind other proposals
        rest = [place for place in range(len(contexts)) if place not in spoken]
        if rest:
            alone = plain([contexts[place] for place in rest])
            spoken |= dict(zip(rest, alone.completion_ids, strict=True))
            scored = dict(zip(rest, alone.logprobs or [], strict=False))
        own, num_tokens = self.metrics, sum(len(p.token_ids) for proposals in proposed for p in proposals)
        added = {
            "tokens": num_tokens,
            "sampled_tokens": num_tokens + sum(len(spoken[place]) for place in rest),
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            "dropped": 0,
            **diversity([[proposal.action for proposal in proposals] for proposals in proposed]),
        }
        self.metrics = {name: own[name] + value for name, value in added.items()}
        turns = [spoken[place] for place in range(len(contexts))]
        if self.policy.serving is None:
            return Rollout(turns)
        return Rollout(turns, [scored.get(place) or [None] * len(ids) for place, ids in enumerate(turns)])

    def group_counts(self, completion_ids: list[list[int]], successes: list[list[bool]]) -> dict[str, float]:
        rows = [tuple(ids) for ids in completion_ids]
        distinct = 0
        for start in range(0, len(rows), self.size):
            distinct += len(set(rows[start : start + self.size]))
        return {"trajectories": distinct}

    def _note_action(self, row: int, action: str) -> None:
        """The table tells a row's proposed actions, in the order in which it took them."""
        taken = self.columns["actions"]
        taken[row] = self.args.action_separator.join(filter(None, (taken[row], action)))

    def _propose(self, contexts: list[list[int]], blocks: list[list[int]]) -> list[list[Proposal]]:
        """Actions for every block of rows, with duplicates: the j-th ones are one call for all blocks."""
        proposed: list[list[Proposal]] = [[] for _ in blocks]
        for j in range(min(self.args.num_actions, max(map(len, blocks), default=0))):
            asked = [
                (block[0], proposals) for block, proposals in zip(blocks, proposed, strict=True) if j < len(block)
            ]
            prefixes = [self._ask_for_another(place, contexts[place], proposals) for place, proposals in asked]
            room = [
                int(max(1, min(self.turn.budgets[place], self.context_length - len(ids))))
                for (place, _), ids in zip(asked, prefixes, strict=True)
            ]
            # Other processes are at other turns: their tool loops are theirs.
            sampled = self.sample(prefixes, 1, room, main_stream=True, collective=False)
            for (place, proposals), context, (continuation,) in zip(asked, prefixes, sampled, strict=True):
                ids = continuation.token_ids
                message = self.turns.parse_turn(self.turn.rows[place], contexts[place], ids)
                proposals.append(Proposal(action_of(message), ids, bool(message.get("tool_calls")), context))
        return proposed

    def _ask_for_another(self, place: int, context: list[int], proposals: list[Proposal]) -> list[int]:
        """The context with a last message that shows what was proposed, as far as there is room."""
        turn, args = self.turn, self.args

        def shown(actions: Sequence[str]) -> list[int]:
            slots = {"actions": args.action_separator.join(actions)}
            messages = fill_prompt(turn.last_messages[place], args.action_template, slots)
            if turn.number == 0:
                return self.turns.encode_conversation(turn.rows[place], messages)
            return context[: turn.shown[place]] + self.turns.world.encode_answers(messages)

        actions = first_distinct([proposal.action for proposal in proposals if proposal.action], len(proposals))
        longest = max((len(proposal.token_ids) for proposal in proposals), default=1)  # the next one may be as long
        kept = newest_that_fit(actions, lambda some: len(shown(some)) + longest <= self.context_length)
        self.metrics["dropped"] += len(actions) - len(kept)
        return shown(kept) if kept else context


def check_actions(tools: list[Any], where: str) -> None:
    """Actions are tool calls: ValueError, saying `where`, if all calls are equal, or there is no tool."""
    if len(tools) > 1 or any(inspect.signature(tool).parameters for tool in tools):
        return
    found = f"only {tools[0].__name__!r}, without parameters" if tools else "none"
    raise ValueError(
        f"`mode='agent'` proposes different tool calls, but `environment_factory{where}` makes environments whose "
        f"actions cannot be told apart: of public methods beside `reset` and `get_reward` there is {found}. Give the "
        "environment a second tool or a parameter."
    )

"""SESA for agents: at a decision, the policy proposes actions one after another. Each request for an action shows the
earlier ones and asks for a different one."""

import inspect
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from trl_explore.agents.turns import Turn, Turns
from trl_explore.explorers.explorer import PlainSampling
from trl_explore.explorers.turn_explorer import TurnExplorer
from trl_explore.rows.rollouts import Rollout
from trl_explore.sketches.actions import action_of, decision_blocks, share_out
from trl_explore.sketches.drafts import diversity, fill_prompt, first_distinct, newest_that_fit
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.weights import Drawn


class Proposal(NamedTuple):
    """A proposed turn of the assistant. One or several rows of a block take it."""

    action: str  # text of the tool calls, or the final answer
    token_ids: list[int]  # tokens of the turn
    goes_on: bool  # True if the turn calls a tool, so that the episode continues
    context: list[int]  # tokens from which the turn was sampled


class Actions(Mode, TurnExplorer):
    """
    SESA's `mode="agent"`, after section 3.1 of the paper. It chooses turns of an agent, not whole completions.

    Rows of a group with the same tokens so far are a block: they are at the same decision. The policy proposes actions
    for the block one after another, and the rows of the block share the different actions among them.
    """

    name = "actions"
    plain_columns = {"actions": ""}

    def __init__(self, *args: Any, turns: Turns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns = turns
        self.max_drawn = self.args.branch_depth
        self._prompt_lengths: list[int] = []

    @property
    def turn(self) -> Turn:
        """The current turn of the tool loop."""
        assert self.turns.turn is not None
        return self.turns.turn

    def sample_turn(self, contexts: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling) -> Rollout:
        turn, args, size = self.turn, self.args, self.size
        if turn.number == 0:
            self._begin_batch(contexts)
            self._examples = examples[::size]  # one per group
        # Below, a place is an index into `contexts`, and a row is an index into the batch.
        start = time.perf_counter()
        groups, explores = [], []
        for row in turn.rows:
            groups.append(row // size)
            explores.append(row % size < self.num_explored and turn.number < args.branch_depth)
        blocks = decision_blocks(groups, contexts, explores)
        with self.sample.rollout():
            proposed = self._propose(contexts, blocks)
        turn_ids: dict[int, list[int]] = {}  # tokens of the new turn, by place
        for block, proposals in zip(blocks, proposed, strict=True):
            for place, proposal in zip(block, self._shared_out(proposals, len(block)), strict=True):
                row = turn.rows[place]
                turn_ids[place] = list(proposal.token_ids)
                self._note_action(row, proposal.action)
                # The first proposal of a block is sampled from the row's own context, so it needs no entry.
                if proposal.context != contexts[place]:
                    offset = len(contexts[place]) - self._prompt_lengths[row]
                    self.drawn[row].append(Drawn(offset, proposal.context, proposal.token_ids))
        draft_seconds = time.perf_counter() - start

        # Rows outside blocks get a plain turn. Keep log-probabilities of plain turns only, because most proposed turns
        # were sampled from another context than the row's.
        start = time.perf_counter()
        logprobs: dict[int, list[float | None]] = {}  # by place
        rest = [place for place in range(len(contexts)) if place not in turn_ids]
        num_plain_tokens = 0
        if rest:
            sampled = plain([contexts[place] for place in rest])
            num_plain_tokens = sum(map(len, sampled.completion_ids))
            turn_ids |= dict(zip(rest, sampled.completion_ids, strict=True))
            logprobs = dict(zip(rest, sampled.logprobs or [], strict=False))
        num_proposed_tokens = 0
        actions: list[list[str]] = []  # of each block
        for proposals in proposed:
            actions.append([])
            for proposal in proposals:
                num_proposed_tokens += len(proposal.token_ids)
                actions[-1].append(proposal.action)
        added = {
            "tokens": num_proposed_tokens,
            "sampled_tokens": num_proposed_tokens + num_plain_tokens,
            "drafting_seconds": draft_seconds,
            "solving_seconds": time.perf_counter() - start,
            **diversity(actions),
        }
        for name, value in added.items():  # all metrics except `dropped`, which `_ask_for_another` counts
            self.metrics[name] += value
        turns = [turn_ids[place] for place in range(len(contexts))]
        if self.policy.serving is None:
            return Rollout(turns)
        all_logprobs: list[list[float | None]] = []
        for place, ids in enumerate(turns):
            all_logprobs.append(logprobs.get(place) or [None] * len(ids))
        return Rollout(turns, all_logprobs)

    def _begin_batch(self, contexts: list[list[int]]) -> None:
        """Reset metrics, columns and `drawn` at the first turn of a batch. `contexts` are the prompts of all rows."""
        names = ("tokens", "sampled_tokens", "drafting_seconds", "solving_seconds", "dropped")
        self.metrics = dict.fromkeys(names, 0.0) | diversity([])
        self.drawn = [[] for _ in contexts]
        self.columns = {"actions": [""] * len(contexts)}
        self._prompt_lengths = list(map(len, contexts))

    def _shared_out(self, proposals: list[Proposal], num_rows: int) -> list[Proposal]:
        """Return the proposal that each row of a block takes. If proposals have equal actions, use only the first."""
        by_action: dict[str, Proposal] = {}
        for proposal in proposals:
            by_action.setdefault(proposal.action, proposal)
        distinct = list(by_action.values())[:num_rows]
        shares = share_out(num_rows, [proposal.goes_on for proposal in distinct])
        return [distinct[share] for share in shares]

    def group_counts(self, completion_ids: list[list[int]], successes: list[list[bool]]) -> dict[str, float]:
        rows = list(map(tuple, completion_ids))
        distinct = 0
        for start in range(0, len(rows), self.size):
            distinct += len(set(rows[start : start + self.size]))
        return {"trajectories": distinct}

    def _note_action(self, row: int, action: str) -> None:
        """Append an action that a row takes to its cell in the completions table."""
        taken = self.columns["actions"]
        taken[row] = self.args.action_separator.join(filter(None, (taken[row], action)))

    def _propose(self, contexts: list[list[int]], blocks: list[list[int]]) -> list[list[Proposal]]:
        """Sample proposals for every block. Their actions may repeat. One sampling call samples the j-th proposals of
        all blocks. A block gets `num_actions` proposals, but not more than it has rows."""
        proposed: list[list[Proposal]] = [[] for _ in blocks]
        for j in range(min(self.args.num_actions, max(map(len, blocks), default=0))):
            numbers: list[int] = []  # blocks that get another proposal
            prefixes, budgets = [], []
            for number, block in enumerate(blocks):
                if j >= len(block):
                    continue
                place = block[0]  # all rows of a block have the same context
                prefix = self._ask_for_another(place, contexts[place], proposed[number])
                numbers.append(number)
                prefixes.append(prefix)
                budget = min(self.turn.budgets[place], self.context_length - len(prefix))
                budgets.append(int(max(1, budget)))  # every call must sample at least one token
            # Each process has its own tool loop and number of turns, so this call cannot be collective.
            sampled = self.sample(prefixes, 1, budgets, main_stream=True, collective=False)
            for number, prefix, (continuation,) in zip(numbers, prefixes, sampled, strict=True):
                place, ids = blocks[number][0], continuation.token_ids
                message = self.turns.parse_turn(self.turn.rows[place], contexts[place], ids)
                calls_tool = bool(message.get("tool_calls"))
                proposed[number].append(Proposal(action_of(message), ids, goes_on=calls_tool, context=prefix))
        return proposed

    def _ask_for_another(self, place: int, context: list[int], proposals: list[Proposal]) -> list[int]:
        """Return the context with a last message that shows the earlier proposals and asks for another. If there is no
        room for all proposals, the message shows the newest ones. If there are none to show, return `context`
        itself."""
        actions = first_distinct([proposal.action for proposal in proposals if proposal.action], len(proposals))
        longest = max((len(proposal.token_ids) for proposal in proposals), default=1)

        def fits(shown: Sequence[str]) -> bool:
            # Leave room for a turn as long as the longest proposal so far.
            return len(self._with_actions(place, context, shown)) + longest <= self.context_length

        kept = newest_that_fit(actions, fits)
        self.metrics["dropped"] += len(actions) - len(kept)
        if not kept:
            return context
        return self._with_actions(place, context, kept)

    def _with_actions(self, place: int, context: list[int], actions: Sequence[str]) -> list[int]:
        """Return the context with a last message that shows these actions."""
        turn = self.turn
        slots = {"actions": self.args.action_separator.join(actions)}
        messages = fill_prompt(turn.last_messages[place], self.args.action_template, slots)
        if turn.number == 0:
            return self.turns.encode_conversation(turn.rows[place], messages)
        return context[: turn.shown[place]] + self.turns.tool_loop.encode_answers(messages)


def check_actions(tools: list[Any], where: str) -> None:
    """Raise ValueError if agents cannot take different actions: there is no tool, or only one without parameters.
    `where` is the index into `environment_factory` as the message shows it, or `""` for a single factory."""
    if len(tools) > 1 or any(inspect.signature(tool).parameters for tool in tools):
        return
    found = "none"
    if tools:
        found = f"only {tools[0].__name__!r}, without parameters"
    raise ValueError(
        f"`mode='agent'` proposes different tool calls, but `environment_factory{where}` makes environments whose "
        f"actions cannot be told apart: of public methods beside `reset` and `get_reward` there is {found}. Give the "
        "environment a second tool or a parameter."
    )

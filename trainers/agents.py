"""TRL's tool loop, turn by turn: which rows speak, what they have seen, and whose environment has failed."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from trl.chat_template_utils import parse_response

from trl_explore.agents.environments import environment_error, guarded

from .base import ExplorationTrainer


@dataclass
class Turn:
    """
    One round of the tool loop.

    Args:
        number (`int`):
            0 for the first turn of the assistant.
        rows (`list[int]`):
            Rows of the batch that speak now, in the order in which they are sampled.
        said (`list[int]`):
            Tokens of prompt and completion of each of them before what its tools answered last; 0 in turn 0.
        budgets (`list[int]`):
            New tokens that each of them may still have, at least 1.
        last_messages (`list[list[dict]]`):
            What each of them was shown last: the whole prompt in turn 0, the answers of its tools later.
    """

    number: int
    rows: list[int]
    said: list[int]
    budgets: list[int]
    last_messages: list[list[dict[str, Any]]]


@dataclass
class ToolLoop:
    """What TRL's loop works on and changes in place, all `[B]`."""

    prompts: list[list[dict[str, Any]]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    num_messages: list[int] = field(default_factory=list)

    def advance(self) -> list[int]:
        """Rows with new messages: TRL takes back those of rows that may not go on."""
        before, self.num_messages = self.num_messages, [len(prompt) for prompt in self.prompts]
        return [row for row, (old, new) in enumerate(zip(before, self.num_messages, strict=True)) if new > old]


class AgentTrainer(ExplorationTrainer):
    """
    [`ExplorationTrainer`] that follows TRL's tool loop and survives environments that raise.

    In training, [`rollout`] is asked once per turn, for the rows that speak; `self.turn` describes it. A trajectory
    whose environment raised gets no further turn, and a reward of 0 from every reward function.
    """

    max_completion_length: int
    turn: Turn | None = None
    _loop: ToolLoop | None = None
    _asked: list = []
    _failed: list[bool] = []
    _any_failed = False  # on some process

    def prepare_environments(self, environment_factory: Any) -> Any:
        if isinstance(environment_factory, dict):
            return {name: guarded(factory) for name, factory in environment_factory.items()}
        return None if environment_factory is None else guarded(environment_factory)

    def _generate(self, prompts):
        if self._partial is not None or not self.tools:
            return super()._generate(prompts)
        self._asked, self._loop = prompts, None
        try:
            result = super()._generate(prompts)
        finally:
            self._loop = self.turn = None
            self._asked = []
        self._failed = self._failures()
        self._any_failed = self.summed({"failed": sum(self._failed)})["failed"] > 0
        return result

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, *args):
        self._loop = ToolLoop(prompts, prompt_ids, completion_ids, [len(prompt) for prompt in prompts])
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, *args)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        arguments = images, multimodal_fields, num_generations, has_tool_images
        if not self.tools or self._partial is not None or not self._asked:
            return super()._generate_single_turn(prompt_ids, *arguments)
        if self._loop is None:
            # Every row needs a completion: one whose `reset` failed ends after its first turn.
            budgets = [self.max_completion_length] * len(prompt_ids)
            self.turn = Turn(0, list(range(len(prompt_ids))), [0] * len(prompt_ids), budgets, self._asked)
            return super()._generate_single_turn(prompt_ids, *arguments)

        rows, loop = self._loop.advance(), self._loop
        alive = [place for place, row in enumerate(rows) if not self._has_failed(row)]
        completion_ids: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        if not alive:
            return completion_ids, logprobs
        said = [len(loop.prompt_ids[row]) + len(loop.completion_ids[row]) for row in rows]
        used = [len(ids) - len(loop.prompt_ids[row]) for ids, row in zip(prompt_ids, rows, strict=True)]
        self.turn = Turn(
            number=(self.turn.number if self.turn else 0) + 1,
            rows=[rows[place] for place in alive],
            said=[said[place] for place in alive],
            budgets=[max(1, self.max_completion_length - used[place]) for place in alive],
            last_messages=[_trailing_tool_messages(loop.prompts[rows[place]]) for place in alive],
        )
        contexts = [prompt_ids[place] for place in alive]
        with self.budgeted(contexts, self.turn.budgets):
            spoken, spoken_logprobs = super()._generate_single_turn(contexts, *arguments)
        for i, place in enumerate(alive):
            completion_ids[place] = spoken[i]
            if spoken_logprobs is not None:
                logprobs[place] = spoken_logprobs[i]
        return completion_ids, None if spoken_logprobs is None else logprobs

    def _has_failed(self, row: int) -> bool:
        return self.environments is not None and environment_error(self.environments[row]) is not None

    def _main_rewards(self):
        known = super()._main_rewards()
        if self._partial is not None or not self._any_failed:
            return known
        rewards: list[list[float] | None] = list(known) if known is not None else [None] * len(self._failed)
        for row, failed in enumerate(self._failed):
            if failed:
                rewards[row] = [0.0] * len(self.reward_funcs)
        return rewards

    def _void_rewards(self, rewards):
        if not self.environments:
            return rewards
        # `get_reward` may have failed only now.
        failed = gather(torch.tensor(self._failures(), device=rewards.device))
        self._metrics["train" if self._is_training else "eval"]["agent/environment_errors"].append(failed.sum().item())
        return rewards.masked_fill(failed.unsqueeze(1), 0.0)

    def _failures(self) -> list[bool]:
        """Whether the environment of each row has raised, `[B]`; warns if one has."""
        environments: list[Any] = self.environments or []
        errors = [environment_error(environment) for environment in environments]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            warnings.warn(
                f"an environment raised {type(error).__name__}: {error}. Its trajectory ended with reward 0, and so "
                "will others; `agent/environment_errors` counts them. A tool that wants to tell the model something "
                "should return it.",
                stacklevel=2,
            )
        return [error is not None for error in errors]

    def parse_turn(self, row: int, context: list[int], token_ids: list[int]) -> dict[str, Any]:
        """
        The message that TRL makes of a turn.

        Args:
            row (`int`):
                Row of the batch.
            context (`list[int]`):
                Tokens before the turn.
            token_ids (`list[int]`):
                Tokens of the turn.

        Returns:
            `dict`: Message of the assistant, with `tool_calls` where there are any.
        """
        return parse_response(self._tokenizer, token_ids, prefix=context, tools=self._tools_of(row))

    def encode_conversation(self, row: int, conversation: list[dict[str, Any]]) -> list[int]:
        """
        Tokens of a conversation with the tools of a row's environment.

        Args:
            row (`int`):
                Row of the batch.
            conversation (`list[dict]`):
                Messages.

        Returns:
            `list[int]`: Tokens, the generation prompt included.
        """
        if self.environment_factories is None:
            return self.encode_prompts([conversation])[0]
        names = self._batch_environments
        self._batch_environments = [names[row]]
        try:
            return self.encode_prompts([conversation])[0]
        finally:
            self._batch_environments = names

    def encode_tool_answers(self, messages: list[dict[str, Any]]) -> list[int]:
        """
        Tokens that stand between two turns of the assistant.

        Args:
            messages (`list[dict]`):
                What the tools answered.

        Returns:
            `list[int]`: Tokens, the generation prompt included.
        """
        return self._get_tool_suffix_ids(messages)

    @property
    def environment_tools(self) -> dict[Any, list[Any]]:
        """Tools that each environment offers, by its name; `None` for the only one."""
        return self._env_tools if self.environment_factories is not None else {}

    def _tools_of(self, row: int) -> list[Any]:
        return self.tools if self.environment_factories is None else self._env_tools[self._batch_environments[row]]


def _trailing_tool_messages(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = len(conversation)
    while first and conversation[first - 1]["role"] == "tool":
        first -= 1
    return conversation[first:]

"""The explorer `"replay"`: stored successes of a prompt replace rows of a failed group of the same prompt."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_explore.auto.joined import joined_advantages
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.rewards.success import succeeded
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.scorer import Scorer

if TYPE_CHECKING:
    from trl_explore.forks.engine import Forks
    from trl_explore.trainers.config import ExplorationConfig
    from trl_explore.trainers.explorer_configs import ReplayConfig

Prompt = tuple[int, ...]  # tokens of a prompt
Stored = tuple[list[int], list[float]]  # tokens of a completion, and their log-probabilities when it was sampled


class SuccessStore:
    """
    Keeps successful completions of prompts.

    Args:
        size (`int`):
            Largest number of completions. If there are more, remove the oldest completions of the prompt that has got
            no new completion for the longest time.
        per_prompt (`int`):
            Largest number of completions of a prompt. If there are more, the newest are kept.
    """

    def __init__(self, *, size: int, per_prompt: int) -> None:
        self.size, self.per_prompt = size, per_prompt
        self.stored: dict[Prompt, list[Stored]] = {}  # the prompt that got a completion last is the last key

    def __len__(self) -> int:
        return sum(map(len, self.stored.values()))

    def has(self, prompt: Prompt, token_ids: list[int]) -> bool:
        """Return whether a completion of a prompt is stored."""
        return any(ids == token_ids for ids, _ in self.stored.get(prompt, []))

    def add(self, prompt: Prompt, token_ids: list[int], logprobs: list[float]) -> None:
        """Store a completion. Do nothing if it is stored already."""
        if self.has(prompt, token_ids):
            return
        kept = [*self.stored.pop(prompt, []), (token_ids, logprobs)]
        self.stored[prompt] = kept[-self.per_prompt :]
        while len(self) > self.size:
            oldest = next(iter(self.stored))
            self.stored[oldest].pop(0)
            if not self.stored[oldest]:
                del self.stored[oldest]

    def newest(self, prompt: Prompt, number: int, *, longest: int) -> list[Stored]:
        """Return the newest completions of a prompt, the newest first: at most `number` completions, each with at most
        `longest` tokens."""
        fitting = [stored for stored in self.stored.get(prompt, []) if len(stored[0]) <= longest]
        return fitting[::-1][:number]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the stored completions, for a checkpoint. They are a few long tensors, because writing and reading
        millions of Python numbers takes minutes."""
        completions = list(itertools.chain.from_iterable(self.stored.values()))
        ids = [completion_ids for completion_ids, _ in completions]
        logprobs = [values for _, values in completions]
        return {
            "prompts": _joined(self.stored, torch.int32),
            "prompt_lengths": _lengths(self.stored),
            "numbers": _lengths(self.stored.values()),  # number of completions of each prompt
            "completions": _joined(ids, torch.int32),
            "logprobs": _joined(logprobs, torch.float32),
            "completion_lengths": _lengths(ids),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned."""
        lengths = state["completion_lengths"]
        completions = zip(_split(state["completions"], lengths), _split(state["logprobs"], lengths), strict=True)
        prompts = _split(state["prompts"], state["prompt_lengths"])
        self.stored = {}
        for prompt, number in zip(prompts, state["numbers"].tolist(), strict=True):
            # `completions` is an iterator, so this takes the next `number` completions.
            self.stored[tuple(prompt)] = list(itertools.islice(completions, number))


def _lengths(rows: Iterable[Sequence[Any]]) -> torch.Tensor:
    """Return the lengths of lists."""
    return torch.tensor([len(row) for row in rows], dtype=torch.int32)


def _joined(rows: Iterable[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Return lists of numbers as one tensor."""
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)


def _split(values: torch.Tensor, lengths: torch.Tensor) -> list[list[Any]]:
    """Undo [`_joined`]."""
    return [row.tolist() for row in values.split(lengths.tolist())]


class ReplayExplorer(BranchExplorer):
    """
    Replaces rows of a failed group by stored successes of the same prompt.

    The advantage of a stored token is multiplied by the probability of the token now, divided by its probability when
    it was sampled. This ratio is at most `replay_ratio_cap`. The method follows ExGRPO
    (https://huggingface.co/papers/2510.02245) and LUFFY (https://huggingface.co/papers/2504.14945).
    """

    name = "replay"
    credits_main_rows = True
    args: "ReplayConfig"

    def __init__(
        self, policy: Policy, forks: "Forks", scorer: Scorer, *, args: "ExplorationConfig | None" = None
    ) -> None:
        super().__init__(policy, forks, scorer, args=args)
        self.store = SuccessStore(size=self.args.replay_size, per_prompt=self.args.replay_per_prompt)

    @property
    def weight(self) -> None:
        return None

    def observe(self, groups: Sequence[ScoredGroup]) -> None:
        prompts: list[list[int]] = []
        completions: list[list[int]] = []
        seen: set[tuple[Prompt, Prompt]] = set()
        for group in groups:
            deciding = torch.tensor(list(group.deciding))
            solved = succeeded(deciding, threshold=self.args.resolved_success_threshold).tolist()
            for trajectory, is_success, is_trained in zip(group.trajectories, solved, group.is_trained, strict=True):
                ids, prompt = trajectory.completion_ids, tuple(trajectory.prompt_ids)
                is_new = (prompt, tuple(ids)) not in seen and not self.store.has(prompt, ids)
                # A truncated completion that TRL does not train now would not be trained when it is replayed, either.
                if is_success and is_trained and is_new:
                    seen.add((prompt, tuple(ids)))
                    prompts.append([*prompt])
                    completions.append(ids)
        logprobs = self._logprobs(prompts, completions)
        # All processes store the successes of all processes, because another process may get the prompt next time.
        for prompt, ids, values in self.policy.ranks.objects(list(zip(prompts, completions, logprobs, strict=True))):
            self.store.add(tuple(prompt), ids, values)
        self.policy.log_metric("replay/stored", len(self.store))

    def suits(self, group: ScoredGroup) -> bool:
        return bool(self._stored(group))

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        examples, prompt_ids, completion_ids, parents = [], [], [], []
        old_logprobs: list[list[float]] = []  # when the completions were sampled
        num_stored: list[int] = []  # stored completions of each group
        for group in groups:
            stored = self._stored(group)
            origin = group.trajectories[0]
            num_stored.append(len(stored))
            for ids, logprobs in stored:
                examples.append(origin.example)
                prompt_ids.append(origin.prompt_ids)
                completion_ids.append(ids)
                parents.append(origin.row)
                old_logprobs.append(logprobs)
        rewards, extra = self.scorer.judge(examples, completion_ids, prompt_ids=prompt_ids)
        new_logprobs = self._logprobs(prompt_ids, completion_ids)
        new_advantages: list[float] = []  # of the stored completions, before the multiplication by their ratios
        main_advantages: dict[int, float | list[float]] = {}
        start = 0
        for group, number in zip(groups, num_stored, strict=True):
            if not number:
                continue
            new_rewards = torch.tensor(rewards[start : start + number])
            start += number
            totals, deciding = self.scorer.totals(new_rewards).tolist(), self.scorer.success(new_rewards).tolist()
            new = list(zip(totals, deciding, strict=True))
            main = list(zip(group.rewards, group.deciding, strict=True))
            main_values, new_values = joined_advantages(self.args, main, new)
            new_advantages += new_values
            for trajectory, value in zip(group.trajectories, main_values, strict=True):
                main_advantages[trajectory.main_row] = value
        advantages: list[float | list[float]] = []
        for value, old, current in zip(new_advantages, old_logprobs, new_logprobs, strict=True):
            log_ratios = torch.tensor(current) - torch.tensor(old)
            ratios = log_ratios.exp().clamp(max=self.args.replay_ratio_cap)
            advantages.append((value * ratios).tolist())
        rows = Rows(
            examples=examples,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            loss_mask=[[1] * len(ids) for ids in completion_ids],
            group_size=1,
            # Without log-probabilities of the sampler, the loss does not correct for the sampler. The ratio in the
            # advantages already does.
            logprobs=None if self.policy.serving is None else [[None] * len(ids) for ids in completion_ids],
            known_rewards=[*rewards],
            extra=extra,
            parents=parents,
            shared=[0] * len(examples),
        )
        return Branches(rows, advantages, main_advantages)

    def state_dict(self) -> dict[str, Any]:
        return self.store.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state)

    def forget_data(self) -> None:
        self.store.stored = {}

    def _stored(self, group: ScoredGroup) -> list[Stored]:
        """Return the stored completions that can replace rows of a group."""
        prompt = tuple(group.trajectories[0].prompt_ids)
        return self.store.newest(prompt, self.args.replay_rows, longest=self.forks.longest_completion())

    def _logprobs(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of completions under the current policy. Every process must call it."""
        number = len(completion_ids)
        missing = self.policy.ranks.most(number) - number
        if number + missing == 0:
            return []
        filler = [self.policy.eos_token_ids[:1]] * missing  # every process must have the same number of rows
        return self.forks.sample.token_logprobs(prompt_ids + filler, completion_ids + filler)[:number]

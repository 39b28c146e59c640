"""Let an explorer sample some prompts of a generation batch, and add its completions to the training rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trl_explore.explorers.explorer import (
    Explored,
    Explorer,
    PlainSampling,
    PromptGroup,
    Sample,
    check_explored,
)
from trl_explore.explorers.turn_explorer import TurnExplorer
from trl_explore.rewards.success import succeeded
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import Scorer, Streams
from trl_explore.rows.streams import RowDict, select_rows
from trl_explore.sampling.sampler import Sampler
from trl_explore.selection.choice import PromptChoice


@dataclass(frozen=True)
class ExploredBatch:
    """The explored prompts of one generation batch."""

    rows: list[int]  # indices of this process's main rows whose prompt is explored; whole groups
    explored: list[Explored]  # one for each explored prompt of this process
    added: Rows | None = None  # rows to train in addition to GRPO's; None if explored completions replace GRPO's
    on_any_process: bool = True  # True if at least one process explores a prompt

    @property
    def replaces_main_rows(self) -> bool:
        """Return whether explored completions replace GRPO's in the main rows."""
        return self.on_any_process and self.added is None


class Exploration:
    """
    Lets an explorer sample the chosen prompts of each generation batch. GRPO samples and credits the other prompts.

    `batch` holds the explored prompts of the current generation batch.
    """

    def __init__(
        self, policy: Policy, explorer: Explorer, choice: PromptChoice | None, sample: Sampler, scorer: Scorer
    ) -> None:
        self.policy, self.explorer, self.choice = policy, explorer, choice
        self.sample, self.scorer, self.args = sample, scorer, policy.args
        # True: explored completions are trained in addition to GRPO's. False: they replace GRPO's.
        self.adds = choice is not None and policy.args.explore_into == "add"
        self.batch = ExploredBatch([], [], on_any_process=False)

    @property
    def size(self) -> int:
        """Return the number of rows of each prompt."""
        return self.args.num_generations

    @property
    def _samples_all_prompts(self) -> bool:
        """Return whether GRPO samples every prompt first, the explored ones included."""
        if self.choice is None:  # all prompts are explored
            return self.explorer.needs_samples
        return self.choice.needs_rewards or self.adds or self.explorer.needs_samples

    # ------------------------------------------------------------------------------------------------ sample main rows

    def rollout(self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling) -> Rollout:
        """
        Sample the main rows of a generation batch.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`. The rows of one prompt are consecutive.
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling.

        Returns:
            [`Rollout`]: One completion for each row.
        """
        if isinstance(self.explorer, TurnExplorer):
            return self.explorer.sample_turn(prompt_ids, examples, plain)
        if self.choice is None and not self.explorer.needs_samples:
            return self._explore_all(prompt_ids, examples, plain)
        if self._samples_all_prompts:
            rollout = self._with_rewards(plain(prompt_ids), prompt_ids, examples)
            rewards = self.policy.ranks.gather(self._rewards(rollout.known_rewards))
            mask = self._chosen(self.scorer.success(rewards))
        else:
            # The choice is random. So choose first, and let GRPO sample only the prompts that are not explored.
            no_rewards = torch.zeros(len(prompt_ids) * self.policy.ranks.number, device=self.policy.ranks.device)
            mask = self._chosen(no_rewards)
            if mask.any():
                rollout = self._sample_others(mask, prompt_ids, examples)
            else:
                rollout = plain(prompt_ids)
        if not mask.any():
            self.batch = ExploredBatch([], [], on_any_process=False)
            return rollout
        self._log_plain_tokens(rollout)
        return self._explore_rows(self._local_rows(mask), rollout, prompt_ids, examples)

    def _chosen(self, deciding: torch.Tensor) -> torch.Tensor:
        """Return the mask `(N,)` of the rows to explore. `deciding` are the rewards that decide about success."""
        if self.choice is None:
            return torch.ones_like(deciding, dtype=torch.bool)
        return self.choice.mask(deciding)

    def _explore_all(
        self, prompt_ids: list[list[int]], examples: list[dict[str, Any]], plain: PlainSampling
    ) -> Rollout:
        """Explore every prompt. GRPO samples nothing."""
        groups = []
        for row in range(0, len(prompt_ids), self.size):
            groups.append(PromptGroup(own_copy(examples[row]), [*prompt_ids[row]]))
        explored = self._explore(groups, plain)
        rows = list(range(len(prompt_ids)))
        # If the explorer scored no completion, TRL asks the reward functions later, as for GRPO's rows. A rollout has
        # rewards only if all its rows have them, so if the explorer scored some completions, score the others now.
        some_have_rewards = self._on_any_process(any(of_prompt.rewards is not None for of_prompt in explored))
        if some_have_rewards:
            self._score_missing(rows, explored, prompt_ids, examples)
        self.batch = ExploredBatch(rows, explored)
        return as_rollout(explored, masks_tokens=self._masks_tokens(explored))

    def _explore_rows(
        self, rows: list[int], rollout: Rollout, prompt_ids: list[list[int]], examples: list[dict[str, Any]]
    ) -> Rollout:
        """
        Explore the prompts of `rows`, and return the completions of all main rows.

        `rollout` holds GRPO's completions with rewards. The result is `rollout` with the explored rows replaced. With
        `explore_into="add"` it is `rollout` itself, and the explored completions go to `batch.added`.
        """
        groups = []
        for row in rows[:: self.size]:
            groups.append(PromptGroup(own_copy(examples[row]), [*prompt_ids[row]], self._samples(rollout, row)))
        # The next batch of GRPO's samples must not depend on how many prompts are explored now.
        with self.sample.forked_randomness():
            explored = self._explore(groups, self._plain)
            self._score_missing(rows, explored, prompt_ids, examples)
        self._log_solved(explored)
        found = as_rollout(explored, masks_tokens=self._masks_tokens(explored))
        if not self.adds:
            self.batch = ExploredBatch(rows, explored)
            return with_replaced_rows(rollout, rows, found)
        added = Rows(
            examples=[examples[row] for row in rows],
            prompt_ids=[prompt_ids[row] for row in rows],
            completion_ids=found.completion_ids,
            loss_mask=found.loss_mask or train_all_mask(found.completion_ids),
            group_size=self.size,
            logprobs=served_logprobs(self.policy, found),
            known_rewards=[*(found.known_rewards or [])],
            extra=found.extra or (),
        )
        self.batch = ExploredBatch(rows, explored, added)
        return rollout

    def _explore(self, groups: list[PromptGroup], plain: PlainSampling) -> list[Explored]:
        """Call the explorer, and check its result."""
        explored = self.explorer.explore(groups, plain)
        check_explored(
            self.explorer.name,
            explored,
            num_prompts=len(groups),
            size=self.size,
            num_rewards=len(self.scorer.names),
            max_length=self._max_length,
            columns=self.explorer.plain_columns,
        )
        return list(explored)

    @property
    def _max_length(self) -> int | None:
        """Return the maximum number of tokens of a completion. As in TRL, `generation_kwargs` may raise the limit."""
        limit, sampled = self.args.max_completion_length, self.args.max_sampled_tokens
        if limit is None or sampled is None:
            return limit
        return max(limit, sampled)

    def _samples(self, rollout: Rollout, row: int) -> list[Sample]:
        """Return GRPO's completions of the prompt whose first row is `row`."""
        samples = []
        for i in range(row, row + self.size):
            if rollout.completion_ids[i]:  # empty if GRPO did not sample this prompt
                assert rollout.known_rewards is not None
                samples.append(Sample([*rollout.completion_ids[i]], [*rollout.known_rewards[i]]))
        return samples

    def _masks_tokens(self, explored: list[Explored]) -> bool:
        """Return whether the explorer masks tokens on any process. If so, every process must return a loss mask."""
        return self._on_any_process(any(of_prompt.loss_mask is not None for of_prompt in explored))

    def _on_any_process(self, here: bool) -> bool:
        """Return whether `here` is True on at least one process. Every process must call it."""
        return bool(self.policy.ranks.gathered(here).any())

    def _local_rows(self, mask: torch.Tensor) -> list[int]:
        """Return the indices of this process's rows that are True in `mask`, `(N,)`, the mask of all processes."""
        return self.policy.ranks.local(mask).nonzero().squeeze(1).tolist()

    def _sample_others(
        self, mask: torch.Tensor, prompt_ids: list[list[int]], examples: list[dict[str, Any]]
    ) -> Rollout:
        """Sample as GRPO does, with rewards, the rows outside `mask`. Rows in `mask` get empty completions."""
        number = len(prompt_ids)
        others = self._local_rows(~mask)
        prompts = [prompt_ids[row] for row in others]
        rollout = self._with_rewards(self._plain(prompts), prompts, [examples[row] for row in others])
        empty: list[Any] = [[] for _ in range(number)]
        return Rollout(
            completion_ids=put_at(empty, others, rollout.completion_ids),
            logprobs=None if rollout.logprobs is None else put_at(empty, others, rollout.logprobs),
            known_rewards=put_at(empty, others, rollout.known_rewards or []),
            extra=put_at([{} for _ in range(number)], others, rollout.extra or []),
        )

    def _plain(self, prompts: list[list[int]]) -> Rollout:
        """Sample as GRPO does. Processes may pass different numbers of prompts, which TRL's own sampling forbids."""
        return sampled_as_grpo(self.policy, self.sample, prompts, self.explorer.max_completion_length)

    # --------------------------------------------------------------------------------------------------------- rewards

    def _with_rewards(self, rollout: Rollout, prompt_ids: list[list[int]], examples: list[dict[str, Any]]) -> Rollout:
        """Return a copy of `rollout` with the rewards of its completions."""
        rewards, extra = self.scorer.judge(examples, rollout.completion_ids, prompt_ids=prompt_ids)
        return replace(rollout, known_rewards=rewards, extra=extra)

    def _score_missing(
        self,
        rows: list[int],
        explored: list[Explored],
        prompt_ids: list[list[int]],
        examples: list[dict[str, Any]],
    ) -> None:
        """
        Ask the reward functions about the completions that the explorer did not score, in one call, and store the
        rewards in `explored`. Every process must call it.

        `rows` are the explored main rows. `prompt_ids` and `examples` belong to all main rows. They are passed again,
        because an explorer may have changed its copies.
        """
        origins = [(examples[row], prompt_ids[row]) for row in rows[:: self.size]]
        score_missing(self.scorer, origins, explored)

    def _rewards(self, rewards: Sequence[list[float]] | None) -> torch.Tensor:
        """Return rewards `[R][F]` as a tensor `(R, F)`. None is a tensor without rows."""
        found = list(rewards or [])
        tensor = torch.tensor(found, dtype=torch.float32, device=self.policy.ranks.device)
        return tensor.view(len(found), len(self.scorer.names))

    # ---------------------------------------------------------------------------------------------------------- credit

    def credit(self, output: RowDict, completion_ids: list[list[int]]) -> torch.Tensor:
        """
        Return the advantages of the main rows: the explorer's for explored rows, and GRPO's for the others.

        Args:
            output (`dict`):
                The main rows as TRL scored them, B rows.
            completion_ids (`list[list[int]]`):
                Tokens of their completions, `[B][T_i]`.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        if isinstance(self.explorer, TurnExplorer):
            self.batch = self._batch_of_turns(self.explorer, completion_ids)
            return self.explorer.credit(self.batch.explored, output)
        if not self.batch.replaces_main_rows:
            return output["advantages"]
        self._store_rewards()
        return self._with_explorer_credit(output, self.batch.rows)

    def _batch_of_turns(self, explorer: TurnExplorer, completion_ids: list[list[int]]) -> ExploredBatch:
        """Return the main rows as explored prompts: the explorer sampled some of their turns."""
        rewards = self._main_rewards()
        explored = []
        for group, start in enumerate(range(0, len(completion_ids), self.size)):
            rows = slice(start, start + self.size)
            columns = explorer.columns_of(group)
            explored.append(Explored(completion_ids[rows], rewards=rewards[rows], columns=columns))
        return ExploredBatch(list(range(len(completion_ids))), explored)

    def _main_rewards(self) -> list[list[float]]:
        """Return TRL's rewards of the main rows of this process, `[B][F]`."""
        assert self.scorer.rewards_per_func is not None
        return self.policy.ranks.local(self.scorer.rewards_per_func).tolist()

    def streams(self) -> Streams:
        """Return the stream `explored`: the completions that are trained in addition to GRPO's, in one mean with them.
        Without `explore_into="add"` there is no such stream."""
        added = self.batch.added
        if added is None:
            return {}
        scored = self.scorer.score("explored", added)
        assert scored is not None
        scored.rows["advantages"] = self._with_explorer_credit(scored.rows, list(range(len(added))))
        return {"explored": (scored, None)}

    def columns(self, num_rows: int) -> dict[str, list[Any]]:
        """Return columns `[B]` of the completions table. Explored rows have the explorer's values, and GRPO's rows
        have its `plain_columns`."""
        columns = {name: [value] * num_rows for name, value in self.explorer.plain_columns.items()}
        if not self.batch.replaces_main_rows:
            return columns
        for name in columns:
            values: list[Any] = []
            for of_prompt in self.batch.explored:
                values += of_prompt.columns[name]
            columns[name] = put_at(columns[name], self.batch.rows, values)
        return columns

    def _store_rewards(self) -> None:
        """Store TRL's rewards in the explored completions that the explorer did not score. This occurs only if every
        prompt is explored, so that the main rows are the explored rows in the same order."""
        rewards = self._main_rewards()
        for group, of_prompt in enumerate(self.batch.explored):
            if of_prompt.rewards is None:
                of_prompt.rewards = rewards[group * self.size : (group + 1) * self.size]

    def _with_explorer_credit(self, rows: RowDict, places: list[int]) -> torch.Tensor:
        """Return the advantages of `rows`, with the explorer's at `places`, the indices of the explored rows."""
        advantages = rows["advantages"]
        index = torch.tensor(places, dtype=torch.long, device=advantages.device)
        return credited_rows(self.policy, self.explorer, self.batch.explored, rows, index)

    # --------------------------------------------------------------------------------------------------------- metrics

    def _log_plain_tokens(self, rollout: Rollout) -> None:
        """Log the number of tokens that GRPO sampled before exploration, over all processes."""
        num_tokens = sum(len(ids) for ids in rollout.completion_ids)
        self.policy.log_metric("explore/plain_tokens", self.policy.ranks.summed({"plain": num_tokens})["plain"])

    def _log_solved(self, explored: list[Explored]) -> None:
        """Log the share of explored prompts with at least one successful explored completion."""
        rewards: list[list[float]] = []
        for of_prompt in explored:
            rewards += of_prompt.rewards or []
        deciding = self.scorer.success(self._rewards(rewards)).view(len(explored), self.size)
        solved = succeeded(deciding, threshold=self.args.resolved_success_threshold).any(dim=1)
        total = self.policy.ranks.summed({"solved": int(solved.sum()), "groups": len(solved)})
        self.policy.log_metric("explore/solved_after", total["solved"] / total["groups"])


def sampled_as_grpo(policy: Policy, sample: Sampler, prompts: list[list[int]], max_length: int) -> Rollout:
    """Return one completion for each prompt, sampled as GRPO does. Processes may pass different numbers of prompts."""
    completion_ids, logprobs = [], []
    for (continuation,) in sample(prompts, 1, max_length, main_stream=True):
        completion_ids.append(continuation.token_ids)
        logprobs.append(continuation.logprobs or [None] * len(continuation.token_ids))
    return Rollout(completion_ids, None if policy.serving is None else logprobs)


def score_missing(
    scorer: Scorer, origins: Sequence[tuple[dict[str, Any], list[int]]], explored: Sequence[Explored]
) -> None:
    """
    Ask the reward functions, in one call, about the completions that the explorer did not score, and store the rewards
    in `explored`. Every process must call it.

    Args:
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Calls the reward functions.
        origins (`Sequence[tuple[dict, list[int]]]`):
            Data-set row and prompt tokens of each explored prompt, `[P]`.
        explored (`Sequence[Explored]`):
            The completions of these prompts, `[P]`.
    """
    examples, prompt_ids, completion_ids = [], [], []
    for (example, prompt), of_prompt in zip(origins, explored, strict=True):
        if of_prompt.rewards is None:
            examples += [example] * len(of_prompt.completion_ids)
            prompt_ids += [prompt] * len(of_prompt.completion_ids)
            completion_ids += of_prompt.completion_ids
    rewards, logged = scorer.judge(examples, completion_ids, prompt_ids=prompt_ids)
    start = 0
    for of_prompt in explored:
        if of_prompt.rewards is None:
            end = start + len(of_prompt.completion_ids)
            of_prompt.rewards, of_prompt.logged = rewards[start:end], logged[start:end]
            start = end


def credited_rows(
    policy: Policy, explorer: Explorer, explored: Sequence[Explored], rows: RowDict, index: torch.Tensor
) -> torch.Tensor:
    """Return the advantages of `rows`, with the explorer's at `index`, the places of the explored rows. Every process
    must call it."""
    advantages = rows["advantages"]
    credited = explorer.credit(explored, select_rows(rows, index))
    # If one process has an advantage per token, all processes must have them, even without explored prompts.
    if policy.ranks.most(credited.dim() == 2 or advantages.dim() == 2):
        num_tokens = rows["completion_ids"].shape[1]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).repeat(1, num_tokens)
        if credited.dim() == 1:
            credited = credited.unsqueeze(1).repeat(1, num_tokens)
    return advantages.index_copy(0, index, credited)


def as_rollout(explored: list[Explored], *, masks_tokens: bool) -> Rollout:
    """
    Return the completions of several prompts as one rollout.

    The rollout has log-probabilities if any prompt has some, and rewards only if all prompts have them. It has a loss
    mask if `masks_tokens` is True.
    """
    completion_ids: list[list[int]] = []
    logprobs: list[list[float | None]] = []
    loss_mask: list[list[int]] = []
    rewards: list[list[float]] = []
    extra: list[Mapping[str, Any]] = []
    for of_prompt in explored:
        completion_ids += of_prompt.completion_ids
        logprobs += of_prompt.logprobs or no_logprobs(of_prompt.completion_ids)
        loss_mask += of_prompt.loss_mask or train_all_mask(of_prompt.completion_ids)
        rewards += of_prompt.rewards or []
        extra += of_prompt.logged or [{} for _ in of_prompt.completion_ids]
    rollout = Rollout(completion_ids)
    if any(of_prompt.logprobs is not None for of_prompt in explored):
        rollout.logprobs = logprobs
    if masks_tokens:
        rollout.loss_mask = loss_mask
    if all(of_prompt.rewards is not None for of_prompt in explored):
        rollout.known_rewards, rollout.extra = rewards, extra
    return rollout


def with_replaced_rows(rollout: Rollout, rows: list[int], found: Rollout) -> Rollout:
    """Return a copy of `rollout` in which the completions of `found` replace the completions at `rows`. Both arguments
    have rewards. Only `found` may have a loss mask."""
    logprobs = rollout.logprobs
    if logprobs is not None:
        logprobs = put_at(logprobs, rows, found.logprobs or no_logprobs(found.completion_ids))
    loss_mask = None
    if found.loss_mask is not None:
        loss_mask = put_at(train_all_mask(rollout.completion_ids), rows, found.loss_mask)
    return Rollout(
        completion_ids=put_at(rollout.completion_ids, rows, found.completion_ids),
        logprobs=logprobs,
        loss_mask=loss_mask,
        known_rewards=put_at(rollout.known_rewards or [], rows, found.known_rewards or []),
        extra=put_at(rollout.extra or [], rows, found.extra or []),
    )


def put_at(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return a copy of `values` with `others` at `places`."""
    merged = list(values)
    for place, other in zip(places, others, strict=True):
        merged[place] = other
    return merged


def train_all_mask(completion_ids: list[list[int]]) -> list[list[int]]:
    """Return a loss mask that trains every token."""
    return [[1] * len(ids) for ids in completion_ids]


def served_logprobs(policy: Policy, rollout: Rollout) -> list[list[float | None]] | None:
    """Return the log-probabilities of `rollout`, whose rows are added to TRL's. With vLLM, TRL needs a value for each
    token on all processes, also on a process without rows. Without vLLM, it needs none."""
    if policy.serving is None:
        return None
    return rollout.logprobs or no_logprobs(rollout.completion_ids)


def no_logprobs(completion_ids: list[list[int]]) -> list[list[float | None]]:
    """Return None for the log-probability of every token: the sampler reported none."""
    return [[None] * len(ids) for ids in completion_ids]

"""Rows beside the main ones are scored by TRL in a second pass that touches nothing of the first."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather, gather_object
from trl.trainer.utils import is_async_callable

from trl_explore.rewards.checks import RewardError, checked
from trl_explore.rows.advantages import combine_rewards, equal_rewards, success_rewards
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import RowDict, kept_randomness

from .completions_table import CompletionsTrainer, Logs, empty_logs

# So many prompts in a row without any reward end a run, once there have been rewards: a few may lack a gold answer.
MOST_UNSCORED_PROMPTS = 8


@dataclass
class ScoredRows:
    """
    Rows of an extra stream after TRL has scored them.

    Args:
        rows (`dict`):
            What TRL's loss receives, padded to the same number of rows on every process.
        real (`torch.Tensor`):
            Boolean mask of shape `(B,)`: `False` on rows that only pad.
        rewards (`torch.Tensor`):
            Total reward of the real rows of this process, shape `(B_real,)`; NaN where unscorable.
        success_rewards (`torch.Tensor`):
            Reward that decides whether each of them succeeded, shape `(B_real,)`; NaN where it is not known.
        logged (`dict`):
            What the completions table says of the real rows of all processes; empty without `log_completions`.
    """

    rows: RowDict
    real: torch.Tensor
    rewards: torch.Tensor
    success_rewards: torch.Tensor
    logged: Logs = field(default_factory=dict)


class ScoringTrainer(CompletionsTrainer):
    """
    [`~trl.GRPOTrainer`] that can let TRL score further rows: rewards, advantages, log-probabilities and metrics.
    """

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    _partial: Rows | None = None
    _rewards_per_func: torch.Tensor | None = None
    _any_example: dict[str, Any] = {}
    _unscored_prompts: int | None = None  # in a row up to now; None before the first reward
    environments: Any = None

    def score(self, name: str, rows: Rows) -> ScoredRows | None:
        """
        Let TRL score rows that are already sampled: rewards, advantages among siblings, old and reference log-probs.

        Reward functions see each row once, with its example's columns; rows whose rewards are known are not scored
        again. What TRL logs meanwhile is logged under `name/`.

        Args:
            name (`str`):
                Name of the stream, the prefix of its metrics.
            rows ([`Rows`]):
                Rows of this process, in whole groups; may be empty.

        Returns:
            [`ScoredRows`] or `None`: `None` where no process has a row.
        """
        num_rows = self._max_over_processes(len(rows))
        if num_rows == 0:
            return None
        padded = rows.padded(
            num_rows,
            example=self._any_example,
            token_id=self.eos_token_ids[0],
            num_rewards=len(self.reward_funcs),
        )
        with self._stream_scope(name, num_generations=rows.group_size, rows=padded):
            with kept_randomness(self.accelerator.device):
                output = super()._generate_and_score_completions(padded.examples)
            self._log_real_rows(rows, all_rows=num_rows * self.accelerator.num_processes)
            self.watch_correction(output)
            assert self._rewards_per_func is not None
            level = self._equal_rewards(self._rewards_per_func)
            output["advantages"] = output["advantages"].masked_fill(level, 0.0)
            totals, deciding = (
                rewards[self._process_rows(num_rows)] for rewards in (self._total_rewards(), self._success_rewards())
            )
            logged = self.logged_rows(rows, num_rows) if self.log_completions else {}
        real = torch.arange(num_rows, device=totals.device) < len(rows)
        return ScoredRows(output, real, totals[: len(rows)], deciding[: len(rows)], logged)

    def _log_real_rows(self, rows: Rows, *, all_rows: int) -> None:
        """Log lengths and groups again without the rows that only pad: each has one prompt token and trains none."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        own = [(sum(mask), ids[-1] in ends) for ids, mask in zip(rows.completion_ids, rows.loss_mask, strict=True)]
        real = gather_object(own)
        if len(real) == all_rows:
            return
        metrics = self._metrics["train"]
        self.state.num_input_tokens_seen -= all_rows - len(real)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        metrics["completions/clipped_ratio"] = [sum(not ended for _, ended in real) / len(real)]
        for kind, lengths in (
            ("", [length for length, _ in real]),
            ("terminated_", [length for length, ended in real if ended] or [0]),
        ):
            metrics[f"completions/mean_{kind}length"] = [sum(lengths) / len(lengths)]
            metrics[f"completions/min_{kind}length"] = [float(min(lengths))]
            metrics[f"completions/max_{kind}length"] = [float(max(lengths))]
        per_group = self.multi_objective_aggregation == "sum_then_normalize" and self.scale_rewards != "batch"
        if per_group and rows.group_size > 1:  # groups of NaN count as groups with spread
            metrics["frac_reward_zero_std"][-1] *= all_rows / len(real)

    def judge(
        self,
        examples: list[dict[str, Any]],
        completion_ids: list[list[int]],
        *,
        completions: list[list[dict[str, Any]] | None] | None = None,
        environments: list[Any] | None = None,
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """
        Rewards of completions while they are being sampled; rows made of them need not be scored again.

        Every process calls it equally often; a process may have no completion. Reward functions see what they would
        see for training rows.

        Args:
            examples (`list[dict]`):
                The data-set example behind each completion, `[R]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[R][T_i]`.
            completions (`list[list[dict]]`, *optional*):
                What they say, as messages, `[R]`; by default TRL decodes the tokens.
            environments (`list`, *optional*):
                The environment after each of them, `[R]`.

        Returns:
            `tuple[list[list[float]], list[dict]]`: Rewards per function, `[R][F]`, NaN where one returned `None`; and
            what the functions logged with `log_extra`, by column, `[R]`.

        Raises:
            ValueError: If a reward function logs another number of values than there are completions.
        """
        num_rows = self._max_over_processes(len(completion_ids))
        if num_rows == 0:
            return [], []
        rows = Rows(
            examples=[dict(example) for example in examples],
            prompt_ids=[[self.eos_token_ids[0]] for _ in completion_ids],
            completion_ids=completion_ids,
            loss_mask=[[1] * len(ids) for ids in completion_ids],
            group_size=1,
            completions=completions or [],
        ).padded(
            num_rows,
            example=self._any_example,
            token_id=self.eos_token_ids[0],
            num_rewards=len(self.reward_funcs),
        )
        prompts = [example["prompt"] for example in rows.examples]
        with self._stream_scope(None, num_generations=1, rows=rows):
            if environments is not None:
                self.environments = environments + [None] * (num_rows - len(environments))
            # TRL's own decoding: what reward functions see of a completion depends on it.
            decoded = self._generate(prompts)[3]
            rewards = self._calculate_rewards(rows.examples, prompts, decoded, rows.completion_ids)
            columns, logged = self._pending_extra_logs, self._pending_metrics
        for name, values in logged.items():
            self._pending_metrics[name].extend(values)
        for name, values in columns.items():
            if len(values) != len(completion_ids):
                raise ValueError(
                    f"`log_extra({name!r}, ...)` was given {len(values)} values for {len(completion_ids)} "
                    "completions: log one per completion, from one reward function."
                )
        extra = [{name: values[i] for name, values in columns.items()} for i in range(len(completion_ids))]
        return self.local(rewards)[: len(completion_ids)].tolist(), extra

    def gathered(self, value: float) -> torch.Tensor:
        """
        One number per process, for metrics and counts.

        Args:
            value (`float`):
                This process's number.

        Returns:
            `torch.Tensor`: Shape `(num_processes,)`, float64.
        """
        return gather(torch.tensor([float(value)], dtype=torch.float64, device=self.accelerator.device))

    def summed(self, values: dict[str, float]) -> dict[str, float]:
        """
        Numbers added up over all processes, in one call.

        Args:
            values (`dict[str, float]`):
                This process's numbers; every process has the same names.

        Returns:
            `dict[str, float]`: Their sums.
        """
        numbers = torch.tensor([list(values.values())], dtype=torch.float64, device=self.accelerator.device)
        return dict(zip(values, gather(numbers).sum(dim=0).tolist(), strict=True))

    def log_metric(self, name: str, value: float) -> None:
        """
        Log a training metric, averaged over the logging interval.

        Args:
            name (`str`):
                `noun/stat`.
            value (`float`):
                The value, equal on all processes.
        """
        self._metrics["train"][name].append(float(value))

    def local(self, gathered: torch.Tensor) -> torch.Tensor:
        """
        This process's part of a tensor gathered over all processes.

        Args:
            gathered (`torch.Tensor`):
                Shape `(N, ...)`, the same number of rows from every process.

        Returns:
            `torch.Tensor`: Shape `(B, ...)`.
        """
        return gathered[self._process_rows(len(gathered) // self.accelerator.num_processes)]

    def _generate(self, prompts):
        result = super()._generate(prompts)
        if self._partial is None or not any(self._partial.completions):
            return result
        spoken = [ours or decoded for ours, decoded in zip(self._partial.completions, result[3], strict=True)]
        return *result[:3], spoken, *result[4:]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        arguments = inputs, prompts, completions, completion_ids_list
        known = self._partial.known_rewards if self._partial is not None else self._main_rewards()
        reward_funcs: list[Any] = self.reward_funcs
        self.reward_funcs = [
            func if isinstance(func, torch.nn.Module) else checked(func, name)
            for func, name in zip(reward_funcs, self.reward_func_names, strict=True)
        ]
        try:
            if known is None:
                rewards = super()._calculate_rewards(*arguments)
            else:
                rewards = self._calculate_missing_rewards(known, *arguments)
        finally:
            self.reward_funcs = reward_funcs
        if self._partial is None:
            rewards = self._void_rewards(rewards)
            if self._is_training:
                self._stop_if_unscored(rewards, inputs[0])
        if self._is_training:
            self._rewards_per_func = rewards
        return rewards

    def _stop_if_unscored(self, rewards: torch.Tensor, example: dict[str, Any]) -> None:
        """
        Raise where the rewards `(N, F)` of all processes hold none, at the run's beginning or for many prompts in a
        row. TRL would go on and save a model that learned nothing.
        """
        if not rewards.isnan().all():
            self._unscored_prompts = 0
            return
        num_prompts = len(rewards) // (self.num_generations or 1)
        unscored = (self._unscored_prompts or 0) + num_prompts
        if self._unscored_prompts is not None and unscored < MOST_UNSCORED_PROMPTS:
            self._unscored_prompts = unscored
            return
        raise RewardError(
            f"None of the completions of {unscored} prompt(s) in a row has a reward, so nothing can be learned: "
            f"{', '.join(self.reward_func_names)} returned None or NaN for all of them. Check the columns that reward "
            f"functions read; the data has {', '.join(sorted(example))}."
        )

    def _void_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Raw rewards `(N, F)` of the main rows without those that do not count."""
        return rewards

    def _main_rewards(self) -> list[list[float] | None] | None:
        """Rewards `[B][F]` of main rows that were scored before TRL asks; `None` where TRL is the first to ask."""
        return None

    def _calculate_missing_rewards(
        self, known_rewards: list[list[float] | None], inputs, prompts, completions, completion_ids_list
    ):
        missing = [known is None for known in known_rewards]
        reward_funcs = self.reward_funcs
        self.reward_funcs = [
            _only_missing(f, n, missing) for f, n in zip(reward_funcs, self.reward_func_names, strict=True)
        ]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = reward_funcs
        unknown = [0.0] * len(reward_funcs)
        known = torch.tensor([r or unknown for r in known_rewards], dtype=rewards.dtype, device=rewards.device)
        keep = gather(torch.tensor(missing, device=rewards.device))
        return torch.where(keep.unsqueeze(1), rewards, gather(known))

    @contextmanager
    def _stream_scope(
        self, name: str | None, *, num_generations: int | None = None, rows: Rows | None = None
    ) -> Iterator[None]:
        """
        Run TRL's methods on rows of another stream: nothing they log, count or regularise touches the main one. What
        they log is kept under the stream's name, or dropped without one.
        """
        metrics, logs = self._metrics["train"], self._logs
        pending = self._pending_extra_logs, self._pending_metrics
        tokens_seen, rewards_per_func = self.state.num_input_tokens_seen, self._rewards_per_func
        self.state.num_input_tokens_seen = self._stream_tokens.get(name or "", 0)
        siblings, rollout_func = self.num_generations, self.rollout_func
        bonuses = self._entropy_bonus_enabled, self.aux_loss_enabled
        world = self.environments, self.environment_factories, self.tools
        self._metrics["train"] = defaultdict(list)
        self._logs = empty_logs(logs)
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        # Entropy bonus and router loss are regularisers of the policy, not of a stream: the main stream has them once.
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        if rows is not None:
            self.num_generations, self._partial = num_generations, rows
            # These rows have ended: no environment is reset for them, and no tool is called.
            self.environments = self.environment_factories = None
            self.tools = []
            # TRL's own slot for finished rollouts: it decodes and scores them, and takes their loss mask.
            self.rollout_func = lambda prompts, trainer: {
                "prompt_ids": rows.prompt_ids,
                "completion_ids": rows.completion_ids,
                "logprobs": rows.logprobs if self.use_vllm else None,
                "env_mask": rows.loss_mask,
            }
        try:
            yield
        finally:
            if name is not None:
                for key, values in self._metrics["train"].items():
                    metrics[f"{name}/{key}"].extend(values)
                self._stream_tokens = {**self._stream_tokens, name: self.state.num_input_tokens_seen}
            self._metrics["train"], self._logs = metrics, logs
            self._pending_extra_logs, self._pending_metrics = pending
            self.state.num_input_tokens_seen, self._rewards_per_func = tokens_seen, rewards_per_func
            self.num_generations, self.rollout_func = siblings, rollout_func
            self._entropy_bonus_enabled, self.aux_loss_enabled = bonuses
            self.environments, self.environment_factories, self.tools = world
            self._partial = None

    def _max_over_processes(self, value: int) -> int:
        return int(self.gathered(value).max())

    def _process_rows(self, num_rows: int) -> slice:
        start = self.accelerator.process_index * num_rows
        return slice(start, start + num_rows)

    def _equal_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Rows of this process `(B,)` whose advantage is 0 but for rounding, by the rewards `(N, F)` it came from."""
        assert self.num_generations is not None
        return self.local(
            equal_rewards(
                rewards_per_func,
                self.reward_weights,
                group_size=self.num_generations,
                per_function=self.multi_objective_aggregation == "normalize_then_sum",
            )
        )

    def _total_rewards(self) -> torch.Tensor:
        assert self._rewards_per_func is not None
        return combine_rewards(self._rewards_per_func, self.reward_weights)

    def success_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        The reward of each row that decides whether it succeeded, as `success_reward` says.

        Args:
            rewards_per_func (`torch.Tensor`):
                Rewards of shape `(N, F)`; NaN where not scored.

        Returns:
            `torch.Tensor`: Shape `(N,)`; NaN where it is not known.
        """
        return success_rewards(rewards_per_func, self.reward_weights, self.reward_func_names, self.args.success_reward)

    def _success_rewards(self) -> torch.Tensor:
        assert self._rewards_per_func is not None
        return self.success_rewards(self._rewards_per_func)


def _only_missing(func: Any, name: str, missing: list[bool]) -> Any:
    """Wrap a reward function so that it sees only rows without rewards; the others get a placeholder."""
    if all(missing) or (isinstance(func, torch.nn.Module) and any(missing)):
        return func  # a reward model has no side effects, and its extra rows are overwritten

    def pick(value):
        return [v for v, m in zip(value, missing, strict=True) if m] if isinstance(value, list) else value

    def spread(rewards):
        found = iter(rewards)
        return [next(found) if m else 0.0 for m in missing]

    def seen_by_function(columns):
        log_extra = columns["log_extra"]  # one value per completion, also for those that are not scored again

        def log_some(column, values):
            found = iter(values)
            log_extra(column, [next(found, None) if m else None for m in missing])

        return {**{k: pick(v) for k, v in columns.items()}, "log_extra": log_some}

    def scored(**columns):
        return spread(func(**seen_by_function(columns)) if any(missing) else [])

    async def scored_async(**columns):
        return spread(await func(**seen_by_function(columns)) if any(missing) else [])

    return scored_async if is_async_callable(func) else scored

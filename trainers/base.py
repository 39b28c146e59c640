"""The seams between exploration methods and TRL's `GRPOTrainer`.

This file and `resume.py` are the only ones that name a TRL private; `tests/test_contract.py` pins each of them.

A method answers up to four questions (how is a group sampled, what is a completion worth, which tokens get the credit,
which further rows are trained); the answers given here are plain GRPO's.
"""

import copy
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather
from datasets import Dataset, IterableDataset
from trl.trainer.utils import get_config_model_id, is_async_callable

from trl_explore.advantages import combine_rewards, has_signal
from trl_explore.rollouts import Continuation, Rollout, Rows, per_request
from trl_explore.streams import (
    LOSS_NORMALISERS,
    RowDict,
    StreamTotals,
    check_loss_type,
    loss_mask,
    mask_rows,
    split_stream,
    stream_scale,
)

from .config import ExplorationConfig, upgrade_config
from .resume import ResumableTrainer

Chooser = Callable[[list[list[int]]], Rollout]


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
    """

    rows: RowDict
    real: torch.Tensor
    rewards: torch.Tensor


class ExplorationTrainer(ResumableTrainer):
    """
    Base class of the exploration trainers; used by itself it is [`~trl.GRPOTrainer`].

    What it changes with respect to GRPO is nothing by itself. It gives subclasses four hooks ([`rollout`],
    [`shape_rewards`], [`assign_advantages`], [`extra_streams`]), two services ([`sample`], [`score`]), and it saves
    what a bit-exact resume needs, also off generation boundaries.

    The constructor takes what [`~trl.GRPOTrainer`] takes. `args` may be a plain [`~trl.GRPOConfig`], which gets the
    method's defaults.

    Raises:
        ValueError: For a field, data set or option the method cannot work with, before any model work.
        NotImplementedError: For a sampling backend that the method does not support yet.
    """

    config_class: type[ExplorationConfig] = ExplorationConfig
    # What a method that samples can be combined with; a subclass that supports more says so.
    accepts_rollout_func = False
    accepts_tools = False
    accepts_vision = False
    samples_extra_rows = False

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    args: Any
    _any_example: dict[str, Any] = {}
    main_completion_ids: list[list[int]] = []
    drop_zero_advantage = False
    sampling_batch_size: int | None = None
    _stream_steps: dict[str, tuple[float, StreamTotals, list[list[RowDict]]]] = {}
    _main_totals: StreamTotals | None = None
    _partial: Rows | None = None
    _rewards_per_func: torch.Tensor | None = None
    _shaped_rewards: torch.Tensor | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_id.split('/')[-1]}-{self._name}")
        args = upgrade_config(args, self.config_class)
        self._check_arguments(args, train_dataset, tools, rollout_func, environment_factory)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        if self._is_vlm and not self.accepts_vision:
            raise ValueError(
                f"{type(self).__name__} does not support vision-language models: pass a text model or use GRPOTrainer."
            )
        if args.drop_zero_advantage and LOSS_NORMALISERS[args.loss_type] != "items":
            # The factor that makes the main stream a mean over fewer rows would scale these terms too.
            for field, active in {
                "entropy_coef": self._entropy_bonus_enabled,
                "router_aux_loss_coef": self.aux_loss_enabled,
            }.items():
                if active:
                    raise ValueError(
                        f"`drop_zero_advantage=True` with `loss_type={args.loss_type!r}` cannot be combined with "
                        f"`{field}`: use `loss_type='dapo'`, or switch one of them off."
                    )
        self.drop_zero_advantage = args.drop_zero_advantage
        self.sampling_batch_size = args.sampling_batch_size
        self.setup()

    def _check_arguments(self, args, train_dataset, tools, rollout_func, environment_factory) -> None:
        name = type(self).__name__
        check_loss_type(args.loss_type)
        if rollout_func is not None and not self.accepts_rollout_func:
            raise ValueError(
                f"`rollout_func` cannot be combined with {name}, which samples rollouts itself: remove it, or use "
                "GRPOTrainer."
            )
        if (tools or environment_factory is not None) and not self.accepts_tools:
            field = "tools" if tools else "environment_factory"
            raise ValueError(
                f"{name} does not support `{field}` (multi-turn rollouts): remove it, or use GRPOTrainer."
            )
        if args.use_vllm and self.samples_extra_rows:
            raise NotImplementedError(_vllm_message(name))
        if isinstance(train_dataset, Dataset | IterableDataset) and environment_factory is None:
            columns = train_dataset.column_names
            if columns is not None and "prompt" not in columns:
                raise ValueError(
                    f"`train_dataset` has no `prompt` column, only {columns}: rename the column that holds the "
                    "prompts with `dataset.rename_column(..., 'prompt')`."
                )

    # ------------------------------------------------------------------ the four hooks, and what a method may define

    def setup(self) -> None:
        """Make the method's own state; runs at the end of construction."""

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        """
        How is a group sampled? Training only.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`; the rows of a group are consecutive.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: one completion per token list that it is given.

        Returns:
            [`Rollout`]: Exactly one completion per row.
        """
        return plain(prompt_ids)

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        What is a completion worth? Training only; the logged `reward` stays the raw one.

        Args:
            rewards_per_func (`torch.Tensor`):
                Raw rewards over all processes, shape `(N, F)`, groups consecutive; NaN where not scored.

        Returns:
            `torch.Tensor`: Rewards that GRPO's advantages are computed from, shape `(N, F)`.
        """
        return rewards_per_func

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        """
        Which tokens get the credit?

        Args:
            output (`dict`):
                The main rows as TRL scored them, of this process.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        return output["advantages"]

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        """
        Which further rows are trained, and how strongly? Every process calls [`sample`] and [`score`] equally often.

        Args:
            output (`dict`):
                The main rows as TRL scored them, of this process.
            examples (`list[dict]`):
                The data-set examples behind them, `[B]`.
            rewards (`torch.Tensor`):
                Total raw reward per main row over all processes, shape `(N,)`; NaN where unscorable.

        Returns:
            `dict[str, tuple[ScoredRows, float]]`: Streams by name with their weight; each is averaged over its own
            rows or tokens.
        """
        return {}

    # ------------------------------------------------------------------------------------- services for the methods

    def sample(
        self, prefixes: list[list[int]], num_samples: int | Sequence[int], max_new_tokens: int | Sequence[int]
    ) -> list[list[Continuation]]:
        """
        Sample continuations of token prefixes from the current policy, all in one batched call.

        Every process must call it equally often; a process may have no prefix. The global random state is left as it
        was, so that the main stream draws the same rollouts with and without extra sampling.

        Args:
            prefixes (`list[list[int]]`):
                Token ids `[R][T_i]`, without an end-of-sequence token.
            num_samples (`int` or `Sequence[int]`):
                Continuations per prefix.
            max_new_tokens (`int` or `Sequence[int]`):
                Budget of new tokens per prefix.

        Returns:
            `list[list[Continuation]]`: `[R][num_samples_i]`.

        Raises:
            NotImplementedError: With vLLM, which is not supported yet.
        """
        if self.use_vllm:
            raise NotImplementedError(_vllm_message(type(self).__name__))
        counts = per_request(num_samples, len(prefixes), name="num_samples")
        budgets = per_request(max_new_tokens, len(prefixes), name="max_new_tokens")
        rows = [prefix for prefix, n in zip(prefixes, counts, strict=True) for _ in range(n)]
        row_budgets = [budget for budget, n in zip(budgets, counts, strict=True) for _ in range(n)]
        seed = int(torch.randint(2**62, (1,), generator=self.exploration_generator))

        most_rows = self._max_over_processes(len(rows))
        if most_rows == 0:
            return [[] for _ in prefixes]
        chunk = self.sampling_batch_size or most_rows
        sampled: list[list[int]] = []
        start_time = time.perf_counter()
        with self._forked_randomness(seed):
            for start in range(0, most_rows, chunk):
                # A process that has run out of rows still takes part: sharded models gather weights in `generate`.
                part = rows[start : start + chunk] or [[self.eos_token_ids[0]]]
                part_budgets = row_budgets[start : start + chunk] or [1]
                ids = self._generate_tokens(part, max(part_budgets))
                sampled += [i[:budget] for i, budget in zip(ids, part_budgets, strict=True)]
        self._metrics["train"]["generation/extra_seconds"].append(time.perf_counter() - start_time)

        done = iter(Continuation(ids, finished=ids[-1] in self.eos_token_ids) for ids in sampled[: len(rows)])
        return [[next(done) for _ in range(n)] for n in counts]

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
            output = super()._generate_and_score_completions(padded.examples)
            totals = self._total_rewards()[self._process_rows(num_rows)]
        real = torch.arange(num_rows, device=totals.device) < len(rows)
        return ScoredRows(rows=output, real=real, rewards=totals[: len(rows)])

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

    def prompt_token_ids(self, output: RowDict) -> list[list[int]]:
        """
        Prompt tokens of the main rows without padding.

        Args:
            output (`dict`):
                The main rows as TRL scored them.

        Returns:
            `list[list[int]]`: `[B][P_i]`.
        """
        ids, mask = output["prompt_ids"].tolist(), output["prompt_mask"].sum(dim=1).tolist()
        return [row[len(row) - length :] for row, length in zip(ids, mask, strict=True)]

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

    # ---------------------------------------------------------------------------------------------- seams into TRL

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        def plain(ids: list[list[int]]) -> Rollout:
            start = time.perf_counter()
            completion_ids, logprobs = super(ExplorationTrainer, self)._generate_single_turn(
                ids, images, multimodal_fields, num_generations, has_tool_images
            )
            if self._is_training:
                self.log_metric("generation/main_seconds", time.perf_counter() - start)
            return Rollout(completion_ids, logprobs)

        rollout = self.rollout(prompt_ids, plain) if self._is_training else plain(prompt_ids)
        return rollout.completion_ids, rollout.logprobs

    def _generate_and_score_completions(self, inputs):
        if not self._is_training:
            return super()._generate_and_score_completions(inputs)
        self._any_example = inputs[0]
        output = super()._generate_and_score_completions(inputs)
        self._log_raw_rewards()
        output["advantages"] = self.assign_advantages(output)
        if self.drop_zero_advantage:
            keep = has_signal(output["advantages"])
            output = mask_rows(output, keep)
            self._main_totals = self._totals(output, keep)
            output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], self._main_totals.num_tokens)
        # The examples are copied: TRL writes into the dictionaries that it is given.
        streams = self.extra_streams(output, [dict(example) for example in inputs], self._total_rewards())
        self._stream_steps = {name: self._prepare_stream(*stream) for name, stream in streams.items() if stream[1] > 0}
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self._partial is not None:
            return self._calculate_missing_rewards(self._partial, inputs, prompts, completions, completion_ids_list)
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not self._is_training:
            return rewards
        self.main_completion_ids = completion_ids_list
        self._rewards_per_func = rewards
        self._shaped_rewards = self.shape_rewards(rewards.clone())
        return self._shaped_rewards

    def _calculate_missing_rewards(self, rows: Rows, inputs, prompts, completions, completion_ids_list):
        missing = [known is None for known in rows.known_rewards]
        reward_funcs = self.reward_funcs
        self.reward_funcs = [
            _only_missing(f, n, missing) for f, n in zip(reward_funcs, self.reward_func_names, strict=True)
        ]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = reward_funcs
        unknown = [0.0] * len(reward_funcs)
        known = torch.tensor([r or unknown for r in rows.known_rewards], dtype=rewards.dtype, device=rewards.device)
        keep = gather(torch.tensor(missing, device=rewards.device))
        self._rewards_per_func = torch.where(keep.unsqueeze(1), rewards, gather(known))
        return self._rewards_per_func

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self._is_training or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        extra = self._backward_streams(model)
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.drop_zero_advantage and self._main_totals is not None:
            loss = loss * stream_scale(self.loss_type, inputs, self._main_totals, num_slots=self._num_slots)
        return loss if extra is None else loss + extra

    def _backward_streams(self, model) -> torch.Tensor | None:
        # Each part's graph is freed before the next is built, so that peak memory stays that of one micro-batch. The
        # main stream's backward, which comes last, synchronises the gradients of all.
        step = self._step % self.args.steps_per_generation
        total = None
        for name, (weight, totals, steps) in self._stream_steps.items():
            stream_loss = torch.zeros((), device=self.accelerator.device)
            for rows in steps[step]:
                scale = stream_scale(self.loss_type, rows, totals, num_slots=self._num_slots)
                with self._stream_scope(name), self._deferred_sync(model):
                    loss = self._compute_loss(model, rows) * scale
                    self.accelerator.backward(loss * weight, **self._backward_kwargs)
                stream_loss = stream_loss + loss.detach()
            self.log_metric(
                f"{name}/loss", gather(stream_loss).mean().item() * self.current_gradient_accumulation_steps
            )
            total = stream_loss * weight if total is None else total + stream_loss * weight
        return total

    def _prepare_stream(self, scored: ScoredRows, weight: float):
        rows, keep = scored.rows, scored.real
        signal = has_signal(rows["advantages"])
        if self.drop_zero_advantage:
            keep = keep & signal
        totals = self._totals(rows, keep)
        rows["num_items_in_batch"] = torch.full_like(rows["num_items_in_batch"], totals.num_tokens)
        # Rows without advantage count in the averages above, but where neither a KL term nor an entropy quantile looks
        # at them their gradient is exactly 0, and their forward pass can be saved.
        if self.beta == 0.0 and self.top_entropy_quantile >= 1.0:
            keep = keep & signal
        num_rows = self._max_over_processes(int(keep.sum()))
        steps = split_stream(
            rows,
            keep,
            num_rows=num_rows,
            num_steps=self.args.steps_per_generation,
            max_rows=self.args.per_device_train_batch_size,
        )
        return weight, totals, steps

    def _totals(self, rows: RowDict, keep: torch.Tensor) -> StreamTotals:
        local = torch.stack([keep.sum(), (loss_mask(rows) * keep.unsqueeze(1)).sum()])
        num_rows, num_tokens = gather(local.unsqueeze(0)).sum(dim=0).tolist()
        return StreamTotals(num_rows=num_rows, num_tokens=num_tokens)

    @property
    def _num_slots(self) -> int:
        return self.args.steps_per_generation * self.accelerator.num_processes

    @property
    def _backward_kwargs(self) -> dict[str, Any]:
        return {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}

    @contextmanager
    def _deferred_sync(self, model) -> Iterator[None]:
        # DeepSpeed steps its optimiser inside `backward` whenever gradients are due to be synchronised.
        state = self.accelerator.gradient_state
        due = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(due)

    @contextmanager
    def _stream_scope(
        self, name: str, *, num_generations: int | None = None, rows: Rows | None = None
    ) -> Iterator[None]:
        """Run TRL's methods on rows of another stream: nothing they log, count or regularise touches the main one."""
        metrics, logs = self._metrics["train"], self._logs
        pending = self._pending_extra_logs, self._pending_metrics
        tokens_seen, rewards_per_func = self.state.num_input_tokens_seen, self._rewards_per_func
        self.state.num_input_tokens_seen = self._stream_tokens.get(name, 0)
        siblings, rollout_func = self.num_generations, self.rollout_func
        bonuses = self._entropy_bonus_enabled, self.aux_loss_enabled
        self._metrics["train"] = defaultdict(list)
        self._logs = {k: defaultdict(deque) if isinstance(v, defaultdict) else deque() for k, v in logs.items()}
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        # Entropy bonus and router loss are regularisers of the policy, not of a stream: the main stream has them once.
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        if rows is not None:
            self.num_generations, self._partial = num_generations, rows
            # TRL's own slot for finished rollouts: it decodes and scores them, and takes their loss mask.
            self.rollout_func = lambda prompts, trainer: {
                "prompt_ids": rows.prompt_ids,
                "completion_ids": rows.completion_ids,
                "logprobs": rows.logprobs,
                "env_mask": rows.loss_mask,
            }
        try:
            yield
        finally:
            for key, values in self._metrics["train"].items():
                metrics[f"{name}/{key}"].extend(values)
            self._metrics["train"], self._logs = metrics, logs
            self._pending_extra_logs, self._pending_metrics = pending
            self._stream_tokens = {**self._stream_tokens, name: self.state.num_input_tokens_seen}
            self.state.num_input_tokens_seen, self._rewards_per_func = tokens_seen, rewards_per_func
            self.num_generations, self.rollout_func = siblings, rollout_func
            self._entropy_bonus_enabled, self.aux_loss_enabled = bonuses
            self._partial = None

    def _generate_tokens(self, prefixes: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        config = self.generation_config
        self.generation_config = copy.deepcopy(config)
        self.generation_config.max_new_tokens = max_new_tokens
        try:
            return super()._generate_single_turn(prefixes, None, {}, 1)[0]
        finally:
            self.generation_config = config

    @contextmanager
    def _forked_randomness(self, seed: int) -> Iterator[None]:
        device = self.accelerator.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(seed)
            yield

    @property
    def _is_training(self) -> bool:
        assert self.model is not None
        return self.model.training

    def _max_over_processes(self, value: int) -> int:
        return int(self.gathered(value).max())

    def _process_rows(self, num_rows: int) -> slice:
        start = self.accelerator.process_index * num_rows
        return slice(start, start + num_rows)

    def _total_rewards(self) -> torch.Tensor:
        assert self._rewards_per_func is not None
        return combine_rewards(self._rewards_per_func, self.reward_weights)

    def _log_raw_rewards(self) -> None:
        raw, shaped = self._rewards_per_func, self._shaped_rewards
        assert raw is not None and shaped is not None
        if torch.equal(raw.nan_to_num(), shaped.nan_to_num()):
            return
        # TRL logged the shaped rewards it normalised; users compare `reward` across methods, so it stays the raw one.
        metrics, total = self._metrics["train"], combine_rewards(raw, self.reward_weights)
        metrics["shaped_reward"].append(metrics["reward"][-1])
        metrics["reward"][-1] = total.nanmean().item()
        metrics["reward_std"][-1] = total[~total.isnan()].std().item()
        for i, name in enumerate(self.reward_func_names):
            column = raw[:, i][~raw[:, i].isnan()]
            metrics[f"rewards/{name}/mean"][-1] = column.mean().item()
            metrics[f"rewards/{name}/std"][-1] = column.std().item()
            logged: deque = self._logs["rewards"][name]  # type: ignore[index]
            for _ in range(min(len(raw), len(logged))):
                logged.pop()
            logged.extend(raw[:, i].tolist())

    def rollout_state(self) -> dict[str, Any]:
        return {
            "streams": [[name, w, vars(totals), steps] for name, (w, totals, steps) in self._stream_steps.items()],
            "main_totals": vars(self._main_totals) if self._main_totals else None,
        }

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        self._stream_steps = {name: (w, StreamTotals(**totals), steps) for name, w, totals, steps in state["streams"]}
        self._main_totals = StreamTotals(**state["main_totals"]) if state["main_totals"] else None


def _vllm_message(name: str) -> str:
    return (
        f"{name} does not sample with vLLM yet (`use_vllm=True`): the supported backends are transformers generation "
        "(the default) and transformers continuous batching (`use_transformers_continuous_batching=True`)."
    )


def _only_missing(func: Any, name: str, missing: list[bool]) -> Any:
    """Wrap a reward function so that it sees only rows without rewards; the others get a placeholder."""
    if isinstance(func, torch.nn.Module) or all(missing):
        return func  # a reward model has no side effects, and its extra rows are overwritten

    def pick(value):
        return [v for v, m in zip(value, missing, strict=True) if m] if isinstance(value, list) else value

    def spread(rewards):
        if len(rewards) != sum(missing):
            raise ValueError(
                f"The reward function '{name}' returned {len(rewards)} rewards for {sum(missing)} completions; it "
                "must return exactly one per completion."
            )
        found = iter(rewards)
        return [next(found) if m else 0.0 for m in missing]

    def scored(**columns):
        return spread(func(**{k: pick(v) for k, v in columns.items()}) if any(missing) else [])

    async def scored_async(**columns):
        return spread(await func(**{k: pick(v) for k, v in columns.items()}) if any(missing) else [])

    return scored_async if is_async_callable(func) else scored

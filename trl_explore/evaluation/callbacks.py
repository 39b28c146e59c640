"""Evaluation during training: pass@k, majority vote and greedy accuracy of the current model on held-out prompts."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback, TrainerState

from trl_explore.evaluation.metrics import coverage_at_k, sample_metrics
from trl_explore.evaluation.policy import PolicySamples
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.rewards.answers import answer_key
from trl_explore.rewards.success import is_success


class PassAtKCallback(TrainerCallback):
    """
    Logs pass@k of the current model on held-out prompts during training, and leaves no trace in the training.

    Random states, training flags, metric accumulators, token counts and the generation config are afterwards as
    before: parameters and training metrics of a run are the same with and without it. Completions come from the
    training model through `generate`, even where training samples with vLLM. Logged, and kept in `history`
    (`list[dict]`, with the step): `eval/pass_at_{k}`, `eval/maj_at_{k}`, `eval/greedy_accuracy`, `eval/reward` and
    `eval/coverage_at_{k}`, as defined by [`~trl_explore.evaluation.metrics.sample_metrics`] on the weighted sums of
    rewards. The last evaluation's `successes` are there too: how many samples of each prompt succeeded (`"correct"`),
    and whether its greedy completion did (`"greedy_correct"`); without a reward, none.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass, that the callback is added to.
        eval_dataset ([`~datasets.Dataset`] or `list[dict]`):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Synchronous reward functions that decide success. `None` for the trainer's own, with their weights.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function. `None` for the trainer's, or 1 each for `reward_funcs` given here.
        num_samples (`int`, *optional*, defaults to `8`):
            Samples per prompt.
        k (`Sequence[int]`, *optional*, defaults to `(1, 8)`):
            Values of k for pass@k. Each in `[1, num_samples]`.
        maj_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for the majority vote. Each in `[1, num_samples]`.
        coverage_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for coverage@k, the share of a prompt's `targets` that its first k answers hit: a column of
            lists that every row then needs. Each in `[1, num_samples]`.
        every (`int`, *optional*):
            Optimizer steps between evaluations. `None` for the trainer's `eval_steps`; where these are not set either,
            only the beginning and the end of training are evaluated.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, positive. The other sampling options are those of the training arguments.
        max_completion_length (`int`, *optional*):
            Most tokens per completion. `None` for the trainer's.
        greedy (`bool`, *optional*, defaults to `True`):
            Whether to decode one more completion per prompt greedily.
        answer_fn (`Callable`, *optional*, defaults to [`~trl_explore.rewards.answers.answer_key`]):
            Text of a completion to its answer (hashable, `None` for none), for the majority vote and coverage.
        success_threshold (`float`, *optional*):
            Smallest weighted sum of rewards that counts as success. `None` stands for a reward of 1 from the only
            reward function, or from the one that `success_reward` names; else it must be given.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success, as it returns it, without its weight. `None` for the
            weighted sum.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions per `generate` call and process. Positive.
        seed (`int`, *optional*, defaults to `0`):
            Seed of each evaluation: all draw the same random numbers, which makes their differences less noisy.
        metric_prefix (`str`, *optional*, defaults to `"eval"`):
            First part of the logged names.
        at_begin (`bool`, *optional*, defaults to `True`):
            Whether to evaluate before the first step. The end is always evaluated; no step is evaluated twice.

    Raises:
        `ValueError`: If an argument is outside its range, the reward functions leave open what success is, or the
            trainer has tools, environments, a `rollout_func` or a multimodal processor.
    """

    def __init__(
        self,
        trainer: Any,
        eval_dataset: Iterable[dict[str, Any]],
        *,
        reward_funcs: Callable | list[Callable] | None = None,
        reward_weights: Sequence[float] | None = None,
        num_samples: int = 8,
        k: Sequence[int] = (1, 8),
        maj_k: Sequence[int] = (),
        coverage_k: Sequence[int] = (),
        every: int | None = None,
        temperature: float = 1.0,
        max_completion_length: int | None = None,
        greedy: bool = True,
        answer_fn: Callable[[str], Hashable | None] = answer_key,
        success_threshold: float | None = None,
        success_reward: str | None = None,
        batch_size: int = 64,
        seed: int = 0,
        metric_prefix: str = "eval",
        at_begin: bool = True,
    ) -> None:
        self.num_samples, self.k, self.maj_k, self.coverage_k = num_samples, tuple(k), tuple(maj_k), tuple(coverage_k)
        self.greedy, self.seed, self.every, self.at_begin = greedy, seed, every, at_begin
        self.trainer, self.metric_prefix = trainer, metric_prefix
        self.history: list[dict[str, float]] = []
        self.successes: dict[str, list[int]] = {}
        self.samples = PolicySamples(
            trainer,
            eval_dataset,
            reward_funcs=reward_funcs,
            reward_weights=reward_weights,
            success_reward=success_reward,
            temperature=temperature,
            max_completion_length=max_completion_length,
            batch_size=batch_size,
            answer_fn=answer_fn if maj_k or coverage_k else None,
        )
        weights = self.samples.reward_weights
        if success_threshold is None and success_reward is None and len(weights) != 1:
            raise ValueError(
                f"success_threshold must be given, because the sum of {len(weights)} rewards does not say what "
                f"success is; or name the one function that does as success_reward, or pass it alone as reward_funcs."
            )
        self._perfect_is_weight = success_threshold is None and success_reward is None
        perfect = weights[0] if success_reward is None else 1.0
        self.success_threshold = perfect if success_threshold is None else success_threshold
        if not self.k or not all(1 <= value <= num_samples for value in self.k + self.maj_k + self.coverage_k):
            raise ValueError(
                f"k, maj_k and coverage_k must be between 1 and num_samples={num_samples}, got k={self.k}, "
                f"maj_k={self.maj_k}, coverage_k={self.coverage_k}; raise num_samples or lower them."
            )
        if self.coverage_k:
            for row in self.samples.rows:
                _check_targets(row.get("targets"))
        if temperature <= 0 or batch_size < 1 or (every is not None and every < 1):
            raise ValueError(
                f"temperature, batch_size and every must be positive, got temperature={temperature}, "
                f"batch_size={batch_size}, every={every}; greedy=True decodes greedily."
            )

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.at_begin:
            self._report(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        every = self.every
        if every is None and args.eval_steps is not None:
            every = state.eval_steps  # the arguments' value may be a share of the run; the state's is resolved
        if every is not None and state.global_step % every == 0:
            self._report(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._report(state)

    def _report(self, state: TrainerState) -> None:
        key = f"{self.metric_prefix}/pass_at_{self.k[0]}"
        if any(entry["step"] == state.global_step and key in entry for entry in state.log_history):
            return
        metrics = self.evaluate()
        self.history.append({"step": state.global_step, **metrics})
        # GRPOTrainer.log would average and clear the training metrics gathered so far; the parent's only logs. It also
        # takes the pending order to log the training step as carried out.
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, dict(metrics))
        self.trainer.control.should_log = should_log

    def evaluate(self) -> dict[str, float]:
        """Metrics of the current model under their logged names, the same everywhere; every process calls it."""
        accelerator, rows = self.trainer.accelerator, self.samples.rows
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        # Sharded models wait for each other in every forward pass, so each rank takes as many rows: some come twice.
        share = [i % len(rows) for i in range(rank, math.ceil(len(rows) / num_ranks) * num_ranks, num_ranks)]
        with undisturbed(self.trainer.model_wrapped, seed=self.seed + rank):
            drawn = [self.samples.draw(share, self.num_samples)]
            if self.greedy:
                drawn.append(self.samples.draw(share, 1, greedy=True))
        if self._perfect_is_weight:
            self.success_threshold = self.samples.reward_weights[0]  # which may have changed since construction
        by_index = dict(gather_object(list(zip(share, zip(*drawn, strict=True), strict=True))))
        sampled, *best = zip(*(by_index[index] for index in range(len(rows))), strict=True)
        totals, rewards, answers = zip(*sampled, strict=True)  # (P, N) each
        kinds = dict(zip(("correct", "greedy_correct"), (sampled, *best), strict=False))
        deciding = {kind: [graded.rewards for graded in given] for kind, given in kinds.items()}
        threshold = self.success_threshold
        self.successes = {
            kind: [sum(is_success(reward, threshold=threshold) for reward in of_prompt) for of_prompt in given]
            for kind, given in deciding.items()
        }
        greedy = [of_prompt[0] for of_prompt in deciding["greedy_correct"]] if self.greedy else None
        metrics = sample_metrics(
            rewards, answers, greedy, threshold=threshold, k=self.k, maj_k=self.maj_k, totals=totals
        )
        for k in self.coverage_k:
            covered = [coverage_at_k(a, row["targets"], k) for a, row in zip(answers, rows, strict=True)]
            metrics[f"coverage_at_{k}"] = math.fsum(covered) / len(covered)
        return {f"{self.metric_prefix}/{name}": value for name, value in metrics.items()}


def _check_targets(value: Any) -> None:
    """Raise if the column `targets` of a row is no list of answers."""
    flat = isinstance(value, list | tuple) and all(isinstance(target, Hashable) for target in value)
    if not flat or not value:
        raise ValueError(
            "coverage_k needs a column `targets` with a list of targets in every row of eval_dataset, but one row has "
            f"{str(value)[:100]!r}: make it a list of all right answers, or leave coverage_k out."
        )

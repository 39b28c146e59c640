"""Evaluation during training: pass@k, majority vote and greedy accuracy of the current model on held-out prompts."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from trl_explore.evaluation.grading import Graded
from trl_explore.evaluation.metrics import coverage_at_k, sample_metrics
from trl_explore.evaluation.policy import PolicySamples
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.rewards.answers import answer_key
from trl_explore.rewards.success import is_success


class PassAtKCallback(TrainerCallback):
    """
    Logs pass@k of the current model on held-out prompts during training, without changing the training.

    Each evaluation restores the random states, training flags, metric accumulators, token counts and generation
    config. The parameters and the training metrics of a run are the same with and without the callback. Completions
    come from `generate` of the training model, even if training samples with vLLM.

    It logs `eval/pass_at_{k}`, `eval/maj_at_{k}`, `eval/greedy_accuracy`, `eval/reward` and `eval/coverage_at_{k}`.
    `eval/reward` is the mean weighted sum of rewards. Success depends on the weighted sum too, or on the rewards of
    `success_reward` alone. See [`~trl_explore.evaluation.metrics.sample_metrics`] and
    [`~trl_explore.evaluation.metrics.coverage_at_k`]. Attributes:

    - `history` (`list[dict]`): the logged metrics of every evaluation, with its `step`.
    - `successes` (`dict[str, list[int]]`): for each prompt of the last evaluation, the number of successful samples
      (`"correct"`) and of successful greedy completions (`"greedy_correct"`, 0 or 1). A completion without a reward
      is not successful.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer to which the callback is added. Subclasses are allowed.
        eval_dataset ([`~datasets.Dataset`] or `list[dict]`):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Synchronous reward functions that decide success. `None` uses the trainer's, with their weights.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function. `None` uses the trainer's weights, or 1 each if `reward_funcs` is given.
        num_samples (`int`, *optional*, defaults to `8`):
            Samples per prompt.
        k (`Sequence[int]`, *optional*, defaults to `(1, 8)`):
            Values of k for pass@k. Each in `[1, num_samples]`.
        maj_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for the majority vote. Each in `[1, num_samples]`.
        coverage_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for coverage@k: the share of a prompt's targets among its first k answers. Every row then needs
            a list of targets in the column `targets`. Each in `[1, num_samples]`.
        every (`int`, *optional*):
            Optimizer steps between evaluations. `None` uses the trainer's `eval_steps`. If `eval_steps` is not set
            either, the callback evaluates only at the beginning and the end of training.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, positive. The training arguments set the other sampling options.
        max_completion_length (`int`, *optional*):
            Maximum number of tokens per completion. `None` uses the trainer's.
        greedy (`bool`, *optional*, defaults to `True`):
            If `True`, decode one additional completion per prompt greedily.
        answer_fn (`Callable`, *optional*, defaults to [`~trl_explore.rewards.answers.answer_key`]):
            Maps the text of a completion to its answer (hashable, or `None` if there is no answer), for the majority
            vote and coverage.
        success_threshold (`float`, *optional*):
            Smallest weighted sum of rewards that counts as success. With `success_reward`, it is the smallest reward
            of that function. `None` means a reward of 1 from the only reward function, or from the function that
            `success_reward` names. Required with several functions and no `success_reward`.
        success_reward (`str`, *optional*):
            Name of the reward function whose unweighted reward decides success. `None` uses the weighted sum.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of completions per `generate` call on each process. Positive.
        seed (`int`, *optional*, defaults to `0`):
            Seed of each evaluation. All evaluations use the same random numbers, which makes their differences less
            noisy.
        metric_prefix (`str`, *optional*, defaults to `"eval"`):
            Prefix of the logged names.
        at_begin (`bool`, *optional*, defaults to `True`):
            If `True`, evaluate before the first step. The callback always evaluates at the end of training, and never
            evaluates a step twice.

    Raises:
        `ValueError`: If an argument is outside its range, if `success_threshold` is required and missing, or if the
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
                f"success_threshold must be given, because the sum of {len(weights)} rewards does not define success. "
                "Or name the one function that defines it as success_reward, or pass only that one as reward_funcs."
            )
        # With a single reward function and no threshold, success is a reward of 1. Its weighted sum is the weight.
        self._threshold_is_weight = success_threshold is None and success_reward is None
        if success_threshold is not None:
            self.success_threshold = success_threshold
        elif success_reward is not None:
            self.success_threshold = 1.0
        else:
            self.success_threshold = weights[0]
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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.at_begin:
            self._report(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        every = self.every
        if every is None and args.eval_steps is not None:
            every = state.eval_steps  # the arguments may give a share of the run; the state has the number of steps
        if every is not None and state.global_step % every == 0:
            self._report(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._report(state)

    def _report(self, state: TrainerState) -> None:
        key = f"{self.metric_prefix}/pass_at_{self.k[0]}"
        if any(entry["step"] == state.global_step and key in entry for entry in state.log_history):
            return
        metrics = self.evaluate()
        self.history.append({"step": state.global_step, **metrics})
        # GRPOTrainer.log would average and clear the training metrics gathered so far, so call Trainer.log. It resets
        # should_log, so restore the flag: otherwise the training step would not be logged.
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, dict(metrics))
        self.trainer.control.should_log = should_log

    def evaluate(self) -> dict[str, float]:
        """
        Evaluate the current model. Every process must call it.

        Returns:
            `dict[str, float]`: Metrics under their logged names, equal on all processes.
        """
        accelerator, rows = self.trainer.accelerator, self.samples.rows
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        # Every forward pass of a sharded model waits for all processes, so all of them take equally many rows. If the
        # number of rows is not a multiple of the number of processes, some processes sample the first rows again.
        num_positions = math.ceil(len(rows) / num_ranks) * num_ranks
        indices = [position % len(rows) for position in range(rank, num_positions, num_ranks)]
        with undisturbed(self.trainer.model_wrapped, seed=self.seed + rank):
            sampled = self.samples.draw(indices, self.num_samples)
            decoded = self.samples.draw(indices, 1, greedy=True) if self.greedy else []
        if self._threshold_is_weight:
            self.success_threshold = self.samples.reward_weights[0]  # the user may have changed the weight
        graded = self._gather(indices, sampled)
        self.successes = {"correct": self._count_successes(graded)}
        greedy_rewards = None
        if self.greedy:
            graded_greedy = self._gather(indices, decoded)
            self.successes["greedy_correct"] = self._count_successes(graded_greedy)
            greedy_rewards = [grades.rewards[0] for grades in graded_greedy]
        answers = [grades.answers for grades in graded]  # (P, N)
        metrics = sample_metrics(
            [grades.rewards for grades in graded],
            answers,
            greedy_rewards,
            threshold=self.success_threshold,
            k=self.k,
            maj_k=self.maj_k,
            totals=[grades.totals for grades in graded],
        )
        for k in self.coverage_k:
            covered = [coverage_at_k(given, row["targets"], k) for given, row in zip(answers, rows, strict=True)]
            metrics[f"coverage_at_{k}"] = math.fsum(covered) / len(covered)
        return {f"{self.metric_prefix}/{name}": value for name, value in metrics.items()}

    def _gather(self, indices: list[int], graded: list[Graded]) -> list[Graded]:
        """Collect graded samples from all processes, in the order of the rows."""
        by_index: dict[int, Graded] = dict(gather_object(list(zip(indices, graded, strict=True))))
        return [by_index[index] for index in range(len(by_index))]

    def _count_successes(self, graded: list[Graded]) -> list[int]:
        """Count the successful samples of each prompt."""
        counts = []
        for grades in graded:
            counts.append(sum(is_success(reward, threshold=self.success_threshold) for reward in grades.rewards))
        return counts


def _check_targets(value: Any) -> None:
    """Check that the cell of a row in the column `targets` is a list of answers."""
    is_flat_list = isinstance(value, list | tuple) and all(isinstance(target, Hashable) for target in value)
    if not is_flat_list or not value:
        raise ValueError(
            "coverage_k needs a column `targets` with a list of targets in every row of eval_dataset, but one row has "
            f"{str(value)[:100]!r}: make it a list of all right answers, or leave coverage_k out."
        )

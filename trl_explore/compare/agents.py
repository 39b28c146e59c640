"""Evaluation of an agent on held-out tasks. It uses `trainer.evaluate`, which samples and rewards trajectories."""

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from trl_explore.evaluation.metrics import NoRewardError, pass_at_k
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.rewards.success import check_success_reward, is_success
from trl_explore.rows.advantages import combine_rewards, success_rewards
from trl_explore.runs.embedded import AGENT_SAMPLES
from trl_explore.trainers.base import watch

EVALUATION_SEED = 1234
ROWS = 64  # trajectories per evaluation batch; a task that needs more gets a batch of its own


def agent_evaluation_options(num_samples: int) -> dict[str, int]:
    """Return the training options of an agent's evaluations with `num_samples` samples per task."""
    tasks_per_batch = max(1, ROWS // num_samples)
    return dict(per_device_eval_batch_size=num_samples * tasks_per_batch, num_generations_eval=num_samples)


AGENT_EVALUATION = agent_evaluation_options(AGENT_SAMPLES)  # for benchmarks, which ask for no larger k


def agent_evaluation(
    trainer: Any,
    num_tasks: int,
    k: Sequence[int] = (),
    *,
    success_threshold: float | None = None,
    success_reward: str | None = None,
) -> Callable[..., dict[str, Any]]:
    """
    Return a function that measures an agent's mean reward and pass@k on the trainer's `eval_dataset`.

    The mean is over all samples that have a reward. TRL's own metric `eval_reward` is a mean of the batches' means,
    which gives a smaller last batch too much weight. The evaluation restores the random state and the trainer's
    logging, so training continues as it would without the evaluation.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer of this class or of a subclass, in one process.
        num_tasks (`int`):
            Number of rows of the trainer's `eval_dataset`.
        k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for pass@k, at most the trainer's `num_generations_eval`. If empty, the function returns only
            `eval/reward`.
        success_threshold (`float`, *optional*):
            Smallest reward of a success. None means 1.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success. None means the weighted sum of all rewards.

    Returns:
        `Callable`: Function of a `seed` that returns a dictionary: `eval/reward`, `eval/pass_at_{k}` for each k, and
        `correct`, the number of successful samples per task. The same `seed` and weights give the same samples. It
        raises a `NoRewardError` if no sample has a reward that decides success.

    Raises:
        `ValueError`: If `success_reward` is not the name of exactly one reward function.
    """

    check_success_reward(success_reward, trainer.reward_func_names)

    def evaluate(seed: int = EVALUATION_SEED) -> dict[str, Any]:
        totals: list[float] = []  # the weighted sum of each sample's rewards
        deciding: list[float] = []  # the reward of each sample that decides whether it is a success
        should_log = trainer.control.should_log  # `evaluate` logs its metrics, and every log resets this flag

        def add_rewards(*arguments_and_rewards: Any) -> None:
            # The last value is the result of TRL's `_calculate_rewards`: a reward per sample and reward function.
            rewards, names = arguments_and_rewards[-1], trainer.reward_func_names
            totals.extend(combine_rewards(rewards, trainer.reward_weights).tolist())
            deciding.extend(success_rewards(rewards, trainer.reward_weights, names, success_reward).tolist())

        end_watch = watch(trainer, "rewarded", add_rewards)
        try:
            with undisturbed(trainer.model, seed=seed):
                trainer.evaluate()
        finally:
            end_watch()
        trainer.control.should_log = should_log
        needed = deciding if k else totals  # without pass@k, successes are not counted
        if all(math.isnan(reward) for reward in needed):
            raise NoRewardError(
                "No sample of any task has a reward that can be measured: the reward functions returned None or NaN."
            )
        found: dict[str, Any] = {"eval/reward": fmean(total for total in totals if not math.isnan(total))}
        if not k:
            return found
        correct, num_samples = [0] * num_tasks, trainer.num_generations_eval
        # `deciding` has the samples in the order in which TRL sampled them. TRL shuffles the tasks with a fixed seed,
        # so a new data loader yields the task of each sample in the same order.
        order = itertools.chain.from_iterable(trainer.get_eval_dataloader().batch_sampler)
        threshold = 1.0 if success_threshold is None else success_threshold
        for index, reward in zip(order, deciding, strict=True):
            correct[index] += is_success(reward, threshold=threshold)
        for number in k:
            found[f"eval/pass_at_{number}"] = fmean(pass_at_k(num_samples, successes, number) for successes in correct)
        return {**found, "correct": correct}

    return evaluate


def agent_end_samples(
    trainer: Any, num_tasks: int, num_samples: int, **success: Any
) -> Callable[[], dict[str, list[int]]]:
    """
    Return a function that counts the successful samples of each task out of `num_samples` samples.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer of this class or of a subclass, in one process.
        num_tasks (`int`):
            Number of rows of the trainer's `eval_dataset`.
        num_samples (`int`):
            Samples per task, a multiple of the trainer's `num_generations_eval`.
        **success:
            `success_threshold` and `success_reward`, as in [`agent_evaluation`].

    Returns:
        `Callable`: Function that returns `{"end_correct": counts}` with one count per task.
    """
    evaluation = agent_evaluation(trainer, num_tasks, k=(1,), **success)  # without a k, it does not return `correct`

    def evaluate() -> dict[str, list[int]]:
        end_correct = [0] * num_tasks
        for part in range(num_samples // trainer.num_generations_eval):
            correct = evaluation(EVALUATION_SEED + part)["correct"]  # another seed, so that the samples differ
            end_correct = [before + more for before, more in zip(end_correct, correct, strict=True)]
        return {"end_correct": end_correct}

    return evaluate

"""How well an agent does on held-out tasks: whole trajectories by the trainer's own evaluation, rewarded."""

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from trl_explore.evaluation.metrics import pass_at_k
from trl_explore.evaluation.samplers import undisturbed
from trl_explore.rewards.success import is_success
from trl_explore.rows.advantages import combine_rewards
from trl_explore.runs.embedded import AGENT_SAMPLES
from trl_explore.trainers.base import watch

EVALUATION_SEED = 1234
ROWS = 64  # trajectories at a time, or those of one task


def agent_evaluation_options(num_samples: int) -> dict[str, int]:
    """Training options of an agent's evaluations with so many samples per task."""
    return dict(per_device_eval_batch_size=num_samples * max(1, ROWS // num_samples), num_generations_eval=num_samples)


AGENT_EVALUATION = agent_evaluation_options(AGENT_SAMPLES)


def agent_evaluation(trainer: Any, num_tasks: int, k: Sequence[int] = ()) -> Callable[..., dict[str, Any]]:
    """
    Measures the mean reward of an agent on the trainer's `eval_dataset`, and pass@k, where a reward of 1 is a success.
    Training goes on as if nothing had happened.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass, in one process.
        num_tasks (`int`):
            Rows of its `eval_dataset`.
        k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k, at most the trainer's `num_generations_eval`. With any, successes by task are there too.

    Returns:
        `Callable`: Gives `eval/reward`, `eval/pass_at_{k}`, and how many samples of each task succeeded as `correct`;
            the same samples whenever it is called with the same `seed`.
    """

    def evaluate(seed: int = EVALUATION_SEED) -> dict[str, Any]:
        totals: list[float] = []
        should_log = trainer.control.should_log  # logging the evaluation would take it as carried out
        end = watch(
            trainer,
            "rewarded",
            lambda *given: totals.extend(combine_rewards(given[-1], trainer.reward_weights).tolist()),
        )
        try:
            with undisturbed(trainer.model, seed=seed):
                metrics = trainer.evaluate()
        finally:
            end()
        trainer.control.should_log = should_log
        found = {"eval/reward": metrics["eval_reward"]}
        if not k:
            return found
        correct, count = [0] * num_tasks, trainer.num_generations_eval
        order = itertools.chain.from_iterable(trainer.get_eval_dataloader().batch_sampler)  # tasks come shuffled
        for index, total in zip(order, totals, strict=True):
            correct[index] += is_success(total, threshold=1.0)
        means = {f"eval/pass_at_{n}": fmean(pass_at_k(count, of_task, n) for of_task in correct) for n in k}
        return {**found, **means, "correct": correct}

    return evaluate


def agent_end_samples(trainer: Any, num_tasks: int, num_samples: int) -> Callable[[], dict[str, list[int]]]:
    """Counts how many of a task's `num_samples` succeed, a multiple of the trainer's `num_generations_eval`."""
    evaluation = agent_evaluation(trainer, num_tasks, k=(1,))

    def evaluate() -> dict[str, list[int]]:
        parts = range(num_samples // trainer.num_generations_eval)
        correct = [evaluation(EVALUATION_SEED + part)["correct"] for part in parts]
        return {"end_correct": [sum(of_task) for of_task in zip(*correct, strict=True)]}

    return evaluate

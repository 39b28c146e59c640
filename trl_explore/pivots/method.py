"""Row of DEEP-GRPO in the table of methods. This module must load neither torch nor TRL."""

from typing import Any

from trl_explore.method_row import OURS, Method, for_language_models, is_agent


def pivot_options(task: Any) -> dict[str, Any] | None:
    """Return options of DEEP-GRPO that fit a task."""
    if for_language_models(task):
        return {}  # the default `segment_delimiters` contain the line breaks that end a task's steps
    limits = {"max_pivots_per_batch": 16, "sampling_batch_size": 64}
    if is_agent(task):  # `segment_length` is for the last turn only; earlier turns are one segment each
        return {**limits, "segmentation": "fixed", "segment_length": 8}
    delimiters = getattr(task, "step_delimiters", None)
    if delimiters is not None:
        return {**limits, "segment_delimiters": delimiters}
    length = getattr(task, "step_length", max(1, task.max_completion_length // 6))
    return {**limits, "segmentation": "fixed", "segment_length": length}


DEEP_GRPO = Method(
    "deep_grpo",
    "DEEP-GRPO",
    "DeepGRPOTrainer",
    "DeepGRPOConfig",
    tags=(*OURS, "deep-grpo"),
    paper={
        "title": "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling",
        "id": "2602.14169",
    },
    card="deep_grpo",
    metrics={
        "pivots/failure_fraction": "share of completions that failed: their reward is below `success_threshold`",
        "pivots/tried": "number of pivots of the batch, over all processes",
        "pivots/recovered_fraction": "share of pivots with a successful branch. Pivots whose branches have no "
        "reward do not count (the paper's Fig. 11 shows the share without a success)",
        "pivots/informative_fraction": "share of pivots whose branches did not all get the same reward. All other "
        "pivots train nothing",
        "pivots/mean_depth": "mean position of pivots, from 0 (the prompt) to 1 (the end). It is the mean of the "
        "paper's `r_t`",
        "pivots/success_weight": "slope w of the success estimator. If it is below 0, failures are harder to "
        "recover from later pivots",
        "pivots/success_bias": "intercept b of the success estimator",
        "pivots/mean_suffix_length": "new tokens per branch",
        "pivots/token_ratio": "branch tokens per token of the main completions",
        "pivots/sampled_tokens": "tokens sampled for branches",
        "pivots/own_seconds": "seconds of the method's own work: cutting segments, fitting the estimator, "
        "drawing pivots, joining prefixes and branches",
        "aux/loss": "loss of the branches, before `aux_loss_weight`",
        "aux/reward": "mean reward of the branches",
        "aux/computed_fraction": "share of branches that get a forward pass in training. With `beta = 0`, these "
        "are the branches with an advantage, and `aux/entropy` is their mean",
        "aux/...": "all other metrics that TRL logs for rows, for the branches",
    },
    card_metrics=(
        "pivots/failure_fraction",
        "pivots/recovered_fraction",
        "pivots/mean_depth",
        "pivots/token_ratio",
        "aux/reward",
    ),
    options=pivot_options,
    style=("#0072B2", "s"),
)

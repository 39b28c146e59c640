"""Rows of TreeRL and AttnRL in the table of methods. This module must load neither torch nor TRL."""

from typing import Any

from trl_explore.method_row import OURS, Method, for_language_models, is_agent, only_single_turns
from trl_explore.pivots.method import pivot_options

# Metrics of the branches of TreeRL and AttnRL.
_BRANCH_METRICS = {
    "branch/forks": "number of forks, over all processes",
    "branch/uncertainty": "mean `-log p` of the tokens that branches sampled again, if it is known",
    "branch/depth": "mean position of forks, from 0 (the prompt) to 1 (the end)",
    "branch/contrast_fraction": "share of prompts whose completions and branches did not all get the same reward. All "
    "other prompts train nothing",
    "branch/other_fraction": "share of branches whose reward differs from the reward of the forked completion",
    "branch/success_fraction": "share of branches that succeeded",
    "branch/trained_fraction": "share of branches that are trained",
    "branch/mean_suffix_length": "new tokens per branch",
    "branch/sampled_tokens": "tokens sampled for branches",
    "branch/token_ratio": "share of branches in all sampled tokens",
    "branch/seconds": "seconds for log-probabilities, branches and their scoring",
    "branch/reward": "mean reward of the branches that are trained",
    "branch/...": "all other metrics that TRL logs for rows, for the branches that are trained",
}


def _attn_rl_options(task: Any) -> dict[str, Any] | None:
    """Return the values of AttnRL's fields that fit a task: mainly, how completions are cut into steps. Return None if
    AttnRL cannot be used with the task."""
    if is_agent(task):
        return None
    # With the default distances, influence could choose hardly any step of a short completion.
    short_distances = {"influence_distance": 1, "min_fork_distance": 0}
    if for_language_models(task):
        # By default, AttnRL cuts at blank lines. Short answers have none, so their task names its own delimiters.
        delimiters = getattr(task, "step_delimiters", None)
        if delimiters is None:
            return {}
        return {**short_distances, "step_delimiters": delimiters}
    segments = pivot_options(task)
    if segments is None:
        return None
    if "segment_delimiters" in segments:
        return {**short_distances, "step_delimiters": segments["segment_delimiters"]}
    return {**short_distances, "step_length": segments["segment_length"]}


TREE_RL = Method(
    "tree_rl",
    "TreeRL",
    "TreeRLTrainer",
    "TreeRLConfig",
    tags=(*OURS, "tree-rl"),
    paper={"title": "TreeRL: LLM Reinforcement Learning with On-Policy Tree Search", "id": "2506.11902"},
    card="tree_rl",
    metrics=_BRANCH_METRICS,
    card_metrics=(
        "branch/contrast_fraction",
        "branch/other_fraction",
        "branch/uncertainty",
        "branch/depth",
        "branch/token_ratio",
    ),
    options=only_single_turns,
    style=("#8A6D00", "X"),
)

ATTN_RL = Method(
    "attn_rl",
    "AttnRL",
    "AttnRLTrainer",
    "AttnRLConfig",
    tags=(*OURS, "attn-rl"),
    paper={
        "title": "Attention as a Compass: Efficient Exploration for Process-Supervised RL in Reasoning Models",
        "id": "2509.26628",
    },
    card="attn_rl",
    metrics={
        "steps/per_completion": "number of steps per completion",
        "steps/forked_fraction": "share of completions that were chosen to be forked, including completions "
        "without a step that can be forked",
        "steps/influence": "mean influence of the steps that were forked",
        "steps/seconds": "seconds for the attention pass and the choice of steps",
        **_BRANCH_METRICS,
    },
    card_metrics=(
        "steps/per_completion",
        "steps/forked_fraction",
        "steps/influence",
        "branch/contrast_fraction",
        "branch/token_ratio",
    ),
    options=_attn_rl_options,
    style=("#7F3C8D", "<"),
)

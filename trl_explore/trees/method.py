"""Row of TreeGRPO in the table of methods. This module must load neither torch nor TRL."""

from collections.abc import Mapping
from typing import Any

from trl_explore.method_row import OURS, Method, Remark, is_agent


def tree_options(task: Any) -> dict[str, Any] | None:
    """Return options of TreeGRPO that fit a task, or None if it does not suit the task."""
    if is_agent(task):
        return None
    length = getattr(task, "step_length", None)
    return {} if length is None else {"node_length": length}


def _remarks(ends: Mapping[str, float]) -> list[Remark]:
    uniform = ends.get("tree/uniform_fraction")
    if uniform is None or uniform <= 0.9:
        return []
    text = (
        f"{uniform:.0%} of the search trees end with all completions right or all wrong: lower `depth_weight`, raise "
        "`node_length`, or search only prompts that plain samples do not solve, `explore_prompts='unsolved'`."
    )
    return [Remark(text, "docs/evidence.md#a-search-that-unlearns")]


TREE_GRPO = Method(
    "tree_grpo",
    "TreeGRPO",
    "TreeGRPOTrainer",
    "TreeGRPOConfig",
    tags=(*OURS, "tree-grpo"),
    paper={
        "title": "DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte "
        "Carlo Tree Search",
        "id": "2509.25454",
    },
    card="tree_grpo",
    metrics={
        "tree/iterations": "iterations per search; replayed trees do not count",
        "tree/nodes": "nodes per searched tree",
        "tree/max_depth": "depth of the deepest node of a searched tree",
        "tree/frontier_size": "nodes that could still be expanded when the search ended",
        "tree/success_fraction": "share of correct training rows",
        "tree/solved_fraction": "share of trees with a correct completion",
        "tree/uniform_fraction": "share of trees whose rows are all right or all wrong",
        "tree/direct_fraction": "share of the rows of searched trees that are direct rollouts from the prompt. They "
        "fill groups whose search ended early",
        "tree/trajectory_depth": "nodes per training row",
        "tree/trajectory_entropy": "mean token entropy of a training row, without direct rollouts",
        "tree/sampled_tokens": "tokens sampled for the batch",
        "tree/trained_tokens": "tokens of the training rows",
        "tree/token_ratio": "sampled tokens per trained token",
        "tree/distinct_fraction": "share of trained tokens that is left if a token that several rows of a tree share "
        "counts once",
        "tree/encoded_fraction": "number of encoded prefix tokens, divided by the number of prefix tokens of all "
        "samples together",
        "tree/sampling_seconds": "seconds of generation per batch",
        "tree/scoring_seconds": "seconds of the reward functions per batch",
        "tree/own_seconds": "seconds of the search itself per batch, including its files",
        "replay/prompts": "prompts that were not searched, because they have stored completions",
        "replay/replaced_rows": "rows that were replaced by a stored completion",
        "replay/stored_prompts": "prompts with stored completions",
        "replay/left_prompts": "prompts that are not hard any more, so their stored completions were dropped",
    },
    card_metrics=(
        "tree/solved_fraction",
        "tree/uniform_fraction",
        "tree/iterations",
        "tree/token_ratio",
        "replay/stored_prompts",
    ),
    options=tree_options,
    remarks=_remarks,
    style=("#D55E00", "D"),
)

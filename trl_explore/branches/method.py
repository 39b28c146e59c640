"""Row of BranPO in the table of methods. This module must load neither torch nor TRL."""

from collections.abc import Mapping

from trl_explore.method_row import OURS, Method, Remark, branching_agent_options


def _remarks(ends: Mapping[str, float]) -> list[Remark]:
    kept = ends.get("branch/contrastive_fraction")
    if kept is None or kept >= 0.1:
        return []
    return [Remark(f"{kept:.0%} of the trajectories have a branch with another outcome.", "docs/methods/branpo.md")]


BRANPO = Method(
    "branpo",
    "BranPO",
    "BranPOTrainer",
    "BranPOConfig",
    tags=(*OURS, "branpo"),
    paper={
        "title": "Training Multi-Turn Search Agent via Contrastive Dynamic Branch Sampling",
        "id": "2602.03719",
    },
    card="branpo",
    metrics={
        "branch/branched_fraction": "share of trajectories from which a branch was sampled",
        "branch/contrastive_fraction": "share of trajectories whose kept branch has the other outcome (the "
        "paper's Fig. 4)",
        "branch/redundant_fraction": "share of trajectories whose kept branch is a shorter success (the paper's "
        "Fig. 4)",
        "branch/depth": "responses of a trajectory after the start of its kept branch",
        "branch/sampled_tokens": "tokens sampled for branches",
        "branch/token_ratio": "share of branches in all sampled tokens",
        "branch/incomplete": "branches that were dropped, because they were cut off, reached the limit of rounds, "
        "or their environment raised",
        "branch/seconds": "seconds for all branches and their scoring",
        "branch/reward": "mean reward of the kept branches",
        "branch/...": "all other metrics that TRL logs for rows, for the kept branches",
        "agent/turns": "responses per main trajectory",
        "agent/environment_errors": "trajectories and branches that ended because their environment raised",
    },
    card_metrics=(
        "branch/branched_fraction",
        "branch/contrastive_fraction",
        "branch/redundant_fraction",
        "branch/token_ratio",
        "agent/turns",
    ),
    options=branching_agent_options,
    remarks=_remarks,
    needs_tools=True,
    style=("#56B4E9", "P"),
)

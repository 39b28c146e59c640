"""Row of Tree-GRPO for agents in the table of methods. This module must load neither torch nor TRL."""

from trl_explore.method_row import OURS, Method, branching_agent_options

AGENT_TREE_GRPO = Method(
    "agent_tree_grpo",
    "Tree-GRPO (agents)",
    "AgentTreeGRPOTrainer",
    "AgentTreeGRPOConfig",
    tags=(*OURS, "agent-tree-grpo"),
    paper={"title": "Tree Search for LLM Agent Reinforcement Learning", "id": "2509.21240"},
    card="agent_tree_grpo",
    metrics={
        "branch/trees": "trees that were expanded",
        "branch/contrast_fraction": "share of trees whose trained leaves have different rewards. Only these trees "
        "have an advantage inside the tree",
        "branch/mean_depth": "mean position of forks: turns before the fork, divided by the turns of the "
        "trajectory. It is 0 for forks at the prompt",
        "branch/sampled_tokens": "tokens sampled for branches",
        "branch/token_ratio": "share of branches in all sampled tokens",
        "branch/dropped": "branches that were dropped because their environment raised",
        "branch/seconds": "seconds for all branches and their scoring",
        "branch/reward": "mean reward of the branches",
        "branch/...": "all other metrics that TRL logs for rows, for the branches",
        "agent/turns": "responses per main trajectory",
        "agent/environment_errors": "trajectories and branches that ended because their environment raised",
    },
    card_metrics=(
        "branch/contrast_fraction",
        "branch/mean_depth",
        "branch/token_ratio",
        "branch/reward",
        "agent/turns",
    ),
    options=branching_agent_options,
    needs_tools=True,
)

"""Row of GiGPO in the table of methods. This module must load neither torch nor TRL."""

from trl_explore.method_row import OURS, Method, only_agents

GIGPO = Method(
    "gigpo",
    "GiGPO",
    "GiGPOTrainer",
    "GiGPOConfig",
    tags=(*OURS, "gigpo"),
    paper={"title": "Group-in-Group Policy Optimization for LLM Agent Training", "id": "2505.10978"},
    card="gigpo",
    metrics={
        "steps/shared_fraction": "share of steps whose state is also the state of another step of the prompt. "
        "Near 0, the method is GRPO",
        "steps/group_size": "steps per state",
        "steps/mean_advantage": "mean absolute advantage of a step, before `step_weight`",
        "agent/turns": "responses per trajectory",
        "agent/environment_errors": "trajectories that ended with reward 0 because their environment raised",
    },
    card_metrics=(
        "steps/shared_fraction",
        "steps/group_size",
        "steps/mean_advantage",
        "agent/turns",
    ),
    options=only_agents,
    needs_tools=True,
)

"""Row of EVOL-RL in the table of methods. This module must load neither torch nor TRL."""

from typing import Any

from trl_explore.method_row import OURS, Method, is_agent


def _options(task: Any) -> dict[str, Any] | None:
    if is_agent(task):
        return None
    # Answers of the tasks are plans and formulas, so completions rarely agree and no majority forms.
    return {"embedding_model": "ngrams", "correctness": "reward"}


EVOL_RL = Method(
    "evol_rl",
    "EVOL-RL",
    "EvolRLTrainer",
    "EvolRLConfig",
    tags=(*OURS, "evol-rl"),
    paper={
        "title": "Evolving Language Models without Labels: Majority Drives Selection, Novelty Promotes Variation",
        "id": "2509.15194",
    },
    card="evol_rl",
    metrics={
        "votes/answered_fraction": 'share of completions with an answer, or, with `correctness="reward"`, with a '
        "reward",
        "votes/right_fraction": "share of completions that count as right",
        "votes/right_reward": "mean reward of right completions from the reward functions. If the functions know "
        "the right answer, it shows how often the majority is right",
        "novelty/mean_similarity": "mean similarity of two completions of a prompt. Near 1, they are almost equal",
        "shaped_reward": "mean reward from votes and novelty, from which advantages are computed. `reward` is "
        "from the reward functions",
        "novelty/seconds": "seconds for the embeddings and the rewards that are computed from them",
    },
    card_metrics=(
        "votes/answered_fraction",
        "votes/right_fraction",
        "votes/right_reward",
        "novelty/mean_similarity",
    ),
    options=_options,
)

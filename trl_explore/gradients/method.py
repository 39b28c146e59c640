"""Row of G2RL in the table of methods. This module must load neither torch nor TRL."""

from trl_explore.method_row import OURS, Method

G2RL = Method(
    "g2rl",
    "G2RL",
    "G2RLTrainer",
    "G2RLConfig",
    tags=(*OURS, "g2rl"),
    paper={
        "title": "Can LLMs Guide Their Own Exploration? Gradient-Guided Reinforcement Learning for LLM Reasoning",
        "id": "2512.15687",
    },
    card="g2rl",
    metrics={
        "frac_reward_zero_std": "share of groups whose completions all got the same shaped reward. Groups that "
        "are all right or all wrong count only if their novelty is equal, too",
        "shaped_reward": "mean reward after shaping, from which advantages are computed. `reward` and "
        "`reward_std` are without shaping",
        "geometry/mean_cosine": "mean cosine of two completions' features (the paper's Fig. 3)",
        "geometry/negative_pairs": "share of pairs of completions with a cosine below 0 (the paper's Fig. 3)",
        "geometry/mean_novelty": "mean novelty `nu` of a completion",
        "geometry/unshaped_rows": "rows whose mapped reward was not shaped",
        "geometry/feature_seconds": "seconds for the features, including the backbone's forward pass if they need "
        "an additional one",
    },
    card_metrics=(
        "frac_reward_zero_std",
        "shaped_reward",
        "geometry/mean_cosine",
        "geometry/negative_pairs",
        "geometry/mean_novelty",
    ),
    style=("#CC79A7", "v"),
)

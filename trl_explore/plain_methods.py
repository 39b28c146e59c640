"""Rows of GRPO and of `ExplorationTrainer` in the table of methods. This module must load neither torch nor TRL.

The code of `ExplorationTrainer` is in the folder `trainers/`. The row cannot be there, because that folder loads TRL.
"""

from trl_explore.method_row import Method

EXPLORATION = Method(
    "exploration",
    "Exploration",
    "ExplorationTrainer",
    "ExplorationConfig",
    metrics={  # of all trainers; most are logged only if the field that they describe is set
        "generation/main_seconds": "seconds of sampling the main rows of a generation batch, in all calls",
        "generation/extra_seconds": "seconds of sampling the additional rows of a method",
        "generation/cache_megabytes": "largest size of the kept keys and values during a rollout",
        "success/fraction": "share of the completions whose reward reaches the success threshold. Logged if "
        "training compares rewards with a success threshold",
        "success/min_reward": "smallest reward of a generation batch. The reward is the one that decides about "
        "success",
        "success/max_reward": "largest reward of a generation batch. The reward is the one that decides about success",
        "generation/sampled_tokens": "tokens sampled since the start of the run, over all processes: completions, "
        "turns, branches, trees and sketches, both trained and discarded. Prompts, answers of tools and "
        "completions of evaluations do not count",
        "method/changed_hooks": "number of GRPO's steps that the trainer's class replaces (`rollout`, "
        "`shape_rewards`, `search`, `assign_advantages`, `extra_streams`). Plain GRPO does not log it. "
        "`trl-explore advise` uses it to recognise runs of a method",
        "explore_share": "share of the prompts that were explored",
        "explore/plain_tokens": "tokens of the completions that were sampled as in GRPO, without the "
        "method's own completions (TreeGRPO, SESA)",
        "explore/solved_after": "share of the explored prompts that exploration solved (TreeGRPO, SESA)",
        "explored/...": 'with `explore_into="add"`: metrics that TRL logs for rows, for the explored rows',
        "selection/rounds": "number of rounds of sampling of a generation batch",
        "selection/kept_groups": "share of the sampled groups that are trained",
        "selection/missing_groups": "groups without contrast after the last round, which train nothing",
        "selection/sampled_tokens": "tokens of the main rows' completions in all rounds of a batch",
        "selection/trained_tokens": "with `trained_generations`: tokens of a batch's main rows that are trained",
        "selection/untrained_tokens": "with `trained_generations`: tokens of a batch's main rows that are only "
        "sampled",
        "selection/discarded_tokens": "tokens of completions that were not trained, since the start of the run",
        "selection/prompts_seen": "number of prompts taken from the data, since the start of the run",
        "selection/skipped_prompts": "number of skipped prompts, since the start of the run",
        "selection/passes": "number of passes over the data",
        "selection/moved_rows": "share of the rows that a `budget` gave to another prompt",
        "credit/advantage_size/...": "mean absolute advantage of each entry of `advantage`, without its weight. "
        "Logged if `advantage` is a function or a list",
        "credit/bonus_mean": "mean bonus of rows with an answer, before the group's mean is subtracted. With "
        '`count_bonus_scope="history"`, it is 1 for new answers and near 0 for very frequent ones',
        "credit/distinct_answers": "number of different answers per group",
        "credit/answered_fraction": "share of rows with a readable answer, among rows with a reward",
        "credit/covariance_mean": "mean covariance of advantage and log-probability over the tokens in the loss",
        "credit/clip_cov_fraction": "share of the tokens in the loss that were clipped. It is less than "
        "`clip_cov` if too few tokens are between the bounds",
        "credit/kl_cov_fraction": "share of the tokens in the loss that got the penalty",
        "packing/token_ratio": "tokens of the rows, divided by the number of computed tokens (main process)",
        "packing/packed": "share of the micro-batches that were packed (main process)",
        "packing/sequences": "number of sequences per micro-batch. It is 1 without a `packed_token_budget` "
        "(main process)",
        "packing/compilations": "number of graphs that torch has compiled so far, on a GPU. It soon stops "
        "increasing (main process)",
        "sampling/masked_fraction": "with vLLM: share of rows that are removed from the loss by "
        '`vllm_importance_sampling_mode="sequence_mask"`',
    },
    card_metrics=(),
    plain=True,
)

GRPO = Method(
    "grpo",
    "GRPO",
    "trl:GRPOTrainer",
    "trl:GRPOConfig",
    tags=("trl", "grpo"),
    plain=True,
    style=("#000000", "o"),
)

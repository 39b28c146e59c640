"""Runs of test_credit_two_processes.py; see `ranks.py`. Groups of four span both processes."""

from world import make_trainer, one_batch

from trl_explore.credit.maxrl import maxrl
from trl_explore.rewards.checks import RewardError
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer


def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def mostly_negative(completion_ids, **columns):
    return [-1.0 if index else 1.0 for index in range(len(completion_ids))]


def main(folder):
    options = dict(per_device_train_batch_size=6, max_completion_length=3, reward_funcs=odd, num_iterations=2)
    options |= dict(advantage="maxrl", count_bonus=0.5, clip_cov=0.3, clip_cov_low=0.1, kl_cov=0.2)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, folder, **options)
    output = one_batch(trainer)
    mask = output["completion_mask"].bool()
    rewards = trainer.scorer.totals()
    credited = trainer.ranks.local(maxrl(rewards.view(-1, 4)).flatten() != 0).unsqueeze(1)
    out = {
        "tokens": int(mask.sum()),
        "clipped": int((mask & credited & (output["advantages"] == 0)).sum()),
        "marked": int(output["kl_cov"].sum()),
        "metrics": {name: v for name, v in trainer._metrics["train"].items() if name.startswith("credit/")},
        "counts": trainer.credit.state()["counts"],
        "rewards": rewards.tolist(),
    }
    refused = make_trainer(
        ExplorationTrainer, ExplorationConfig, folder, advantage="maxrl", reward_funcs=mostly_negative
    )
    try:
        refused.train()
    except RewardError as error:
        out["refused"] = str(error)
    return out

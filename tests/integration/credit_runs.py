"""Runs of test_credit_two_processes.py; see `ranks.py`. Groups of four span both processes."""

from world import make_trainer, one_batch

from trl_explore.credit.maxrl import maxrl
from trl_explore.rewards.checks import RewardError
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer


def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def mostly_negative(completion_ids, **columns):
    return [-1.0 if index else 1.0 for index in range(len(completion_ids))]


def some(completion_ids, **columns):
    return [float(sum(ids) % 5) for ids in completion_ids]


def brief(rewards, batch):
    """Per prompt and completion: what all processes must compute alike."""
    lengths = batch.gather(batch.rows["completion_mask"].sum(dim=1))
    return rewards - rewards.mean(dim=1, keepdim=True) - 0.1 * lengths


def first_token(rewards, batch):
    """Per token, on this process."""
    mask = batch.rows["completion_mask"].clone()
    mask[:, 1:] = 0
    return 0.5 * mask


def on_one_process(rewards, batch):
    """The processes return advantages of different shapes."""
    return first_token(rewards, batch) if batch.ranks.index == 0 else rewards - rewards.mean()


def functions(folder):
    options = dict(per_device_train_batch_size=6, max_completion_length=3, reward_funcs=some)
    trainer = make_trainer(
        ExplorationTrainer, ExplorationConfig, folder, advantage=[brief, first_token, on_one_process], **options
    )
    output = one_batch(trainer)
    trainer.train()
    ranks = trainer.ranks
    lengths = ranks.gather(output["completion_mask"].sum(dim=1)).view(-1, 4)
    rewards = trainer.scorer.totals().view(-1, 4)
    return {
        "shape": list(output["advantages"].shape) == list(output["completion_ids"].shape),
        "metrics": {name: v for name, v in trainer.state.log_history[0].items() if "advantage_size" in name},
        "weights": sum(float(value.double().abs().sum()) for value in trainer.model.parameters()),
        "prompts": len(lengths) == len(rewards) == 3,
    }


def selection(folder):
    options = dict(per_device_train_batch_size=8, reward_funcs=some, trained_generations=2, max_steps=3)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, folder, **options)
    output = one_batch(trainer)
    everything = trainer.ranks.gather(output["completion_mask"].sum())
    refilled = make_trainer(ExplorationTrainer, ExplorationConfig, folder, dynamic_sampling="refill", **options)
    refilled.train()
    return {
        "rows": len(output["advantages"]),
        "items": float(output["num_items_in_batch"].flatten()[0]) == float(everything.sum()),
        "own": trainer.ranks.index,
        "log": {name: v for name, v in refilled.state.log_history[0].items() if name.startswith("selection/")},
        "weights": sum(float(value.double().abs().sum()) for value in refilled.model.parameters()),
    }


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
    out["functions"], out["selection"] = functions(folder), selection(folder)
    return out

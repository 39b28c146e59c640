"""Methods that explore some prompts, on two processes of `ranks.py`: one has solved everything, the other nothing."""

from pathlib import Path

import torch
from sharding import whole
from test_explore_prompts import ALL, OWN_ROWS, UNSOLVED
from world import make_trainer

from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

FIELDS = {
    "filter": dict(dynamic_sampling="filter"),
    "refill": dict(dynamic_sampling="refill", max_sampling_rounds=4),
    "threshold": dict(explore_threshold=0.3),
    "knapsack": dict(budget="knapsack"),
}


RUNS = [(case, into) for case in ALL for into in ("replace", "add")]
# Prompts that are drawn, whatever was solved.
DRAWN = [(case, "drawn") for case in OWN_ROWS]


def by_process(completions, **columns):
    return [1.0 - torch.distributed.get_rank()] * len(completions)


def play(case, folder, into, **told):
    trainer_class, config_class, own = ALL[case]
    chosen = dict(explore_share_end=0.0) if into == "drawn" else dict(explore_into=into, **UNSOLVED)
    options = dict(max_steps=3, save_strategy="steps", save_steps=2, log_completions=True)
    name = f"{case} {into}".replace(" ", "_")
    trainer = make_trainer(
        trainer_class,
        config_class,
        Path(folder) / name,
        reward_funcs=by_process,
        num_completions_to_print=0,
        beta=0.1,
        model=None,
        **{**own, **options, **chosen},
    )
    trainer.train(**told)
    shares = [log["explore_share"] for log in trainer.state.log_history if "reward" in log]
    return {"parameters": whole(trainer), "shares": shares, "folder": str(Path(folder) / name)}


def contrast(completions, prompts, **columns):
    """The second process has groups without contrast."""
    second = torch.distributed.get_rank()
    return [float(i % 2 and not (second and int(p[0]) % 2)) for i, p in enumerate(prompts)]


def select(name, folder, **told):
    options = dict(FIELDS[name], max_steps=6, save_strategy="steps", save_steps=3, steps_per_generation=2)
    trainer = make_trainer(
        ExplorationTrainer, ExplorationConfig, Path(folder) / name, reward_funcs=contrast, **options
    )
    trainer.train(**told)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    found = {key: [log[key] for log in logs if key in log] for key in ("selection/rounds", "selection/missing_groups")}
    state = trainer.rounds.state()
    return {"parameters": whole(trainer), "logs": found, "state": state, "folder": str(Path(folder) / name)}


def main(folder):
    found = {}
    for case, into in RUNS + DRAWN:
        run = play(case, folder, into)
        torch.distributed.barrier()
        again = play(case, folder, into, resume_from_checkpoint=run["folder"] + "/checkpoint-2")
        found[f"{case} {into}"] = {**run, "resumed": again["parameters"]}
    for name in FIELDS:
        run = select(name, folder)
        torch.distributed.barrier()
        again = select(name, folder, resume_from_checkpoint=run["folder"] + "/checkpoint-3")
        found[name] = {**run, "resumed": again["parameters"]}
    return found

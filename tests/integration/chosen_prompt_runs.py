"""Methods that explore some prompts, on two processes of `ranks.py`: one has solved everything, the other nothing."""

from pathlib import Path

import torch
from sharding import whole
from test_explore_prompts import ALL, UNSOLVED
from world import make_trainer


def by_process(completions, **columns):
    return [1.0 - torch.distributed.get_rank()] * len(completions)


def play(case, folder, into, **told):
    trainer_class, config_class, own = ALL[case]
    options = dict(max_steps=3, explore_into=into, save_strategy="steps", save_steps=2, log_completions=True)
    name = f"{case} {into}".replace(" ", "_")
    trainer = make_trainer(
        trainer_class,
        config_class,
        Path(folder) / name,
        reward_funcs=by_process,
        num_completions_to_print=0,
        beta=0.1,
        model=None,
        **{**own, **options, **UNSOLVED},
    )
    trainer.train(**told)
    shares = [log["explore_share"] for log in trainer.state.log_history if "reward" in log]
    return {"parameters": whole(trainer), "shares": shares, "folder": str(Path(folder) / name)}


def main(folder):
    found = {}
    for case in ALL:
        for into in ("replace", "add"):
            run = play(case, folder, into)
            torch.distributed.barrier()
            again = play(case, folder, into, resume_from_checkpoint=run["folder"] + "/checkpoint-2")
            found[f"{case} {into}"] = {**run, "resumed": again["parameters"]}
    return found

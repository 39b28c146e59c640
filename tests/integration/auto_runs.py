"""Runs of test_auto_two_processes.py, for the trainer that chooses between explorers; see `ranks.py`."""

from pathlib import Path

import torch
from sharding import whole
from test_branpo import Voice
from test_branpo import make as make_agent
from trl import GRPOConfig, GRPOTrainer
from world import BOARDS, make_dataset, make_trainer, says

from trl_explore.auto.estimates import PLAIN, Estimates
from trl_explore.trainers import AutoExploreConfig, AutoExploreTrainer

OPTIONS = dict(
    tree=dict(expansion_width=3, node_length=2),
    pivots=dict(num_branches=3, segmentation="fixed", segment_length=2),
    hints=dict(hint_samples=2, hint_template="{problem};{hint}"),
    tail_branches=dict(num_branches=2),
)
SPAN = dict(max_steps=6, steps_per_generation=2)


def some(completion_ids, **columns):
    """About one completion in seven succeeds."""
    return [float(sum(ids) % 7 == 0) for ids in completion_ids]


def by_process(completions, **columns):
    """The first process has solved everything, and the second one nothing."""
    return [1.0 - torch.distributed.get_rank()] * len(completions)


def by_process_and_call(completion_ids, **columns):
    """The same. But what the second process explores succeeds now and then."""
    if torch.distributed.get_rank() == 0:
        return [1.0] * len(completion_ids)
    return [float(len(completion_ids) != 8 and sum(ids) % 2) for ids in completion_ids]


def seldom(environments, **columns):
    return [float(environment.episode.steps == 3) for environment in environments]


HINTS = make_dataset().add_column("hint", [["a", "bb"]] * 36)
CASES = {
    "single turns": dict(explorers=["tree", "pivots", "resample"], reward_funcs=some),
    "single turns, several steps": dict(explorers=["tree", "pivots", "resample"], reward_funcs=some, **SPAN),
    "accumulation": dict(reward_funcs=some, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=6),
    "one process": dict(explorers=["pivots", "resample"], reward_funcs=by_process),
    "one process learns": dict(explorers=["pivots"], reward_funcs=by_process_and_call),
    "one process with maxrl": dict(explorers=["resample"], reward_funcs=by_process, advantage="maxrl"),
    "one process with passk": dict(explorers=["resample"], reward_funcs=by_process, advantage="passk", passk_k=2),
    "sketches": dict(explorers=["sketches"], reward_funcs=some),
    "hints": dict(explore="hints", reward_funcs=some, train_dataset=HINTS),
    "hints of one process": dict(explore="hints", reward_funcs=by_process_and_call, train_dataset=HINTS),
    "replay": dict(explore="replay", reward_funcs=some, train_dataset=make_dataset().select(range(4)), max_steps=9),
    "hints and replay": dict(explorers=["hints", "replay", "resample"], reward_funcs=some, train_dataset=HINTS),
}
AGENTS = {"agent": ["tail_branches", "turn_trees", "resample"]}


def watched(trainer):
    """Note the choices of each batch, and what this process found itself."""
    explorer = trainer.branch_explorer
    seen = {"choices": [], "own": {}}
    choose, end_search = explorer.estimates.choose, explorer.end_search

    def noted(possible, *, random):
        seen["choices"].append(choose(possible, random=random))
        return seen["choices"][-1]

    def ended(found):
        for one in found:
            tokens = max(one.num_tokens, sum(map(sum, one.branches.rows.loss_mask)))
            seen["own"][one.explorer.stream] = seen["own"].get(one.explorer.stream, 0) + tokens
        end_search(found)

    explorer.estimates.choose, explorer.end_search = noted, ended
    return seen


def described(trainer, seen):
    explorer = trainer.branch_explorer
    stored = []  # prompts and completions, in the order in which they make room
    if "replay" in explorer.explorers:
        for prompt, kept in explorer.explorers["replay"].store.stored.items():
            stored.append([[*prompt], [ids for ids, _ in kept]])
    logs = []
    for log in trainer.state.log_history:
        logs.append({name: value for name, value in log.items() if name.startswith(("explore/", "hints/", "replay/"))})
    return {
        "parameters": whole(trainer),
        "estimates": explorer.estimates.state_dict(),
        "stored": stored,
        "logs": logs,
        **seen,
    }


def play(case, folder, *, saving=None, **told):
    options = {"explore_min_share": 0.7, "explore_discount": 1.0, "max_steps": 4, "explorer_options": OPTIONS}
    options |= saving or {}
    folder = Path(folder) / case.replace(" ", "_").replace(",", "")
    if case in AGENTS:
        says(Voice(0.5))
        options |= dict(reward_funcs=[seldom], boards=[*BOARDS, *BOARDS], explorers=AGENTS[case])
        trainer = make_agent(AutoExploreTrainer, AutoExploreConfig, folder, **options)
    else:
        trainer = make_trainer(AutoExploreTrainer, AutoExploreConfig, folder, **{**options, **CASES[case]})
    seen = watched(trainer)
    trainer.train(**told)
    return described(trainer, seen)


def plain(folder, trainer_class, config_class, **options):
    trainer = make_trainer(trainer_class, config_class, folder, reward_funcs=some, **options)
    trainer.train()
    return whole(trainer)


def main(folder):
    own = GRPOTrainer._generate_single_turn
    out = {}
    for case in [*CASES, *AGENTS]:
        out[case] = play(case, folder, saving=dict(save_strategy="steps", save_steps=3))
        torch.distributed.barrier()  # the other process may still be writing its part
        checkpoint = Path(folder) / case.replace(" ", "_").replace(",", "") / "checkpoint-3"
        out[f"{case} resumed"] = play(case, folder, resume_from_checkpoint=str(checkpoint))
    GRPOTrainer._generate_single_turn = own
    out["grpo"] = plain(folder, GRPOTrainer, GRPOConfig)
    out["no explorers"] = plain(folder, AutoExploreTrainer, AutoExploreConfig, explorers=[])
    choose = Estimates.choose
    Estimates.choose = lambda estimates, possible, *, random: [PLAIN] * len(possible)
    out["nothing explored"] = plain(folder, AutoExploreTrainer, AutoExploreConfig, explorers=["tree", "replay"])
    Estimates.choose = choose
    return out

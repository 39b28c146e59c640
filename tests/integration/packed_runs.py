"""DEEP-GRPO whose shared prefixes are computed once, on two processes of `ranks.py`, whole and sharded."""

from every_method_runs import play
from world import make_trainer

from trl_explore.packing.forward import PAYS_FROM, PackedForward
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

CONFIGS = {
    "on": dict(shared_prefix_training="on"),
    "on, budget": dict(shared_prefix_training="on", packed_token_budget=16),
    "auto": dict(shared_prefix_training="auto"),
    "auto, budget": dict(shared_prefix_training="auto", packed_token_budget=47),
}


def packed(name, folder):
    """Parameters, and what was packed on this process in the main rows of each step."""
    before = PackedForward.min_saved, PAYS_FROM["auto"]
    PackedForward.min_saved = 1  # the prompts of the small world are short
    PAYS_FROM["auto"] = 1.55  # between the ratios of the two processes in the first step
    values, metrics, _ = play("deep_grpo", folder, 2, config=CONFIGS[name])
    PackedForward.min_saved, PAYS_FROM["auto"] = before
    logged = {key: [log[f"packing/{key}"] for log in metrics] for key in ("token_ratio", "packed", "sequences")}
    return {"parameters": values, **logged}


def main(folder):
    return {"on, budget": packed("on, budget", folder), "refused": refused(folder)}


def sharded(folder):
    return {name: packed(name, folder) for name in CONFIGS}


def refused(folder):
    reentrant = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    try:
        make_trainer(ExplorationTrainer, ExplorationConfig, folder, **CONFIGS["on, budget"], **reentrant)
    except ValueError as error:
        return str(error)

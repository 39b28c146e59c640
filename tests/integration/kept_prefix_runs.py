"""Tree search with kept prefixes and without, on two processes of `ranks.py`, whole and sharded."""

import re
import warnings

from sharding import whole
from world import contains_answer, make_trainer

from trl_explore.trainers import TreeGRPOConfig, TreeGRPOTrainer

NOT_COMPARED = re.compile("megabytes|time|seconds|per_second|encoded")


def searched(folder, tokens):
    """Parameters after two steps, metrics but for times, what was encoded, whether paths were kept, and warnings."""
    kept = []

    def listening(completions, answer, **columns):
        kept.append(trainer.sample.paths is not None)
        return contains_answer(completions, answer)

    trainer = make_trainer(
        TreeGRPOTrainer,
        TreeGRPOConfig,
        folder,
        reward_funcs=listening,
        max_steps=2,
        expansion_width=3,
        node_length=2,
        path_cache_tokens=tokens,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    steps = [log for log in trainer.state.log_history if "reward" in log]
    return {
        "parameters": whole(trainer),
        "metrics": [{name: log[name] for name in log if not NOT_COMPARED.search(name)} for log in steps],
        "encoded": sum(log["tree/encoded_fraction"] for log in steps),
        "kept": any(kept),
        "warnings": [str(w.message) for w in caught if "encoded again" in str(w.message)],
    }


def main(folder):
    return {"kept": searched(folder, 65_536), "plain": searched(folder, 0), "bounded": searched(folder, 9)}


sharded = main

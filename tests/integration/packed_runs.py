"""DEEP-GRPO whose shared prefixes are computed once, on parameters that `ranks.py` has had sharded."""

from every_method_runs import play

from trl_explore.trainers.packing import PackedTrainer


def main(folder):
    before, PackedTrainer.min_saved = PackedTrainer.min_saved, 1  # the prompts of the small world are short
    values, metrics, _ = play("deep_grpo", folder, 2, config=dict(shared_prefix_training="on"))
    PackedTrainer.min_saved = before
    return {"parameters": values, "ratios": [log["packing/token_ratio"] for log in metrics]}

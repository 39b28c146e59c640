"""Runs of test_group_two_processes.py, for the methods that sample groups themselves; see `ranks.py`."""

import json
from pathlib import Path

import test_sesa_agent as lake
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from world import contains_answer, make_trainer, parameters, says

from trl_explore.trainers import SESAConfig, SESATrainer, TreeGRPOConfig, TreeGRPOTrainer
from trl_explore.trees.explorer import TreeExplorer

SMALL = dict(expansion_width=3, node_length=2, per_device_train_batch_size=8, num_generations=4)
SKETCHES = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    candidate_template="{problem}c",
    candidate_separator="+",
)
FLAT = dict(expansion_width=4, max_tree_depth=1, node_length=8, epsilon_high=None)


def run(trainer_class, config_class, folder, **options):
    trainer = make_trainer(trainer_class, config_class, folder, **options)
    trainer.train()
    return trainer


def compare(first, second):
    first, second = parameters(first), parameters(second)
    worst = max((first[n] - second[n]).abs().max().item() for n in first)
    return "same" if worst == 0 else f"differ by {worst}"


def fingerprint(trainer):
    return [round(p.double().sum().item(), 9) for p in parameters(trainer).values()]


def signed(completions, answer, **kwargs):
    return [2 * reward - 1 for reward in contains_answer(completions, answer)]


def uneven_caches(folder, rank):
    """SESA where the prefixes of rank 0 exceed its path cache while it drafts, and those of rank 1 do not."""
    room = 9 if rank == 0 else 65_536
    trainer = make_trainer(SESATrainer, SESAConfig, folder, **SKETCHES, path_cache_tokens=room)
    solved, has_cache = trainer.mode._solved, []

    def watched(solve_ids, plain):
        has_cache.append(trainer.sample.paths is not None)
        return solved(solve_ids, plain)

    trainer.mode._solved = watched
    trainer.train()
    return {"has cache": has_cache, "fingerprint": fingerprint(trainer)}


def main(folder):
    out = {}
    plain = run(GRPOTrainer, GRPOConfig, folder, scale_rewards="none", reward_funcs=signed)
    rank = plain.accelerator.process_index
    out["depth one"] = compare(run(TreeGRPOTrainer, TreeGRPOConfig, folder, **FLAT), plain)

    scored = []

    def counting(completions, answer, completion_ids, **kwargs):
        scored.extend(tuple(ids) for ids in completion_ids)
        return contains_answer(completions, answer)

    class WatchingExplorer(TreeExplorer):
        iterations, terminal = [], 0

        def _log(self, searched, seconds):
            self.iterations.append(max(tree.iterations for tree in searched))
            WatchingExplorer.terminal += sum(node.terminal for tree in searched for node in tree.nodes)
            super()._log(searched, seconds)

    class Watching(TreeGRPOTrainer):
        def make_explorer(self):
            return WatchingExplorer(self, self.sample, self.scorer)

    tree = run(
        Watching, TreeGRPOConfig, folder, **SMALL, reward_funcs=counting, max_steps=5, skip_uniform_trees=False,
        max_search_iterations=4 if rank == 0 else 9, dump_trees="trees",
    )  # fmt: skip
    out["iterations"] = WatchingExplorer.iterations
    out["scored"] = [len(scored), WatchingExplorer.terminal]
    out["unequal"] = fingerprint(tree)
    out["logged"] = [entry["tree/iterations"] for entry in tree.state.log_history[:-1]]
    tree.accelerator.wait_for_everyone()
    out["dumped"] = [sum(1 for _ in (Path(folder) / "trees" / f"trees_{i}.jsonl").open()) for i in range(2)]

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    for name, options in {
        "beta": dict(beta=0.1),
        "lora": dict(peft_config=lora),
        "accumulation": dict(gradient_accumulation_steps=2, share_prefix_once=True),
        "iterations": dict(num_iterations=2),
    }.items():
        out[f"fingerprint {name}"] = fingerprint(
            run(TreeGRPOTrainer, TreeGRPOConfig, folder, **SMALL, max_steps=2, **options)
        )

    options = dict(**SMALL, replay_buffer=True, replay_threshold=0.9, max_steps=8, steps_per_generation=2)
    whole = run(TreeGRPOTrainer, TreeGRPOConfig, folder, save_strategy="steps", save_steps=3, **options)
    whole.accelerator.wait_for_everyone()
    out["solutions"] = [len(prompt) + sum(map(len, found)) for prompt, found in sorted_solutions(whole)]
    out["solutions in file"] = len((Path(folder) / "solutions.jsonl").read_text().splitlines()) - 1
    out["solutions held"] = whole.solutions.num_solutions
    again = make_trainer(TreeGRPOTrainer, TreeGRPOConfig, folder, **options)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    out["resume"] = compare(again, whole)
    out["resumed solutions"] = again.solutions.state_dict() == whole.solutions.state_dict()

    unscaled = run(GRPOTrainer, GRPOConfig, folder)
    hidden = run(SESATrainer, SESAConfig, folder, **SKETCHES, solve_template="{problem}")
    out["hidden sketches"] = compare(hidden, unscaled)
    out["hidden sketches drafted"] = hidden.state.log_history[0]["sketch/tokens"]
    for mode in ("two_stage", "sequential"):
        options = dict(SKETCHES, mode=mode, off_policy_correction=mode == "two_stage")
        out[f"fingerprint {mode}"] = fingerprint(run(SESATrainer, SESAConfig, folder, **options))
    out["uneven caches"] = uneven_caches(folder, rank)

    # One rank's agents go on until the tool loop ends them, the other's mostly stop at once; holes break on one rank.
    voice = lake.Voice(stops=0.0 if rank == 0 else 0.7)
    says(voice)
    heard = None
    for name, options in (("agent", dict(branch_depth=2)), ("no branches", dict(branch_depth=0)), ("grpo", {})):
        lake.Lake.breaks = ("r",) if rank == 0 and name == "agent" else ()
        plain = name == "grpo"
        chosen = (GRPOTrainer, GRPOConfig) if plain else (SESATrainer, SESAConfig)
        own = {} if plain else lake.AGENT
        voice.calls.clear()
        trainer = lake.make(*chosen, folder, boards=lake.BOARDS * 4, per_device_train_batch_size=8, **own, **options)
        trainer.train()
        out[f"fingerprint {name}"] = fingerprint(trainer)
        if name == "agent":
            out["agent calls"] = len(voice.calls)
            out["agent errors"] = [log["agent/environment_errors"] for log in trainer.state.log_history[:2]]
        out["no branches"] = "" if heard is None else compare(trainer, heard)
        heard = trainer

    for name, trainer_class, config_class in (
        ("tree", TreeGRPOTrainer, TreeGRPOConfig),
        ("sesa", SESATrainer, SESAConfig),
    ):
        try:
            make_trainer(trainer_class, config_class, folder, per_device_train_batch_size=6)
        except ValueError as error:
            out[f"split groups {name}"] = str(error)

    return out


def sorted_solutions(trainer):
    prompts = sorted({tuple(line["prompt_ids"]) for line in solution_lines(trainer)})
    return [(prompt, trainer.solutions.get(prompt)) for prompt in prompts]


def solution_lines(trainer):
    text = (Path(trainer.args.output_dir) / "solutions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[1:]]

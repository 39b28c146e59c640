"""
Short runs of every method; `tests/golden_runs/` holds what must not change about them for users.

    python tests/integration/pinned_runs.py --write

writes these files anew, for one process and for two. Do so only if behavior is meant to change, and read the diff: a
change of the code's form leaves every line as it is. `tests/golden_runs/README.md` explains the lines.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # for `examples.benchmarks.tasks`
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import functools
import json
import random
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from launching import on_two_processes
from output_files import files_of, states_of
from pin_files import ABSENT, SEPARATORS, beside, joined, text_of
from quick import quicken
from recorder import recording
from test_branpo import Lake, Voice, odd_steps
from test_sesa_agent import AGENT
from trl import GRPOConfig, GRPOTrainer
from world import BOARDS, CHARACTERS, contains_answer, make_agent, make_dataset, make_trainer, saved_model

from trl_explore.trainers import (
    AgentTreeGRPOConfig,
    AgentTreeGRPOTrainer,
    AttnRLConfig,
    AttnRLTrainer,
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
    GiGPOConfig,
    GiGPOTrainer,
    GradientGuided,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreeRLConfig,
    TreeRLTrainer,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden_runs"
ONE, TWO = "one process", "two processes"
FAMILIES = ["all runs", "all methods", "methods on sums", "methods on agents"]
SAMPLE = GRPOTrainer._generate_single_turn


@dataclass
class GuidedDeepConfig(G2RLConfig, DeepGRPOConfig):
    pass


@dataclass
class GuidedBranPOConfig(G2RLConfig, BranPOConfig):
    pass


class GuidedDeep(GradientGuided, DeepGRPOTrainer):
    config_class = GuidedDeepConfig


class GuidedBranPO(BranPOTrainer, GradientGuided):
    config_class = GuidedBranPOConfig


SKETCHES = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    candidate_template="{problem}c",
    candidate_separator="+",
)
CUTS = dict(segmentation="fixed", segment_length=2, num_branches=3)
TREES = dict(expansion_width=3, node_length=2, max_search_iterations=12, skip_uniform_trees=False)
STEPS = dict(step_delimiters=[*CHARACTERS], influence_distance=1, min_fork_distance=0)
REUSED, SPREAD = dict(num_iterations=2), dict(steps_per_generation=2)
# A checkpoint in the middle of a generation batch holds the rows of the batch; a later one does not.
SUMS = {
    "grpo": (GRPOTrainer, GRPOConfig, REUSED),
    "base": (ExplorationTrainer, ExplorationConfig, dict(SPREAD, drop_zero_advantage=True)),
    "deep_grpo": (DeepGRPOTrainer, DeepGRPOConfig, dict(CUTS, **REUSED, beta=0.1, hard_states_file="hard.jsonl")),
    "deep_grpo deferred": (
        DeepGRPOTrainer,
        DeepGRPOConfig,
        dict(CUTS, deferred_branching=True, gradient_accumulation_steps=2, sampling_batch_size=2),
    ),
    "deep_grpo packed": (DeepGRPOTrainer, DeepGRPOConfig, dict(CUTS, shared_prefix_training="on")),
    "tree_grpo": (TreeGRPOTrainer, TreeGRPOConfig, dict(TREES, **REUSED, dump_trees="trees")),
    "tree_grpo replay": (
        TreeGRPOTrainer,
        TreeGRPOConfig,
        dict(TREES, **SPREAD, replay_buffer=True, replay_threshold=0.9, share_prefix_once=True),
    ),
    "tree_grpo kept": (TreeGRPOTrainer, TreeGRPOConfig, dict(TREES, path_cache_tokens=10_000)),
    "sesa": (SESATrainer, SESAConfig, dict(SKETCHES, **REUSED, off_policy_correction=True)),
    "sesa sequential": (SESATrainer, SESAConfig, dict(SKETCHES, mode="sequential")),
    "g2rl": (G2RLTrainer, G2RLConfig, {}),
    "g2rl reused": (G2RLTrainer, G2RLConfig, REUSED),
    "tree_rl": (TreeRLTrainer, TreeRLConfig, dict(num_rounds=2, trained_leaves=6, **REUSED)),
    "attn_rl": (AttnRLTrainer, AttnRLConfig, STEPS),
    "g2rl deep_grpo": (GuidedDeep, GuidedDeepConfig, dict(CUTS, **SPREAD)),
}
AGENTS = {
    "grpo agent": (GRPOTrainer, GRPOConfig, {}),
    "sesa agent": (SESATrainer, SESAConfig, dict(AGENT, branch_depth=2)),
    "deep_grpo agent": (DeepGRPOTrainer, DeepGRPOConfig, dict(CUTS, max_pivots_per_batch=6)),
    "branpo": (BranPOTrainer, BranPOConfig, REUSED),
    "branpo replay": (BranPOTrainer, BranPOConfig, dict(SPREAD, environment_state="replay")),
    "agent_tree_grpo": (AgentTreeGRPOTrainer, AgentTreeGRPOConfig, dict(REUSED, num_rounds=2, leaves_per_tree=2)),
    "gigpo": (GiGPOTrainer, GiGPOConfig, SPREAD),
    "g2rl branpo": (GuidedBranPO, GuidedBranPOConfig, {}),
}
# Cases that repeat a method with other options are slow tests.
VARIANTS = {"base", "deep_grpo deferred", "tree_grpo replay", "tree_grpo kept", "sesa sequential", "grpo agent"}
VARIANTS |= {"branpo replay"}
CASES = [*SUMS, *AGENTS]
ON_TWO = [case for case in CASES if case not in {"base", "sesa sequential", "grpo agent", "branpo replay"}]
# Groups of four over two processes with six rows each: the second group spans both.
SPANNING = {"deep_grpo deferred", "g2rl", "g2rl reused"}
COMMON = dict(
    max_steps=3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    num_generations=4,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=1,
    log_completions=True,
    num_completions_to_print=0,
)


def build(case, folder, recorder):
    """Return the trainer of a case, whose reward function is watched by a [`Recorder`]."""
    options = dict(COMMON, per_device_train_batch_size=6) if spans(case) else COMMON
    trainer_class, config_class, own = {**AGENTS, **SUMS}[case]
    if config_class is not GRPOConfig:  # by TRL's own sampling, except where a case sets it
        own = {"path_cache_tokens": 0, **own}
    if case in AGENTS:
        boards = {"prompt": [[{"role": "user", "content": board}] for board in BOARDS], "board": BOARDS}
        return make_agent(
            trainer_class,
            config_class,
            folder,
            boards=BOARDS * 4,
            eval_dataset=Dataset.from_dict(boards),
            environment_factory=Lake,
            max_completion_length=200,
            max_tool_calling_iterations=3,
            reward_funcs=[recorder.watched(odd_steps)],
            **options,
            **own,
        )
    sums = make_dataset()
    if "packed" in case:  # a start that is worth sharing
        sums = sums.map(lambda row: {"prompt": "1+2=3;" * 8 + row["prompt"]})
    rows = dict(train_dataset=sums, eval_dataset=sums.select(range(2)), reward_funcs=recorder.watched(contains_answer))
    return make_trainer(trainer_class, config_class, folder, **rows, **options, **own)


def is_plain(case):
    return {**AGENTS, **SUMS}[case][0] is GRPOTrainer


def spans(case):
    return case in SPANNING and os.environ.get("WORLD_SIZE") == "2"


def speaking(voice):
    """Return TRL's sampling with a voice in the place of the model."""

    @functools.wraps(SAMPLE)
    def sample(*args, **kwargs):
        return voice(*args, **kwargs)

    return sample


def record(case, folder, rank=0):
    """Record a case on this process: a run with evaluations and checkpoints, and one from the first checkpoint on."""
    saved_model()  # made here with a seed of its own
    recorders = []
    # TRL promises no exact resume.
    checkpoints = [None] if is_plain(case) else [None, str(Path(folder) / "checkpoint-1")]
    for checkpoint in checkpoints:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        sampling = speaking(Voice(stops=0.3)) if case in AGENTS else SAMPLE
        sampled = patch.object(GRPOTrainer, "_generate_single_turn", sampling)
        with redirect_stdout(StringIO()), sampled, recording(Lake) as recorder:
            trainer = build(case, folder, recorder)
            recorder.follow(trainer)
            trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == COMMON["max_steps"]
        trainer.accelerator.wait_for_everyone()  # another process may still be writing
        recorder.finish()
        recorders.append(recorder)
    first = recorders[0]
    return {
        "run": [part.as_values() for part in first.parts],
        "resumed": [part.as_values() for recorder in recorders[1:] for part in recorder.parts],
        "metrics": first.metrics(),
        "files": files_of(Path(folder)),
        "state": states_of(Path(folder), rank),
        "collectives": [recorder.collectives for recorder in recorders],
    }


def sections_of(processes, records, known):
    """
    Return the sections of a file of pins.

    Args:
        processes (`str`):
            `ONE` or `TWO`.
        records (`list[dict]`):
            What [`record`] returned on each process.
        known (`dict[str, dict]`):
            Metrics, files and keys of a state that are written elsewhere, with their values; see [`known_of`].
    """
    runs = [[(part["title"], part["facts"]) for part in found["run"]] for found in records]
    sections = {processes: functools.reduce(joined, runs)}
    resumed = functools.reduce(joined, [changes(found["run"], found["resumed"]) for found in records])
    if resumed:
        sections |= resumed_section(processes, resumed)
    for kind in SEPARATORS:
        shown = beside(entries_of(records, kind), known[kind])
        if shown:
            sections[f"{processes}, {kind}"] = [("", shown)]
    return sections


def resumed_section(processes, parts):
    """Return the section of a resumed run, whose parts have the facts that are not those of the first run."""
    name, same = f"{processes}, resumed from step 1", "as above, to the last digit"
    equal = [title for title, facts in parts if not facts]
    others = [(title, facts) for title, facts in parts if facts]
    if not others:
        return {f"{name}: {same}": []}
    if equal:
        others.append((f"{same}: {', '.join(equal)}", {}))
    return {name: others}


def entries_of(records, kind):
    """Return the metrics, the files or the keys of the state that the processes of a run recorded."""
    if kind != "state":  # the main process logs metrics and sees all files
        return records[0][kind]
    keys = {}
    for found in records:
        keys.update(found["state"])
    return keys


def changes(run, resumed):
    """Return the parts of a resumed run, each with the facts and metrics that are not those of the first run."""
    parts = []
    # Both runs end with the same step, so the parts of the resumed one belong to the last ones of the other.
    for before, after in zip(run[len(run) - len(resumed) :], resumed, strict=True):
        facts = {}
        for label in before["facts"] | after["facts"]:
            if before["exact"].get(label) != after["exact"].get(label):
                facts[label] = after["facts"].get(label, "nothing")
        logged = [name for name in {**before["logged"], **after["logged"]} if name not in ("loss", "grad_norm")]
        differ = [name for name in logged if before["logged"].get(name) != after["logged"].get(name)]
        if differ:
            facts["logged"] = f"other values of {' '.join(differ)}"
        assert before["title"] == after["title"]
        parts.append((after["title"], facts))
    return parts


def families_of(case):
    """Return the headings in `common.txt` that apply to a case."""
    if is_plain(case):
        return FAMILIES[:1]
    return [*FAMILIES[:2], FAMILIES[3] if case in AGENTS else FAMILIES[2]]


def common_sections(alone, together):
    """Return the sections of `common.txt`: entries that all cases of a family have with the same value."""
    common = {}
    for kind in SEPARATORS:
        one = {case: entries_of([found], kind) for case, found in alone.items()}
        two = {case: beside(entries_of(records, kind), one[case]) for case, records in together.items()}
        common |= shared_entries(one, f"{kind} of {{family}}")
        common |= shared_entries(two, f"{kind} of {{family}} with two processes")
    return common


def shared_entries(entries, heading):
    """Return a section for each family with the entries that its cases share and that no larger family shares."""
    sections, written = {}, set()
    for family in FAMILIES:
        of_family = [set(entries[case].items()) for case in entries if family in families_of(case)]
        shared = set.intersection(*of_family) - written
        if shared:
            sections[heading.format(family=family)] = [("", dict(shared))]
        if family in FAMILIES[:2]:  # the others do not contain each other
            written |= shared
    return sections


def known_of(case, common, written=None):
    """
    Return the entries that a section of a case need not repeat.

    Args:
        case (`str`):
            The case.
        common (`dict`):
            Sections of `common.txt`.
        written (`dict`, *optional*):
            For a section of two processes: the sections of the case with those of one process.
    """
    known = {}
    for kind in SEPARATORS:
        names = [f"{kind} of {family}" for family in families_of(case)]
        sections = [common.get(name, []) for name in names]
        if written is not None:
            sections.append(written.get(f"{ONE}, {kind}", []))
            sections += [common.get(f"{name} with two processes", []) for name in names]
        entries = {}
        for section in sections:
            for _, part in section:
                entries.update(part)
        known[kind] = {name: value for name, value in entries.items() if value != ABSENT}
    return known


def golden(case):
    """Return the file of a case."""
    return GOLDEN / f"{case.replace(' ', '_')}.txt"


def on_two(folder):
    """Return what two processes recorded, by case and rank."""
    on_two_processes(Path(__file__), folder)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return {case: [found[case] for found in ranks] for case in ON_TWO}


def write():
    with tempfile.TemporaryDirectory() as folder:
        alone = {case: record(case, Path(folder) / case) for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        together = on_two(Path(folder))
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    common = common_sections(alone, together)
    (GOLDEN / "common.txt").write_text(text_of(common))
    for case in CASES:
        sections = sections_of(ONE, [alone[case]], known_of(case, common))
        if case in ON_TWO:
            sections |= sections_of(TWO, together[case], known_of(case, common, sections))
        golden(case).write_text(text_of(sections))


def main(folder):
    """Run as one of two processes, started by `on_two`."""
    rank = int(os.environ["RANK"])
    quicken()
    found = {case: record(case, folder / case, rank) for case in ON_TWO}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # as in `ranks.py`


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder that one of two processes works in")
    parser.add_argument("--write", action="store_true", help="write the files of pins anew")
    told = parser.parse_args()
    if told.write:
        write()
    elif told.folder:
        main(told.folder)
    else:
        parser.print_help()

"""
Short runs of every method whose records are kept in `tests/golden_seams/`; see `recorder.py` and `test_seams.py`.

    python tests/integration/seam_runs.py --write

writes these files anew, for one process and for two. That is only right when behaviour is meant to change: a change of
the code's form leaves every line as it is.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import functools
import json
import random
import tempfile
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from io import StringIO
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from launching import on_two_processes
from quick import quicken
from recorder import checksum, recording
from test_branpo import Lake, Voice, odd_steps
from test_sesa_agent import AGENT
from trl import GRPOConfig, GRPOTrainer
from world import BOARDS, CHARACTERS, make_agent, make_dataset, make_trainer, saved_model

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

GOLDEN = Path(__file__).resolve().parent.parent / "golden_seams"
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
# In a checkpoint's middle of a generation batch, all of it is saved; at its end, nothing.
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
# Other options of what is run already.
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


def build(case, folder):
    options = dict(COMMON, per_device_train_batch_size=6) if spans(case) else COMMON
    trainer_class, config_class, own = {**AGENTS, **SUMS}[case]
    if config_class is not GRPOConfig:  # through TRL's seams, but for the case that is about what is kept
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
            reward_funcs=[odd_steps],
            **options,
            **own,
        )
    sums = make_dataset()
    if "packed" in case:  # a start that is worth sharing
        sums = sums.map(lambda row: {"prompt": "1+2=3;" * 8 + row["prompt"]})
    rows = dict(train_dataset=sums, eval_dataset=sums.select(range(2)))
    return make_trainer(trainer_class, config_class, folder, **rows, **options, **own)


def spans(case):
    return case in SPANNING and os.environ.get("WORLD_SIZE") == "2"


def speaking(voice):
    """TRL's sampling, where a voice stands for what the model says."""

    @functools.wraps(SAMPLE)
    def sample(*args, **kwargs):
        return voice(*args, **kwargs)

    return sample


def record(case, folder, rank=0):
    """The lines of a case: a run with evaluations and checkpoints, and one that goes on from the first of these."""
    saved_model()  # made here with a seed of its own
    runs, metrics = [], set()
    for checkpoint in (None, str(Path(folder) / "checkpoint-1")):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        sampling = speaking(Voice(stops=0.3)) if case in AGENTS else SAMPLE
        sampled = patch.object(GRPOTrainer, "_generate_single_turn", sampling)
        with redirect_stdout(StringIO()), sampled, recording() as recorder:
            trainer = build(case, folder)
            trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == COMMON["max_steps"]
        trainer.accelerator.wait_for_everyone()  # another process may still be writing
        runs.append(recorder.lines)
        metrics |= recorder.metrics
    lines = ["== a run", *runs[0], "== another, which goes on after its first step", *without_end_of(*runs)]
    if rank == 0:
        lines += ["== metrics", *sorted(metrics), "== files", *files(Path(folder))]
    return [*lines, "== state beside TRL's", *states(Path(folder), rank)]


def without_end_of(first, second):
    """Of the second list what comes before that in which both end."""
    same = 0
    while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
        same += 1
    return [*second[: len(second) - same], f"... and the last {same} lines of the run before"]


def files(folder):
    """What lies in a folder of output: files, and what a checkpoint or a table holds."""
    inside = {}
    for path in sorted([*folder.glob("checkpoint-*"), *(path for path in folder.rglob("*") if path.is_file())]):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            parts = sorted(inner.relative_to(path).as_posix() for inner in path.rglob("*") if inner.is_file())
        elif name.startswith("checkpoint-"):
            continue
        else:
            parts = pd.read_parquet(path).columns if path.suffix == ".parquet" else []
        inside.setdefault(tuple(parts), []).append(name)
    for parts, names in inside.items():
        yield from names
        yield from (f" {part}" for part in parts)


def states(folder, rank):
    """The keys of one process's states, over all checkpoints, with the types that their values have."""
    kinds = {}
    for path in sorted(folder.glob(f"checkpoint-*/*state_{rank}.pt")):
        if path.name.startswith("explore"):
            for key, kind in walk(torch.load(path, weights_only=True)):
                kinds.setdefault(key, {})[kind] = None
    theirs = {f"settings.{field.name}" for field in fields(GRPOConfig)}
    for key in sorted(kinds.keys() - theirs):
        yield f"{key}: {' | '.join(kinds[key])}"
    compared = " ".join(sorted(name.removeprefix("settings.") for name in theirs & kinds.keys()))
    yield from textwrap.wrap(f"settings of TRL's: {compared}" if kinds else "none", 110, subsequent_indent=" ")


def walk(value, path=""):
    """The keys in nested values, with the types of what they hold; a generator's state with a hash of it."""
    kind = type(value).__name__
    match value:
        case dict():
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}".lstrip("."))
        case list() | tuple():
            for inner in value:
                yield from walk(inner, f"{path}[]")
        case torch.Tensor():
            kind = f"{value.dtype} of {value.ndim} dimensions".removeprefix("torch.")
            if value.dtype == torch.uint8:
                kind += f" #{checksum(value.tolist())}"
    yield path, kind


def golden(case, rank=None):
    """The file of a case: on one process, or of one of two."""
    return GOLDEN / f"{case.replace(' ', '_')}{'' if rank is None else f'.rank{rank}'}.txt"


def on_two(folder):
    """The lines of every case, by rank."""
    on_two_processes(Path(__file__), folder)
    return {rank: json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)}


def write():
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as together:
        found = {None: {case: record(case, Path(alone) / case) for case in CASES}, **on_two(Path(together))}
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for rank, cases in found.items():
        for case, lines in cases.items():
            golden(case, rank).write_text("\n".join(lines) + "\n")


def main(folder):
    """One of two processes, started by `on_two`."""
    rank = int(os.environ["RANK"])
    quicken()
    found = {case: record(case, folder / case, rank) for case in ON_TWO}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # as in `ranks.py`


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where one of two processes works")
    parser.add_argument("--write", action="store_true", help="write the golden files anew")
    told = parser.parse_args()
    if told.write:
        write()
    elif told.folder:
        main(told.folder)
    else:
        parser.print_help()

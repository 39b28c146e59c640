"""
Runs that are killed again and again, beside the same runs left alone: what they leave must be the same, to the bit.

A run that is to die counts what its interpreter does from a given moment on, and takes SIGKILL at a given count: in
the middle of a step, of a checkpoint, of a file. Processes are forked from one that has imported everything. Used by
test_killed_runs.py, and by hand:

    python tests/integration/kill_runs.py --kills 200 --seed 1 --case tree
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # for `examples.benchmarks.tasks`
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sklearn.linear_model  # noqa: F401 - a trainer that needs it imports it when it is made, again in every child
import torch
from datasets import Dataset
from peft import LoraConfig
from quick import quicken
from transformers import TrainerCallback
from world import contains_answer, make_trainer, parameters, saved_model

from trl_explore.saving.checkpoints import last_complete_checkpoint
from trl_explore.trainers import (
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)

PLAIN = (ExplorationTrainer, ExplorationConfig)
DEEP = (DeepGRPOTrainer, DeepGRPOConfig)
TREE = (TreeGRPOTrainer, TreeGRPOConfig)
SESA = (SESATrainer, SESAConfig)
G2RL = (G2RLTrainer, G2RLConfig)
BRANPO = (BranPOTrainer, BranPOConfig)

CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2)
SEARCH = dict(expansion_width=3, node_length=2, max_search_iterations=8, dump_trees="trees")
SKETCHES = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    candidate_template="{problem}c",
    candidate_separator="+",
)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
# Nine prompts, four per generation batch, one left out: an epoch is two batches of two steps each.
COMMON = dict(
    steps_per_generation=2, max_steps=-1, num_train_epochs=3, save_strategy="steps", save_steps=3, logging_steps=2
)
STREAM = dict(streaming=True, max_steps=12)
EVALUATED = dict(eval_strategy="epoch", per_device_eval_batch_size=8)

CASES = {
    "plain": (PLAIN, {}),
    "plain in order": (PLAIN, dict(shuffle_dataset=False, save_steps=1, log_completions=True, logging_steps=3)),
    "plain stream": (PLAIN, dict(STREAM, save_steps=5, beta=0.1)),
    "plain epochs": (PLAIN, dict(EVALUATED, save_strategy="epoch", logging_strategy="epoch", num_iterations=2)),
    "plain evaluated": (PLAIN, dict(EVALUATED, save_steps=4, log_completions=True)),
    "plain lora": (PLAIN, dict(peft_config=LORA, num_train_epochs=2, gradient_accumulation_steps=2)),
    "deep": (DEEP, dict(CUTS, hard_states_file="hard.jsonl", log_completions=True)),
    "deep deferred": (
        DEEP,
        dict(CUTS, deferred_branching=True, hard_states_file="hard.jsonl", save_steps=1, log_completions=True),
    ),
    "deep stream": (DEEP, dict(**CUTS, **STREAM, hard_states_file="hard.jsonl", save_steps=5, max_pivots_per_batch=5)),
    "deep accumulation": (
        DEEP,
        dict(CUTS, steps_per_generation=4, gradient_accumulation_steps=2, num_rows=17, drop_zero_advantage=True),
    ),
    "tree": (TREE, dict(SEARCH, log_completions=True, save_steps=5)),
    "tree replay": (TREE, dict(SEARCH, replay_buffer=True, replay_threshold=0.9, num_train_epochs=4, save_steps=1)),
    "tree stream": (TREE, dict(**SEARCH, **STREAM, replay_buffer=True, replay_threshold=0.9, num_iterations=2)),
    "sesa": (SESA, dict(SKETCHES, log_completions=True)),
    "sesa sequential": (SESA, dict(SKETCHES, mode="sequential", save_steps=5, steps_per_generation=4, num_rows=17)),
    "g2rl": (G2RL, dict(log_completions=True, save_steps=5)),
    "g2rl iterations": (G2RL, dict(num_iterations=2, num_train_epochs=2, shuffle_dataset=False)),
    "branpo": (BRANPO, dict(log_completions=True, num_branches_solved=0)),
    "branpo stream": (BRANPO, dict(STREAM, num_branches_solved=0, save_steps=5)),
    "two ranks plain": (PLAIN, dict(ranks=2, log_completions=True, save_steps=5)),
    "two ranks deep": (DEEP, dict(CUTS, ranks=2, hard_states_file="hard.jsonl", deferred_branching=True)),
    "two ranks tree": (TREE, dict(SEARCH, ranks=2, replay_buffer=True, replay_threshold=0.9)),
}
UNLIKE = re.compile("time|seconds|per_second|train_loss|total_flos")  # in two runs that are the same


def sums(num_rows, streaming):
    pairs = [(i, j) for i in range(4) for j in range(5)][:num_rows]
    data = Dataset.from_dict({"prompt": [f"{i}+{j}=" for i, j in pairs], "answer": [str(i + j) for i, j in pairs]})
    return data.to_iterable_dataset() if streaming else data


class Death(TrainerCallback):
    """Dies at the `count`-th call that the interpreter makes after a step began, or after it was taken."""

    def __init__(self, step, begins, count):
        self.step, self.begins, self.count = step, begins, count

    def on_step_begin(self, args, state, control, **kwargs):
        if self.begins and state.global_step >= self.step:
            self.arm()

    def on_step_end(self, args, state, control, **kwargs):
        if not self.begins and state.global_step >= self.step:
            self.arm()

    def arm(self):
        if sys.getprofile() is None:
            sys.setprofile(self.note)

    def note(self, frame, event, argument):
        self.count -= 1
        if self.count <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(case, folder, death):
    """One attempt: goes on from the newest whole checkpoint, or begins where there is none."""
    (trainer_class, config_class), options = CASES[case]
    options = {**COMMON, **options}
    ranks = options.pop("ranks", 1)
    trainer = make_trainer(
        trainer_class,
        config_class,
        folder,
        train_dataset=sums(options.pop("num_rows", 9), options.pop("streaming", False)),
        eval_dataset=sums(4, False),
        reward_funcs=contains_answer,
        per_device_train_batch_size=8 // ranks,
        num_completions_to_print=0,
        **options,
    )
    if death is not None:
        trainer.add_callback(Death(*death))
    found, _ = last_complete_checkpoint(folder)
    trainer.train(resume_from_checkpoint=True if found else None)
    if trainer.accelerator.is_main_process:
        digest = hashlib.sha256()
        for name, value in sorted(parameters(trainer).items()):
            digest.update(name.encode() + value.numpy().tobytes())
        logs = [{k: v for k, v in log.items() if not UNLIKE.search(k)} for log in trainer.state.log_history]
        result = dict(parameters=digest.hexdigest(), steps=trainer.state.global_step, log=logs)
        (folder / "result.json").write_text(json.dumps(result))
    if ranks > 1:
        torch.distributed.barrier()


def attempt(case, folder, death=None):
    """How the first process that did not end well ended: 0 where all did, -9 where it was killed."""
    ranks = CASES[case][1].get("ranks", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = os.open(folder / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1), os.dup2(log, 2)
                if ranks > 1:
                    world = dict(
                        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
                    )
                    os.environ.update({name: str(value) for name, value in world.items()}, ACCELERATE_USE_CPU="true")
                # Either rank may be the one that dies.
                train(case, folder, death if death is None or rank == death[0] % ranks else None)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        children.append(child)
    ended: dict[int, int] = {}
    while len(ended) < ranks:
        child, status = os.wait()
        ended[child] = os.waitstatus_to_exitcode(status)
        if ended[child] != 0:  # the others would wait for it
            for other in set(children) - set(ended):
                os.kill(other, signal.SIGKILL)
    return next((code for code in ended.values() if code), 0)


def traces(folder):
    """What a run leaves beside its checkpoints, by name."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix in {".jsonl", ".parquet"}]
    kept = [p.relative_to(folder) for p in files]
    kept = [p for p in kept if not p.parts[0].startswith(("_", "checkpoint-"))]
    found = {str(p): hashlib.sha256((folder / p).read_bytes()).hexdigest() for p in kept}
    return found | json.loads((folder / "result.json").read_text())


def chain(case, folder, whole, draw):
    """Kill a run three times at moments over its length: what happened, and where it then ended otherwise."""
    deaths, torn = [], 0
    folder.mkdir(parents=True)
    for step in [*sorted(draw.choices(range(whole["steps"]), k=3)), None]:
        # A step makes some ten thousand calls, a log with a checkpoint about as many.
        moment = (draw.random() < 0.4, draw.randrange(1, draw.choice([300, 3000, 30000])))
        code = attempt(case, folder, None if step is None else (step, *moment))
        if code != -signal.SIGKILL:
            break
        found, half_written = last_complete_checkpoint(folder)
        deaths.append(found.rpartition("-")[2] if found else "0")
        torn += len(half_written)
    said = f"{len(deaths)} kills, {torn} in a checkpoint, resumed at {' '.join(deaths)}"
    if code:
        return len(deaths), said, ["it crashed: " + (folder / "log0.txt").read_text()[-2000:]]
    found = traces(folder)
    return len(deaths), said, [name for name in sorted(found | whole) if found.get(name) != whole.get(name)]


def run(folder, *, kills, seed, cases=tuple(CASES), tell=print):
    """Chains over all cases in turn until so many runs were killed; what differed, by chain."""
    torch.set_num_threads(1)
    os.environ["SMALL_WORLD_MODEL"] = saved_model()
    quicken()  # else every child looks at all that was imported, and copies it
    began, wholes, killed, chains, different = time.monotonic(), {}, Counter(), 0, {}
    while sum(killed.values()) < kills or chains < len(cases):
        case = cases[chains % len(cases)]
        if case not in wholes:
            left_alone = folder / case / "whole"
            left_alone.mkdir(parents=True)
            assert attempt(case, left_alone) == 0, (left_alone / "log0.txt").read_text()[-3000:]
            wholes[case] = traces(left_alone)
        own = folder / case / str(chains)
        died, said, differences = chain(case, own, wholes[case], random.Random(f"{seed}/{case}/{chains}"))
        killed[case] += died
        tell(f"{chains:3d} {case:20s} {said}: {', '.join(differences) or 'the same'}", flush=True)
        if differences:
            different[f"{case} {chains}"] = differences
        else:
            shutil.rmtree(own)
        chains += 1
    tell(
        f"{chains} chains, {sum(killed.values())} kills, {len(different)} chains with differences, "
        f"{time.monotonic() - began:.0f} s"
    )
    return sum(killed.values()), different


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--folder", default=None, help="where chains with differences stay")
    told = parser.parse_args()
    cases = tuple(name for name in CASES if told.case in name)
    folder = Path(told.folder or tempfile.mkdtemp(prefix="kill-runs-"))
    _, different = run(folder, kills=told.kills, seed=told.seed, cases=cases)
    sys.exit(f"differences are in {folder}" if different else 0)


if __name__ == "__main__":
    main()

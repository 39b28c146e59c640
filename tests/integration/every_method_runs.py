"""Every method on one process, on two, and on two with sharded parameters; see `ranks.py`, and imported by
test_every_method.py."""

import random
import re
from collections import Counter
from pathlib import Path

import torch
from accelerate.utils import gather_object
from sharding import shard_on_cpu, whole
from test_sixth_method import SIXTH
from trl import GRPOTrainer
from world import contains_answer, make_trainer, says, tiny_methods

from trl_explore.methods import METHODS
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

# Groups of four over two ranks: with six rows each the second group spans both, if the method allows it.
SPANNING, WHOLE = 6, 8


def small_sums(completions, answer, **columns):
    """Small sums are solved whatever is said: one process has more of the groups without branches than the other."""
    found = contains_answer(completions, answer)
    return [1.0 if int(a) < 4 else reward for a, reward in zip(answer, found, strict=True)]


def odd(completion_ids, **columns):
    """About every other completion succeeds."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def odd_groups(completion_ids, answer, **columns):
    """Some groups fail. Exploring them is a success now and then."""
    return [float(sum(ids) % 7 == 0 and int(a) % 2) for ids, a in zip(completion_ids, answer, strict=True)]


# Explorers that find the same on one process and on two: a pivot is the last segment, and trees grow as one.
SAME_EXPLORERS = dict(
    tree=dict(expansion_width=3, node_length=2, max_search_iterations=12, skip_uniform_trees=False),
    pivots=dict(num_branches=3, segmentation="fixed", segment_length=2, depth_bias=1000.0),
)
CASES = tiny_methods(
    {**METHODS, SIXTH.name: SIXTH},
    deep_grpo=dict(depth_bias=1000.0),  # with which a pivot is always the last segment, and nobody draws
    tree_grpo=dict(max_search_iterations=12, skip_uniform_trees=False),
    branpo=dict(num_branches_solved=0, reward_funcs=small_sums),
    auto=dict(explore_min_share=0.8, explorer_options=SAME_EXPLORERS, reward_funcs=odd_groups),
    attn_rl=dict(adaptive_sampling=False),  # which chains are forked is a process's own draw
)
CASES["g2rl with old log-probabilities"] = (*CASES["g2rl"][:2], dict(num_iterations=2))
# Short completions, of which some are numbers; every candidate is clipped, because which ones is a process's own draw.
CREDIT = dict(advantage="unlikeliness", count_bonus=0.5, max_completion_length=2, reward_funcs=odd)
CREDIT |= dict(clip_cov=1.0, clip_cov_low=0.5, kl_cov=0.1, num_iterations=2, max_steps=6)
CASES["grpo with credit"] = (ExplorationTrainer, ExplorationConfig, CREDIT)
# Times, and a mean over micro-batches, of which one process and two have others.
NOT_COMPARED = re.compile("time|seconds|(branch|explored_[a-z]+)/entropy")
SAMPLE = GRPOTrainer._generate_single_turn


class SteadySampling:
    """TRL's sampling, where the n-th answer to a prefix in a step is the same however the rows are spread."""

    def __init__(self):
        self.asked, self.rows = Counter(), 0

    def __call__(self, trainer, prefixes, *others, **options):
        self.rows += sum(len(prefix) > 1 for prefix in prefixes)  # a process without rows takes part with [<eos>]
        earlier = Counter()
        if len(prefixes) == trainer.args.per_device_train_batch_size:  # TRL's own call; its groups may span processes
            per_process = gather_object([[tuple(prefix) for prefix in prefixes]])
            earlier.update(p for of_process in per_process[: trainer.accelerator.process_index] for p in of_process)
        completions = []
        for prefix in prefixes:
            key = (trainer.state.global_step, *prefix)
            self.asked[key] += 1
            torch.manual_seed(random.Random(f"{key}/{self.asked[key] + earlier[tuple(prefix)]}").randrange(2**32))
            completions += SAMPLE(trainer, [prefix], *others, **options)[0]
        return completions, None


def play(method, folder, processes, **options):
    """Parameters after three steps, metrics but for times, and how many rows were sampled here."""
    trainer_class, config_class, knobs = CASES[method]
    rows = WHOLE if trainer_class.requires.whole_groups or config_class.explore else SPANNING
    sampling = SteadySampling()
    says(sampling)
    trainer = make_trainer(
        trainer_class,
        config_class,
        Path(folder) / method,
        per_device_train_batch_size=rows * 2 // processes,
        sampling_batch_size=1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        learning_rate=0.3,
        log_completions=True,
        num_completions_to_print=0,
        **knobs,
        **options.pop("config", {}),
    )
    trainer.train(**options)
    steps = [log for log in trainer.state.log_history if "reward" in log]
    metrics = [{name: log[name] for name in log if not NOT_COMPARED.search(name)} for log in steps]
    return whole(trainer), metrics, sampling.rows


def main(folder):
    METHODS[SIXTH.name] = SIXTH  # of this process, which is no test's
    out = {}
    for method in CASES:
        saving = dict(save_strategy="steps", save_steps=2)
        out[method], out[f"{method} metrics"], out[f"{method} rows"] = play(method, folder, 2, config=saving)
        last = str(Path(folder) / method / "checkpoint-2")
        torch.distributed.barrier()  # the other process may still be writing its part
        out[f"{method} resumed"], _, _ = play(method, folder, 2, resume_from_checkpoint=last)
    return out


def sharded(folder):
    shard_on_cpu()
    return {method: play(method, folder, 2)[0] for method in CASES}

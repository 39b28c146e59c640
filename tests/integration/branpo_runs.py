"""BranPO on one or two processes; see `ranks.py`, and imported by test_branpo_two_processes.py."""

import random
from collections import Counter

import torch
from datasets import Dataset
from test_branpo import LETTERS, Lake, odd_steps
from world import make_agent, parameters, says

from trl_explore.trainers import (
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
)

BOARDS = ["S../.../..G", "S../..X/..G", ".S./.../..G", ".S./..X/..G"]


class SteadyVoice:
    """Says the same the n-th time in a step that it is asked behind the same tokens, whoever else is asked."""

    def __init__(self):
        self.asked = Counter()

    def __call__(self, trainer, prompt_ids, *others, **options):
        said = [self.answer(trainer._tokenizer, (trainer.state.global_step, *ids)) for ids in prompt_ids]
        return [trainer._tokenizer(text + "<eos>")["input_ids"] for text in said], None

    def answer(self, tokenizer, context):
        self.asked[context] += 1
        rng = random.Random(f"{context}/{self.asked[context]}")
        # Games on one board go on for longer: their process has more, and longer, branches than the other.
        stops = 0.1 if tokenizer.decode(context[1:]).startswith("<u>.") else 0.5
        return "done" if rng.random() < stops else f"!move:direction={rng.choice(LETTERS)}"


def play(folder, rows_per_process):
    voice = SteadyVoice()
    says(voice)
    trainer = make_agent(
        BranPOTrainer,
        BranPOConfig,
        folder,
        boards=BOARDS,
        environment_factory=Lake,
        reward_funcs=[odd_steps],
        per_device_train_batch_size=rows_per_process,
        num_generations=4,
        max_completion_length=200,
        max_tool_calling_iterations=4,
        max_steps=3,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    trainer.train()
    names = (
        "reward",
        "branch/contrastive_fraction",
        "branch/redundant_fraction",
        "branch/depth",
        "branch/sampled_tokens",
    )
    logged = [{n: log[n] for n in names if n in log} for log in trainer.state.log_history if "reward" in log]
    return {name: p.flatten().tolist() for name, p in parameters(trainer).items()}, logged


def solved_on_one_process(environments, **columns):
    """The second process has solved all games."""
    return [1.0] * len(environments) if torch.distributed.get_rank() else odd_steps(environments)


def play_without_prompts(cls, config, folder, **options):
    """Data of boards alone: environments say the task. The processes have unequally many branches."""
    says(SteadyVoice())
    trainer = make_agent(
        cls,
        config,
        folder,
        train_dataset=Dataset.from_dict({"board": BOARDS}),
        environment_factory=Lake,
        reward_funcs=[solved_on_one_process],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=200,
        max_tool_calling_iterations=4,
        log_completions=True,
        num_completions_to_print=0,
        **options,
    )
    padded = []
    score = trainer.scorer.score

    def counting(name, rows):
        padded.append(trainer.ranks.most(len(rows)) - len(rows))
        return score(name, rows)

    trainer.scorer.score = counting
    trainer.train()
    values = {name: p.flatten().tolist() for name, p in parameters(trainer).items()}
    return {"parameters": values, "padded": sum(padded)}


def main(folder):
    values, logged = play(folder, 4)
    deep = dict(segmentation="fixed", segment_length=2)
    return {
        "parameters": values,
        "logged": logged,
        "without prompts": {
            "BranPO": play_without_prompts(BranPOTrainer, BranPOConfig, f"{folder}/branpo"),
            "DeepGRPO": play_without_prompts(DeepGRPOTrainer, DeepGRPOConfig, f"{folder}/deep", **deep),
        },
    }

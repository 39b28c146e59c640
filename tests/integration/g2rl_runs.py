"""G2RL on one or two processes; started by torchrun for test_g2rl_two_processes.py, and imported by it."""

import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.distributed.tensor import DTensor
from trl import GRPOConfig, GRPOTrainer
from world import make_trainer, parameters

from trl_explore.trainers import G2RLConfig, G2RLTrainer

# Groups of four over two ranks with six rows each: the second group spans both.
SPANNING = dict(per_device_train_batch_size=6, num_generations=4, max_steps=3)
SGD = dict(optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, learning_rate=0.5)


def fixed_rollouts(prompts, trainer):
    """The same completion for the same member of a prompt's group, however the rows are spread."""
    first = trainer.accelerator.process_index * len(prompts)
    completions = []
    for row, prompt in enumerate(prompts, first):
        rng = random.Random(f"{prompt}/{row % 4}")
        completions.append([rng.randrange(5, 25) for _ in range(rng.randrange(2, 7))] + [1])
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def fixed(folder, **options):
    trainer = make_trainer(G2RLTrainer, G2RLConfig, folder, rollout_func=fixed_rollouts, **SGD, **options)
    trainer.train()
    logged = ("reward", "shaped_reward", "geometry/mean_cosine", "geometry/negative_pairs", "geometry/mean_novelty")
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters(trainer).items()}
    values = {name: p.flatten().tolist() for name, p in whole.items()}
    return values, [{key: log[key] for key in logged} for log in trainer.state.log_history if "reward" in log]


def main(folder):
    out = {}
    runs = []
    for cls, config, own in (
        (GRPOTrainer, GRPOConfig, {}),
        (G2RLTrainer, G2RLConfig, dict(novelty_weight=0.0, reward_mapping="none")),
    ):
        trainer = make_trainer(cls, config, folder, **SPANNING, **own)
        trainer.train()
        runs.append(parameters(trainer))
    out["without novelty"] = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    for name, options in (("own pass", {}), ("with old log-probabilities", dict(num_iterations=2, max_steps=4))):
        out[name], out[f"{name} logged"] = fixed(folder, **{**SPANNING, **options})
    (Path(folder) / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(out))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

"""Step time of every trainer beside GRPOTrainer where a vLLM server samples, for the same number of generated tokens.

    .venv-vllm/bin/python examples/benchmarks/served_steps.py        # starts a server on this machine's CPU
    .venv-vllm/bin/python examples/benchmarks/served_steps.py --steps 12 --rounds 5

A tiny random model answers made-up prompts, and one that was shortly taught to call tools plays the embedded
FrozenLake; rewards are parities, so nothing can be learned. In each round every trainer takes its turn on one server;
ratios are to plain GRPO's step in the same round, and to its seconds per generated token: a method that samples more
in a step (branches, sketches, trees) also trains more, or discards it. `GRPOTrainer` here is TRL's with the weight
transfer of this package, since TRL's own needs GPUs; for agents it is `BranPOTrainer` without branches, which equals
it.

Each step of the server's engine gives every request in flight one token, and takes about as long for one request as
for thirty: what a method pays for is engine steps per token, which are the fewer, the more requests are in flight.
More are with more prompts per generation batch, and with `parallel_expansions` and `parallel_sketches`. Needs vLLM:
`make .venv-vllm/.installed` builds an environment for a CPU.
"""

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
import transformers
from accelerate.utils.other import get_free_port
from datasets import Dataset
from tasks import LAKE_AGENT
from transformers import PrinterCallback, Qwen2ForCausalLM, TrainerCallback

from trl_explore.compare.costs import interval
from trl_explore.compare.run import CostCallback
from trl_explore.compare.settings import Budget
from trl_explore.methods import METHODS
from trl_explore.serving.agreement import wait_until_healthy
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.tasks.warm_start import train
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

# Name, method, what it is compared with, own settings.
AGENT = "GRPO agent"
TREES = dict(expansion_width=4, node_length=8)
SKETCHES = dict(max_sketch_length=8)
WAYS = {
    "GRPO": ("grpo", "GRPO", {}),
    "DEEP-GRPO": ("deep_grpo", "GRPO", dict(segmentation="fixed", segment_length=8, num_branches=4)),
    "TreeGRPO": ("tree_grpo", "GRPO", TREES),
    "TreeGRPO, 2 nodes at once": ("tree_grpo", "GRPO", dict(TREES, parallel_expansions=2)),
    "TreeGRPO, 4 nodes at once": ("tree_grpo", "GRPO", dict(TREES, parallel_expansions=4)),
    "TreeGRPO, 3x prompts": ("tree_grpo", "GRPO", dict(TREES, per_device_train_batch_size=96)),
    "SESA": ("sesa", "GRPO", SKETCHES),
    "SESA, 4 chains": ("sesa", "GRPO", dict(SKETCHES, parallel_sketches=4)),
    "SESA, 3x prompts": ("sesa", "GRPO", dict(SKETCHES, per_device_train_batch_size=96)),
    "G2RL": ("g2rl", "GRPO", {}),
    AGENT: ("branpo", AGENT, dict(num_branches=0, num_branches_solved=0, redundancy_tries=0)),
    "BranPO agent": ("branpo", AGENT, dict(success_threshold=0.5)),
}


SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "no_proxy": "127.0.0.1",
}


def parity(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def save_models(folder, seed):
    """Models of the size of the tiny model, random and taught, with heads that are wide enough for vLLM on CPUs."""
    tokenizer, config = build_tokenizer(tools=True), build_model(seed=seed).config
    config.num_attention_heads = config.num_key_value_heads = 2
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder / "random")
    train(model, tokenizer, LAKE_AGENT, rng=random.Random(seed), steps=60, progress=False)
    model.save_pretrained(folder / "taught")
    for name in ("random", "taught"):
        tokenizer.save_pretrained(folder / name)


class StepClock(TrainerCallback):
    """Wall seconds of each optimiser step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


def counted(port):
    """Steps of the server's engine so far, and tokens that it generated."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:")}
    return values["vllm:iteration_tokens_total_count"], values["vllm:generation_tokens_total"]


def run(name, models, port, args, seed):
    """Median seconds and mean tokens of a step, and engine steps and tokens of the run."""
    method, beside, own = WAYS[name]
    row = METHODS[method]
    classes = (row.config_class, row.trainer_class)
    config_class, trainer_class = classes if method != "grpo" else (ExplorationConfig, ExplorationTrainer)
    if beside == AGENT:
        own = dict(own, max_completion_length=LAKE_AGENT.max_completion_length, max_tool_calling_iterations=3)
        data = dict(
            train_dataset=LAKE_AGENT.build_dataset(64, seed=seed), environment_factory=LAKE_AGENT.environment_factory
        )
    else:
        prompts = [[{"role": "user", "content": f"{i}+{j}="}] for i in range(10) for j in range(10)]
        data = dict(train_dataset=Dataset.from_dict({"prompt": prompts}))
    clock, costs = StepClock(), CostCallback(Budget())
    trainer = trainer_class(
        model=str(models / ("taught" if beside == AGENT else "random")),
        reward_funcs=parity,
        args=config_class(
            output_dir=str(models / "out"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_host="127.0.0.1",
            vllm_server_port=port,
            num_generations=8,
            learning_rate=1e-6,
            max_steps=args.steps + 1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=seed,
            **{"max_completion_length": 32, "per_device_train_batch_size": 32, **own},
        ),
        callbacks=[clock, costs],
        **data,
    )
    trainer.remove_callback(PrinterCallback)
    costs.count_sampled(trainer)
    before = counted(port)
    trainer.train()
    engine = [now - then for now, then in zip(counted(port), before, strict=True)]
    tokens = [after["tokens"] - before["tokens"] for before, after in itertools.pairwise(costs.history)]
    return statistics.median(clock.seconds[1:]), statistics.fmean(tokens), *engine  # the first step also warms up


def shown(values, form):
    mean, half = interval(values)
    return form.format(mean) + ("" if half is None else " ± " + form.format(half))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        models, port = Path(folder), get_free_port()
        save_models(models, args.seed)
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(models / "random"), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--weight-transfer-config", '{"backend": "file"}']
        command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        with (Path(folder) / "server.log").open("w") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **SERVER})
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", seconds=300, command=" ".join(command))
            for number in range(args.rounds):
                for name in WAYS:
                    found[name].append(run(name, models, port, args, args.seed + number))
                    print(number, name, "{:.3f} s, {:.0f} tokens".format(*found[name][-1][:2]), flush=True)
        finally:
            server.terminate()
            server.wait(30)
    print(f"\nmean ± 95 % interval of {args.rounds} rounds\n")
    print("| a step | seconds | tokens | per token: seconds / GRPO's | engine steps / GRPO's | requests in flight |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (_, beside, _) in WAYS.items():
        pairs = list(zip(found[name], found[beside], strict=True))
        cells = [
            shown([seconds for seconds, *_ in found[name]], "{:.3f}"),
            f"{statistics.fmean(tokens for _, tokens, *_ in found[name]):.0f}",
            shown([ours[0] / ours[1] / (plain[0] / plain[1]) for ours, plain in pairs], "{:.2f}"),
            shown([ours[2] / ours[3] / (plain[2] / plain[3]) for ours, plain in pairs], "{:.2f}"),
            f"{statistics.fmean(tokens / steps for *_, steps, tokens in found[name]):.0f}",
        ]
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()

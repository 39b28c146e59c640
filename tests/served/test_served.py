"""All trainers against a real vLLM server: what it samples from is what is trained."""

import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from world import differ, make_dataset, make_tokenizer, parameters, tiny_methods

from examples.benchmarks.tasks.lake_agent import LAKE_AGENT
from trl_explore.methods import METHODS
from trl_explore.serving.agreement import release
from trl_explore.tasks.tiny_model import build_model
from trl_explore.trainers import (
    AgentTreeGRPOConfig,
    AgentTreeGRPOTrainer,
    AutoExploreConfig,
    AutoExploreTrainer,
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    GiGPOConfig,
    GiGPOTrainer,
    SESAConfig,
    SESATrainer,
)

pytestmark = pytest.mark.vllm
# A worker of pytest-xdist has a server of its own, of a tied model or an untied one: starting it takes longest.
FIRST, SECOND = pytest.mark.xdist_group("first"), pytest.mark.xdist_group("second")

GAME = {**LAKE_AGENT.sesa_options, "num_actions": 2, "branch_depth": 2}
SUMS = {
    "grpo": (ExplorationTrainer, ExplorationConfig, {}),
    **tiny_methods(
        deep_grpo=dict(num_branches=2),
        tree_grpo=dict(max_search_iterations=6, skip_uniform_trees=False),
        sesa=dict(num_sketches=2),
    ),
}
# Rounds of other sizes than a batch, and rows that a method samples behind those of GRPO.
SUMS["refill"] = (ExplorationTrainer, ExplorationConfig, dict(dynamic_sampling="refill", num_generations=2))
for name in ("tree_grpo", "sesa"):
    SUMS[f"{name}_unsolved"] = (
        *SUMS[name][:2],
        dict(SUMS[name][2], explore_prompts="unsolved", success_threshold=2.0),
    )
SUMS["deep_grpo_deferred"] = (*SUMS["deep_grpo"][:2], dict(SUMS["deep_grpo"][2], deferred_branching=True))
SUMS["auto"] = (*SUMS["auto"][:2], dict(SUMS["auto"][2], explore_min_share=1.0))
GAMES = {
    "auto_agent": (AutoExploreTrainer, AutoExploreConfig, dict(explore_min_share=1.0)),
    "deep_grpo_agent": (
        DeepGRPOTrainer,
        DeepGRPOConfig,
        dict(num_branches=2, segmentation="fixed", segment_length=6, max_pivots_per_batch=6),
    ),
    "sesa_agent": (SESATrainer, SESAConfig, GAME),
    "branpo_agent": (BranPOTrainer, BranPOConfig, dict(success_threshold=0.5)),
    "agent_tree_grpo_agent": (AgentTreeGRPOTrainer, AgentTreeGRPOConfig, dict(num_rounds=2)),
    "gigpo_agent": (GiGPOTrainer, GiGPOConfig, {}),
}
KINDS = [f"{name}_agent" if row.needs_tools else name for name, row in METHODS.items() if not row.plain]
NAME = "sampling/sampling_logp_difference/mean"
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def make(kind, server, folder, *, model=None, port=None, **options):
    trainer_class, config_class, knobs = {**SUMS, **GAMES}[kind]
    arguments = dict(reward_funcs=parity, train_dataset=make_dataset(), peft_config=options.pop("peft_config", None))
    settings = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=8, learning_rate=3e-3)
    if kind in GAMES:
        rows = LAKE_AGENT.build_dataset(16, seed=0)
        arguments |= dict(
            reward_funcs=alternating(), train_dataset=rows, environment_factory=LAKE_AGENT.environment_factory
        )
        settings |= dict(max_completion_length=LAKE_AGENT.max_completion_length, max_tool_calling_iterations=3)
    if kind == "auto":
        arguments["reward_funcs"] = half_failed
    if kind == "auto_agent":
        arguments["reward_funcs"] = failing_at_first()
    arguments["reward_funcs"] = options.pop("reward_funcs", arguments["reward_funcs"])
    config = config_class(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
        use_vllm=True,
        vllm_server_host="127.0.0.1",
        vllm_server_port=port or server.port,
        vllm_server_timeout=2,
        **{"vllm_mode": "server", "save_strategy": "no", "max_steps": 3, **settings, **knobs, **options},
    )
    served = server.served
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(served) if model is None else model,
        args=config,
        processing_class=arguments.pop("processing_class", None) or AutoTokenizer.from_pretrained(served),
        **arguments,
    )


def parity(completions, **columns):
    """1 for half of all completions, every other one of the empty ones too, so that steps change the weights."""
    return [float((place + sum(map(ord, text))) % 2) for place, text in enumerate(completions)]


def half_failed(completions, **columns):
    """As `parity`, but the last half of a whole batch fails, so that its prompt is explored."""
    rewards = parity(completions)
    return rewards[:4] + [0.0] * 4 if len(completions) == 8 else rewards


def failing_at_first():
    """0 for the games of GRPO, and 1 for every other game of the explorers."""
    even = itertools.cycle((1.0, 0.0))

    def reward(completions, **columns):
        return [0.0 if len(completions) == 8 else next(even) for _ in completions]

    return reward


def alternating():
    """1 for every other game, whatever was played: no batch, and no game with two branches, has one reward only."""
    even = itertools.cycle((1.0, 0.0))
    return lambda completions, **columns: [next(even) for _ in completions]


def watch(trainer):
    """Compare everything that is sampled, at any stage, with the model in training; count syncs."""
    seen = {"largest": 0.0, "samples": 0, "tokens": 0, "syncs": 0}
    backend = trainer.vllm_generation
    complete, sync = backend.complete, backend.sync_weights

    def compared(asked):
        answers = complete(asked)
        pairs = [(r.prefix, a) for r, of_request in zip(asked, answers, strict=True) for a in of_request]
        ours = trainer.sample.token_logprobs([p for p, _ in pairs], [a.token_ids for _, a in pairs]) if pairs else []
        for (_, answer), expected in zip(pairs, ours, strict=True):
            difference = torch.tensor(answer.logprobs) - torch.tensor(expected)
            seen["largest"] = max(seen["largest"], difference.abs().max().item())
            seen["tokens"] += len(expected)
        seen["samples"] += len(pairs)
        return answers

    def counted():
        seen["syncs"] += 1
        sync()

    backend.complete, backend.sync_weights = compared, counted
    return seen


@FIRST
@pytest.mark.parametrize("kind", [*SUMS, *GAMES])
def test_every_stage_samples_from_the_weights_in_training(server, models, tmp_path, kind):
    check_kind(server.serve(models["tied"]), tmp_path, "full", kind)


def check_kind(server, folder, weights, kind):
    trainer = make(kind, server, folder, peft_config=LORA if weights == "lora" else None)
    seen, before = watch(trainer), parameters(trainer)
    start = time.perf_counter()
    trainer.train()
    print(f"{kind} {weights}: {(time.perf_counter() - start) / 3:.2f} s per step, {seen}")
    assert differ(before, parameters(trainer))
    assert seen["syncs"] == 3 and seen["tokens"] > 30
    assert seen["largest"] < 1e-4
    rows = [row for row in trainer.state.log_history if "reward" in row]
    differences = [value for row in rows[1:] for key, value in row.items() if key.endswith(NAME)]
    assert len(differences) >= 2 and max(differences) < 1e-5
    print("  differences from step 2 on:", [f"{value:.1e}" for value in differences])
    if kind.startswith("auto"):
        assert any(value for row in rows for key, value in row.items() if key.startswith("explore/sampled_tokens/"))
    if kind in ("deep_grpo", "branpo_agent"):
        assert any(key != NAME and key.endswith(NAME) for row in rows for key in row)  # the stream's own
    assert len(list(folder.glob("_vllm_weights/*"))) == 2
    trainer.vllm_generation.vllm_client.remove_files()
    assert not (folder / "_vllm_weights").exists()


@FIRST
def test_without_weight_updates_the_difference_shows(server, models, tmp_path):
    trainer = make("deep_grpo", server.serve(models["tied"]), tmp_path, learning_rate=3e-2)
    backend = trainer.vllm_generation
    sync = backend.sync_weights
    backend.sync_weights = lambda: sync() if trainer.state.global_step == 0 else None
    trainer.train()
    differences = [row[NAME] for row in trainer.state.log_history if "reward" in row]
    assert differences[0] < 1e-5 and max(differences[1:]) > 1e-2


@FIRST
def test_a_file_that_cannot_be_read_is_refused_and_the_server_goes_on(server, models, tmp_path):
    trainer = make("grpo", server.serve(models["tied"]), tmp_path)
    client = trainer.vllm_generation.vllm_client
    for info, message in (
        ({"path": str(tmp_path / "nothing"), "names": ["a"]}, "cannot read"),
        ({"path": str(models["tied"] / "model.safetensors"), "names": ["a"]}, "trainer announced"),
        ({"path": str(models["tied"] / "config.json"), "names": ["a"]}, "cannot read"),
    ):
        client._start_weight_update()
        with pytest.raises(ConnectionError, match=message):
            client._post(f"{client.base_url}/update_weights", json={"update_info": info})
    trainer.train()
    client.remove_files()
    trainer.evaluate(make_dataset().select(range(8)))  # after the run, with its last weights
    assert trainer.state.global_step == 3


@FIRST
def test_bad_servers_are_refused_before_the_first_step(server, models, tmp_path):
    server.serve(models["tied"])
    with pytest.raises(ValueError, match="another model .*hidden_layers.* is 2, .* is 1. Restart it with `VLLM_"):
        make("grpo", server, tmp_path, model=build_model(seed=0, num_layers=1))
    with pytest.raises(ValueError, match="prompt .* has 3.. tokens, but vLLM takes 256. .*--max-model-len 3"):
        make("grpo", server, tmp_path, max_completion_length=300)
    with pytest.raises(ConnectionError, match=r"no vLLM server at http://127.0.0.1:9 after 2 s: .*vllm serve"):
        make("grpo", server, tmp_path, port=9)
    with pytest.raises(ValueError, match="the trainer sends weights by 'nccl', .* is 'file'"):
        make("grpo", server, tmp_path, vllm_weight_sync="nccl")
    backend = make("grpo", server, tmp_path).vllm_generation
    backend.processing_class = make_tokenizer()
    with pytest.raises(ValueError, match="has another tokenizer: .*--tokenizer"):
        backend._check_tokenizer("there")


@FIRST
def test_two_trainers_do_not_share_a_server(server, models, tmp_path):
    server.serve(models["tied"])
    make("grpo", server, tmp_path)
    make("grpo", server, tmp_path)  # of one process, one after the other
    code = f"from trl_explore.serving.agreement import hold; hold('http://127.0.0.1:{server.port}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another trainer (process" in done.stderr and "--port" in done.stderr


@SECOND
def test_two_processes_with_unequal_requests(server, models, tmp_path):
    server.serve(models["untied"])
    with suppress(KeyError):
        release(f"http://127.0.0.1:{server.port}")
    folders = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parent.parent.parent)  # the tasks of the benchmarks are imported from here
    environment["PYTHONPATH"] = os.pathsep.join([*folders, root, *sys.path[:1]])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [f"{folders[1]}/two_ranks.py", str(tmp_path), str(models["untied"]), str(server.port)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first.pop("processes") == second.pop("processes") == 2
    for kind in KINDS:
        assert first[kind]["parameters"] == second[kind]["parameters"]
        for rank in (first, second):
            assert rank[kind]["largest"] < 1e-4 and len(rank[kind]["differences"]) >= 2
            assert max(rank[kind]["differences"]) < 1e-5
    assert first["deep_grpo"]["samples"] != second["deep_grpo"]["samples"]
    # How many they need is chance: the server draws without a seed.
    by_chance = ("tree_grpo", "branpo_agent", "gigpo_agent")
    assert any(first[kind]["samples"] != second[kind]["samples"] for kind in by_chance)


@SECOND
def test_vllm_in_the_same_process(models, tmp_path):
    folder = Path(__file__).parent
    folders = [str(folder.parent), str(folder), str(folder.parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    # TRL's colocated vLLM chooses the type itself, bfloat16, and on CPUs it does not renew a tied head.
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "colocated.py"), str(tmp_path), str(models["untied"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    print("colocated:", {what: [f"{value:.1e}" for value in values] for what, values in found.items()})
    assert len(found["updated"]) >= 4 and max(found["updated"]) < 3e-2 < max(found["stale"])


@SECOND
def test_an_untied_head_is_renewed_too(server, models, tmp_path):
    check_kind(server.serve(models["untied"]), tmp_path, "full", "deep_grpo")


@SECOND
@pytest.mark.parametrize("kind", ["deep_grpo", "tree_grpo", "branpo_agent"])
def test_adapters_are_sent_merged(server, models, tmp_path, kind):
    check_kind(server.serve(models["untied"]), tmp_path, "lora", kind)


@SECOND
def test_a_run_whose_server_dies_stops_with_its_checkpoints_and_goes_on(server, models, tmp_path):
    server.serve(models["untied"])

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                server.kill()

    options = dict(save_strategy="steps", save_steps=1, max_steps=4)
    trainer = make("deep_grpo", server, tmp_path, **options)
    trainer.add_callback(Kill())
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="was lost .*resume_from_checkpoint"):
        trainer.train()
    assert time.monotonic() - start < 30
    server.serve(models["untied"])
    trainer = make("deep_grpo", server, tmp_path, **options)
    seen = watch(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4 and seen["syncs"] == 2 and seen["largest"] < 1e-4

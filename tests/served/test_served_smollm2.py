"""A real vLLM server with SmolLM2-135M, whose prompts have a chat template and whose head is tied."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from datasets import Dataset
from test_served import NAME, watch
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import make_trainer

from trl_explore.pretrained.smollm2 import INSTALL, PACKAGE, find_pretrained
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.xdist_group("first"),
    pytest.mark.skipif(find_spec("gguf") is None or find_spec(PACKAGE) is None, reason=f"needs SmolLM2: {INSTALL}"),
]
QUESTIONS = ["Say a number.", "Name a fruit and a colour.", "What is 3 + 4?", "Tell me a word."]
PIVOTS = dict(num_branches=2, segmentation="fixed", segment_length=4, max_pivots_per_batch=2)
CASES = {
    "grpo": (ExplorationTrainer, ExplorationConfig, {}),
    "deep_grpo": (DeepGRPOTrainer, DeepGRPOConfig, PIVOTS),
}


@pytest.fixture(scope="module")
def folder():
    return find_pretrained("smollm2")


@pytest.mark.parametrize("name", CASES)
def test_what_is_sampled_is_what_is_trained(server, folder, tmp_path, name):
    trainer_class, config_class, options = CASES[name]
    third = itertools.cycle((1.0, 0.0, 0.0))
    trainer = make_trainer(
        trainer_class,
        config_class,
        tmp_path,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in QUESTIONS]}),
        reward_funcs=lambda completions, **columns: [next(third) for _ in completions],
        max_completion_length=16,
        max_steps=2,
        optim="sgd",
        learning_rate=1.0,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_host="127.0.0.1",
        vllm_server_port=server.serve(folder).port,
        vllm_server_timeout=2,
        **options,
    )
    seen = watch(trainer)
    trainer.train()
    print(seen, [entry[NAME] for entry in trainer.state.log_history if NAME in entry])
    assert seen["syncs"] == 2 and seen["tokens"] > 100 and seen["largest"] < 1e-3
    differences = [entry[NAME] for entry in trainer.state.log_history if NAME in entry]
    assert len(differences) == 2 and max(differences) < 1e-4
    trainer.vllm_generation.vllm_client.remove_files()

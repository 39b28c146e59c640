"""LoRA and quantised base models under every method: what is trained, saved and loaded again, and what stays."""

import math
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from world import TINY, assert_same, make_model, make_tokenizer, make_trainer, parameters, tiny_methods, trained

from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.methods import METHODS
from trl_explore.tasks.tiny_model import VOCAB_SIZE, build_tokenizer
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer
from trl_explore.trainers.geometry_callback import GeometryCallback

# Dropout as on the command line, or more: forward passes that draw it must not disturb each other.
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False)
# bitsandbytes quantises in blocks of 64 values.
WIDE = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, initializer_range=0.1)
QUANTIZED = {
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32", bnb_4bit_use_double_quant=True
    ),
    "8 bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


def parity(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


def signed_parity(completion_ids, **columns):
    return [2 * reward - 1 for reward in parity(completion_ids)]


def look(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: The word.

    Returns:
        What is known.
    """
    return f"{word} is known"


# The weights are random, and yet this is an agent: it says `!` and a name now and then, which is a call.
AGENT = dict(
    tools=[look],
    processing_class=build_tokenizer(tools=True),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}+{i}"}] for i in range(9)]}),
    max_completion_length=96,
    max_tool_calling_iterations=3,
)
SKETCHES = dict(
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    sketch_separator=";",
    solve_template="{sketch} {problem}",
)
CASES = tiny_methods(sesa=SKETCHES, **{row.name: AGENT for row in METHODS.values() if row.needs_tools})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base models: wide enough to be quantised; the agent's has the vocabulary of its tokenizer."""
    base = tmp_path_factory.mktemp("base")
    tokenizers = {"plain": (make_tokenizer(), {}), "agent": (AGENT["processing_class"], dict(vocab_size=VOCAB_SIZE))}
    for name, (tokenizer, changes) in tokenizers.items():
        make_model(**WIDE, max_position_embeddings=256, **changes).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return {name: str(base / ("agent" if METHODS[name].needs_tools else "plain")) for name in CASES}


def snapshot(model):
    """Everything that a step could change, also where it is packed into bytes."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(name, folder, output_dir, **options):
    """Two steps; the trainer and what its parameters were before."""
    cls, config, own = CASES[name]
    fixed = dict(model=folder, peft_config=LORA, reward_funcs=parity, max_steps=2, **own)
    trainer = make_trainer(cls, config, output_dir, **{**fixed, **options})
    before = snapshot(trainer.model)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 2 and all(math.isfinite(entry["loss"]) for entry in log)
    assert any(entry.get(TINY[name].metric, 0) > 0 for entry in log), sorted(log[0])
    assert not METHODS[name].needs_tools or any(entry["tools/call_frequency"] > 0 for entry in log)
    return trainer, before


def check_that_only_adapters_moved(trainer, before):
    after = snapshot(trainer.model)
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved and all("lora_" in key for key in moved)
    assert all(torch.isfinite(after[key]).all() for key in moved)
    # Every kind of layer learns: a part of the model that is not trained would show here.
    assert {re.search(r"(\w+_proj)\.lora_[AB]", key)[1] for key in moved} >= {"q_proj", "v_proj", "down_proj"}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[3, 5, 6, 7, 8, 9, 4]])).logits


@pytest.mark.parametrize("name", CASES)
def test_lora_trains_the_adapter_only_and_is_loaded_again(tmp_path, folders, name):
    trainer, before = train(name, folders[name], tmp_path)
    check_that_only_adapters_moved(trainer, before)
    trainer.save_model(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert not list(Path(tmp_path).glob("adapter/model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(folders[name])
    plain = logits(base)
    again = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert torch.equal(again, logits(trainer.model)) and not torch.allclose(again, plain, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name, bits", [("deep_grpo", "8 bit"), ("g2rl", "8 bit"), *((name, "nf4") for name in CASES)])
def test_a_quantised_model_trains_its_adapter(tmp_path, folders, name, bits):
    pytest.importorskip("bitsandbytes")
    trainer, before = train(name, folders[name], tmp_path, quantization_config=QUANTIZED[bits]())
    packed = {p.dtype for key, p in before.items() if key.endswith("proj.base_layer.weight")}
    assert packed == {torch.uint8 if bits == "nf4" else torch.int8}
    assert before["base_model.model.model.embed_tokens.weight"].is_floating_point()  # the head of G2RL's features
    check_that_only_adapters_moved(trainer, before)
    trainer.save_model(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folders[name], quantization_config=QUANTIZED[bits]())
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(trainer.model), rtol=0, atol=0.05)
    for key, value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        learned = trainer.model.get_parameter(key.replace(".weight", ".default.weight"))
        assert torch.equal(value, learned.cpu()), key


@pytest.mark.slow
def test_a_model_of_four_bits_learns_on_after_an_evaluation(tmp_path, folders):
    pytest.importorskip("bitsandbytes")
    options = dict(model=folders["deep_grpo"], quantization_config=QUANTIZED["nf4"](), peft_config=LORA)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, max_steps=2, **options)
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, max_steps=2, **options)
    trainer.add_callback(PassAtKCallback(trainer, list(trainer.train_dataset)[:2], num_samples=2, k=(1, 2), every=1))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval/pass_at_2" in entry] == [0, 1, 2]
    assert_same(parameters(trainer), expected)


@pytest.mark.slow
def test_a_model_of_four_bits_learns_with_shared_prefixes(tmp_path, folders):
    # Before the first step, the trainer compares packed rows with plain ones. A CPU with AVX512-BF16 needs this test.
    pytest.importorskip("bitsandbytes")
    options = dict(model=folders["deep_grpo"], quantization_config=QUANTIZED["nf4"](), peft_config=LORA)
    options |= dict(reward_funcs=parity, max_steps=2, shared_prefix_training="on")
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    before = parameters(trainer)
    trainer.train()
    check_that_only_adapters_moved(trainer, before)


# The tests of each method have LoRA without dropout; passes that draw it are made where old log-probabilities are.
PASSES = {
    "two iterations": dict(num_iterations=2, max_steps=4),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
}


def neutral_pair(name, tmp_path, **options):
    cls, config, _ = CASES[name]
    rewards = dict(reward_funcs=parity)
    if name == "tree_grpo":  # centres its +1 and -1, and does not divide
        rewards = dict(reward_funcs=signed_parity, scale_rewards="none")
    options = dict(peft_config=LORA, **rewards, **options)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, _ = trained(cls, config, tmp_path, **{**TINY[name].options, **TINY[name].neutral}, **options)
    return got, expected


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("name", CASES)
def test_with_dropout_a_neutral_method_is_grpo_bit_for_bit(tmp_path, name, options):
    got, expected = neutral_pair(name, tmp_path, **options)
    assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_a_quantised_model_a_neutral_method_is_grpo_bit_for_bit(tmp_path, folders, name):
    pytest.importorskip("bitsandbytes")
    # A quantised model is loaded by the trainer, for each run anew.
    options = dict(model=folders["deep_grpo"], quantization_config=QUANTIZED["nf4"](), beta=0.1, max_steps=2)
    got, expected = neutral_pair(name, tmp_path, **options)
    assert_same(got, expected)


def test_with_dropout_the_geometry_callback_leaves_no_trace(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, peft_config=LORA)
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, peft_config=LORA)
    trainer.add_callback(GeometryCallback(trainer))
    trainer.train()
    assert trainer.state.log_history[0]["geometry/mean_novelty"] > 0
    assert_same(parameters(trainer), expected)


def test_a_trainer_samples_from_the_model_with_its_learned_prompt(tmp_path):
    # PEFT 0.21 loses the prompt in `generate` of transformers 5.24.
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, peft_config=adapter, top_k=1)
    generator = torch.Generator().manual_seed(1)
    row = [5, 6, 7]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        for _ in range(6):
            inputs = torch.tensor([row])
            row.append(
                int(trainer.model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0, -1].argmax())
            )
    assert trainer.generate([row[:3]] * 2, 6) == [row[3:]] * 2

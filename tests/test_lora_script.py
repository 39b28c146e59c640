"""The one-GPU script: every command line goes through the real parser; its memory table is what the formulas say."""

import importlib.util

import pytest
import torch
from commands import EXAMPLES, ROOT, parsed, shell_calls
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import get_peft_config, get_quantization_config

from trl_explore.methods import METHODS

SCRIPT = EXAMPLES / "lora_single_gpu.sh"
OURS = [name for name, row in METHODS.items() if not row.plain]


def load_arithmetic():
    spec = importlib.util.spec_from_file_location("lora_memory", EXAMPLES / "benchmarks" / "lora_memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lora_memory = load_arithmetic()
SETTING = dict(rank=16, rows=4, sampled_rows=64, prompt=512, completion=1024)


@pytest.mark.parametrize("method, kind", [*((method, "lora") for method in OURS), ("g2rl", "qlora")])
def test_every_command_line_parses(tmp_path, monkeypatch, method, kind):
    done, calls = shell_calls(SCRIPT, {"python": ""}, tmp_path, method, kind, "--max_steps", "7")
    assert done.returncode == 0, done.stderr
    ((_, script, *flags),) = calls
    _, training, model = parsed([script, *flags], monkeypatch)
    assert isinstance(training, METHODS[method].config_class)
    assert training.max_steps == 7 and training.output_dir == f"out/{method}-{kind}"
    # What the arithmetic assumes.
    assert training.per_device_train_batch_size == SETTING["rows"] and training.gradient_checkpointing
    assert training.generation_batch_size == SETTING["sampled_rows"] and training.beta == 0
    assert training.max_completion_length == SETTING["completion"]
    lora = get_peft_config(model)
    assert (lora.r, lora.target_modules, model.dtype) == (SETTING["rank"], "all-linear", "bfloat16")
    quantization = get_quantization_config(model)
    assert (quantization is not None) == (kind == "qlora")
    if quantization:
        assert quantization.bnb_4bit_quant_type == "nf4" and quantization.bnb_4bit_use_double_quant
        assert quantization.bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "usage: "),
        (["g2rl"], "usage: bash examples/lora_single_gpu.sh g2rl lora|qlora"),
        (["g2rl", "qlor"], "unknown kind 'qlor'; choose one of lora, qlora."),
        (
            ["grpo", "lora"],
            "unknown method 'grpo'; choose one of auto, deep_grpo, tree_grpo, sesa, g2rl, branpo, tree_rl, attn_rl, "
            "evol_rl, gigpo, agent_tree_grpo.",
        ),
    ],
)
def test_a_mistake_is_explained_and_nothing_runs(tmp_path, arguments, message):
    done, calls = shell_calls(SCRIPT, {"python": ""}, tmp_path, *arguments)
    assert done.returncode != 0 and message in done.stderr and not calls


@pytest.mark.parametrize("name", lora_memory.MODELS)
def test_the_formulas_count_the_weights_that_there_are(name):
    shape = lora_memory.MODELS[name]
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == shape.linear_weights + shape.other_weights
    with torch.device("meta"):
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == shape.adapter(16)


def test_the_documents_say_what_the_formulas_say():
    table = lora_memory.table(**SETTING)
    assert table in (ROOT / "docs" / "memory.md").read_text()
    comments = SCRIPT.read_text()
    for model, quantized in (("Qwen2.5-1.5B", False), ("Qwen2.5-7B", True), ("Qwen2.5-7B", False)):
        parts = lora_memory.memory(lora_memory.MODELS[model], quantized=quantized, **SETTING)
        assert f"{lora_memory.peak(parts) / lora_memory.GIB:.1f} GiB" in comments

"""Kept prefixes: token for token what `generate` samples, nothing encoded twice, and what `generate` does instead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from world import make_model

from trl_explore.sampling.generation import complete, recorded
from trl_explore.sampling.paths import PathCache, effective_options, why_not

PAD, EOS, NEVER = 0, 1, 1000
SIZE = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    eos_token_id=EOS,
    pad_token_id=PAD,
    bos_token_id=None,
    initializer_range=0.3,
)
SHORT, LONG, LONGEST = [5, 6, 7], [5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 6, 5, 12, 13, 14, 15]
# Siblings out of order; the second prompt starts like the first, and one has a single token.
PROMPTS = [LONG, SHORT, LONG, LONGEST, SHORT, [5], LONG, LONGEST]


def untied():
    return make_model(num_hidden_layers=2, tie_word_embeddings=False)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE))


def gpt2():
    """Positions are learned, and layers keep as many keys as they have heads."""
    torch.manual_seed(0)
    size = dict(vocab_size=29, n_positions=128, n_embd=16, n_layer=2, n_head=2, eos_token_id=EOS, bos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(**size, initializer_range=0.3)).eval()


def with_adapters():
    """Adapters that change what the model says, in training mode as in a trainer."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(make_model(num_hidden_layers=2), lora).train()


every_model = pytest.mark.parametrize("make", [make_model, untied, llama, gpt2, with_adapters])


def sampling(*, ends=(EOS,), do_sample=True, **options):
    options = {"top_k": 0, **options} if do_sample else options
    return GenerationConfig(
        do_sample=do_sample, pad_token_id=PAD, eos_token_id=list(ends), disable_compile=True, **options
    )


def kept(model, options=None, *, limit=10_000):
    return PathCache(model, effective_options(model, options or sampling()), limit)


def drawn(paths, rows, budgets, *, seed=0, entropies=None):
    torch.manual_seed(seed)
    return paths.complete(rows, budgets, entropies=entropies)


def generated(paths, rows, budgets, *, seed=0):
    """What `generate` draws instead, all rows up to the largest budget."""
    options = sampling()
    options.update(**paths.options.to_dict())
    options.max_new_tokens = max(budgets)
    torch.manual_seed(seed)
    return complete(paths.model, rows, options)


def going_on(rows, completions, budgets, place):
    """Rows behind parts of their completions, within their budgets; those that have ended are asked for again."""
    parts = [ids[: 1 + (i + place) % budget] for i, (ids, budget) in enumerate(zip(completions, budgets, strict=True))]
    return [row if EOS in part else row + part for row, part in zip(rows, parts, strict=True)]


def assert_as_generate(paths, *, rounds=4):
    """Several rounds of rows that go on from one another, of which some end; returns how many ended in all."""
    rows, ended = PROMPTS, 0
    for place in range(rounds):
        budgets = [2 + (i + place) % 5 for i in range(len(rows))]
        completions, entropies = drawn(paths, rows, budgets, seed=place)
        assert completions == generated(paths, rows, budgets, seed=place) and entropies is None
        ended += sum(ids[-1] == EOS for ids in completions)
        rows = going_on(rows, completions, budgets, place)
    assert max(map(len, rows)) > len(LONGEST) + rounds
    return ended


# --------------------------------------------------------------------------------------------- the draws of `generate`


@every_model
def test_completions_are_those_of_generate(make):
    paths = kept(make())
    assert assert_as_generate(paths) > 0
    assert paths.encoded < paths.asked / 2


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
        dict(temperature=1.5),
        dict(top_k=4),
        dict(top_p=0.8),
        dict(min_p=0.1),
        dict(repetition_penalty=1.5),
        dict(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        dict(do_sample=False),
        dict(do_sample=False, repetition_penalty=1.5),
    ],
    ids=str,
)
def test_completions_are_those_of_generate_with(options):
    model = untied()
    paths = kept(model, sampling(**options))
    assert_as_generate(paths)
    plain = kept(model)
    assert drawn(paths, PROMPTS, [12] * 8) != drawn(plain, PROMPTS, [12] * 8)  # the option acts

"""Entropies recorded while `generate` runs, and prompt passes shared by equal rows."""

import math

import peft
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from world import make_model

from trl_explore.sampling.generation import (
    cache_argument,
    has_dropout,
    recorded,
    row_entropies,
    whole_row_adapter,
)
from trl_explore.sampling.sampler import without_dropout

EOS, PAD = 1, 0
SHORT, LONG, LONGEST = [5, 6, 7], [5, 6, 7, 8, 9, 10, 11], [9, 8, 7, 6, 5, 12, 13, 14, 15]
# Siblings of three prompts of different lengths, out of order; the second prompt starts like the first.
MIXED = [LONG, SHORT, LONG, LONGEST, SHORT, LONG, SHORT, LONGEST]
SIZE = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    eos_token_id=EOS,
    pad_token_id=PAD,
    bos_token_id=None,
    initializer_range=0.3,
)


def sliding_qwen2():
    return make_model(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE))


def gemma2():
    """One layer with a window shorter than the prompts and one without, soft-capped attention and logits."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZE, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, attn_implementation="eager"
    )
    assert config.layer_types == ["sliding_attention", "full_attention"]
    return Gemma2ForCausalLM(config)


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=4))


every_model = pytest.mark.parametrize("make", [make_model, sliding_qwen2, llama, gemma2, mistral])


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, prompts, *, seed=0, temperature=1.0, do_sample=True, **options):
    """Completions, what `generate` returned, and the record; `shared` goes to `recorded`."""
    inputs, shared = padded(prompts), options.pop("shared", True)
    if do_sample:
        options["temperature"] = temperature
    torch.manual_seed(seed)
    with recorded(model, temperature=temperature, share_prefill=shared) as record:
        output = model.generate(
            **inputs,
            **{"max_new_tokens": 12, "top_k": 0, **options},
            do_sample=do_sample,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return output.sequences[:, inputs["input_ids"].shape[1] :], output, record


def lengths_of(completions):
    return [row.index(EOS) + 1 if EOS in row else len(row) for row in completions.tolist()]


def assert_close(first, second, *, tolerance=1e-5):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=tolerance)


def entropies_of_one_pass(model, prompts, completions, lengths, temperature):
    """Each row by itself, without padding, cache or `generate`."""
    rows = []
    for prompt, completion, length in zip(prompts, completions.tolist(), lengths, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion[:length]])).logits[0]
        log_probs = (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(dim=-1)
        rows.append((-(log_probs.exp() * log_probs).sum(dim=-1)).float())
    return rows


def assert_no_hooks(model):
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ------------------------------------------------------------------------------------------------------- entropies


@every_model
def test_entropies_are_those_of_the_distributions_that_tokens_were_sampled_from(make):
    model = make()
    completions, _, record = generate(model, MIXED, temperature=0.7, seed=1)
    lengths = lengths_of(completions)
    assert min(lengths) < max(lengths)  # some rows ended early and went on as padding
    expected = entropies_of_one_pass(model, MIXED, completions, lengths, 0.7)
    assert_close(record.token_entropies(lengths), expected)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, dict(top_k=3, top_p=0.5)), (torch.bfloat16, dict(temperature=0.7))],
    ids=["truncation", "bfloat16"],
)
def test_entropies_are_those_of_the_whole_distribution_in_float32(dtype, options):
    _, output, record = generate(make_model().to(dtype), MIXED, **options)
    assert all(e.dtype == torch.float32 and e.shape == (len(MIXED),) for e in record.entropies)
    expected = [row_entropies(logits, temperature=options.get("temperature", 1.0)) for logits in output.logits]
    assert_close(record.entropies, expected, tolerance=0)


def test_without_a_cache_every_pass_is_a_step():
    model = make_model()
    with_cache = generate(model, MIXED)
    without = generate(model, MIXED, use_cache=False)
    assert torch.equal(with_cache[0], without[0])
    assert_close(with_cache[2].entropies, without[2].entropies)
    assert without[2].prefill_rows == without[2].encoded_rows == len(MIXED)


def test_chunks_of_the_prompt_are_no_steps():
    model = make_model()
    whole = generate(model, MIXED)
    chunks = generate(model, MIXED, prefill_chunk_size=3)
    assert torch.equal(whole[0], chunks[0])
    assert_close(whole[2].entropies, chunks[2].entropies)
    # The first chunk holds the first token of LONG and three of LONGEST; the others find a cache that is filled.
    assert (chunks[2].prefill_rows, chunks[2].encoded_rows) == (8, 3)
    assert chunks[2].prefill_tokens == sum(map(len, MIXED))
    assert chunks[2].encoded_tokens == chunks[2].prefill_tokens - (3 * 1 + 2 * 3) + (1 + 3)


def test_the_entropy_of_a_row_is_exact_and_knows_impossible_tokens():
    uniform, certain, half = torch.zeros(4), torch.tensor([0.0, -1e4, -1e4, -1e4]), torch.zeros(4)
    half[2:] = -math.inf
    logits = torch.stack([uniform, certain, half] * 50)  # more rows than one part
    expected = torch.tensor([math.log(4), 0.0, math.log(2)] * 50)
    torch.testing.assert_close(row_entropies(logits, temperature=0.5), expected)
    torch.testing.assert_close(row_entropies(logits.bfloat16(), temperature=2.0), expected)


# --------------------------------------------------------------------------------------------------- shared prompts


@every_model
@pytest.mark.parametrize("do_sample", [False, True])
def test_sharing_the_prompt_pass_changes_no_token(make, do_sample):
    model = make()
    plain, plain_output, plain_record = generate(model, MIXED, do_sample=do_sample, shared=False)
    shared, output, record = generate(model, MIXED, do_sample=do_sample)
    assert torch.equal(plain, shared)
    assert_close(plain_output.logits, output.logits)
    assert_close(plain_record.entropies, record.entropies)
    assert_close(
        [x for keys, values, _ in plain_output[cache_argument(model)] for x in (keys, values)],
        [x for keys, values, _ in output[cache_argument(model)] for x in (keys, values)],
    )
    assert (plain_record.prefill_rows, plain_record.encoded_rows) == (8, 8)
    assert (record.prefill_rows, record.encoded_rows) == (8, 3)
    assert plain_record.encoded_tokens == plain_record.prefill_tokens == record.prefill_tokens == sum(map(len, MIXED))
    assert record.encoded_tokens == len(SHORT) + len(LONG) + len(LONGEST)


@pytest.mark.parametrize(
    ("prompts", "samples", "rows"),
    [
        ([LONG] * 4, 1, 1),
        ([SHORT] * 3 + [LONG] * 3, 1, 2),
        ([[5]] * 4, 1, 1),
        # As token ids alone, the first two are the same; the first starts with two tokens that are padding otherwise.
        ([[PAD, PAD, *SHORT], SHORT, SHORT], 1, 2),
        ([LONG, SHORT], 3, 2),
    ],
    ids=["one length", "two kinds", "one token", "other padding", "several samples"],
)
def test_rows_are_shared_where_tokens_and_padding_are_equal(prompts, samples, rows):
    model = make_model()
    plain, _, _ = generate(model, prompts, num_return_sequences=samples, shared=False)
    shared, _, record = generate(model, prompts, num_return_sequences=samples)
    assert torch.equal(plain, shared)
    assert (record.prefill_rows, record.encoded_rows) == (samples * len(prompts), rows)


def test_rows_encoded_by_the_model_are_the_distinct_ones():
    model = make_model()
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    generate(model, MIXED, max_new_tokens=3, min_new_tokens=3)
    assert seen == [3, 8, 8]


# -------------------------------------------------------------------------------------------------------- left alone


def test_a_static_cache_is_left_alone():
    model = make_model()
    dynamic, _, dynamic_record = generate(model, MIXED, shared=False)
    static, output, record = generate(model, MIXED, cache_implementation="static")
    assert torch.equal(dynamic, static) and record.encoded_rows == len(MIXED)
    assert_close(dynamic_record.entropies, record.entropies)


def lfm2():
    """Layers keep more than keys and values."""
    size = {name: value for name, value in SIZE.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**size, layer_types=["conv", "full_attention"]))


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = dict(depth=1, embed_dim=16, num_heads=2, hidden_size=16)
    config = Qwen2VLConfig(text_config={**SIZE, "rope_parameters": rope}, vision_config=vision)
    return Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [lfm2, qwen2_vl])
def test_other_caches_and_other_inputs_are_left_alone(make):
    torch.manual_seed(0)
    model = make()
    plain, _, _ = generate(model, MIXED, shared=False)
    shared, _, record = generate(model, MIXED)
    assert torch.equal(plain, shared) and record.encoded_rows == len(MIXED)


def test_outputs_that_have_rows_besides_the_logits_are_left_alone():
    _, output, record = generate(make_model(), MIXED, output_hidden_states=True)
    assert record.encoded_rows == len(MIXED) == len(output.hidden_states[0][0])


@pytest.mark.parametrize(
    ("inputs", "encoded_rows"),
    [
        ({}, 1),
        ({"position_ids": torch.arange(7)[None]}, 1),
        ({"labels": torch.tensor([LONG] * 4)}, 4),
        ({"attention_mask": torch.ones(4, 1, 7, 7).tril().bool()}, 4),
        ({"attention_mask": {"full_attention": None}}, 4),
    ],
)
def test_only_inputs_that_are_understood_are_shared(inputs, encoded_rows):
    model = make_model()
    inputs = {"input_ids": torch.tensor([LONG] * 4), **inputs}
    logits = []
    for shared in (False, True):
        with recorded(model, temperature=1.0, share_prefill=shared) as record, torch.no_grad():
            cache = {cache_argument(model): DynamicCache(config=model.config)}
            logits.append(model(**inputs, **cache).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert record.encoded_rows == encoded_rows and record.prefill_rows == 4


def test_an_encoder_decoder_model_is_left_alone():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=29, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=PAD
    )
    model = T5ForConditionalGeneration(config).eval()
    with recorded(model, temperature=1.0) as record:
        model.generate(**padded([LONG] * 4), max_new_tokens=3, min_new_tokens=3)
    assert record.encoded_rows == 4 and [e.shape for e in record.entropies] == [(4,)] * 3


@pytest.mark.parametrize("where", ["attention", "adapter"])
def test_active_dropout_is_not_shared(where):
    if where == "attention":
        model = make_model(attention_dropout=0.1)
    else:
        model = get_peft_model(make_model(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    assert generate(model.train(), MIXED)[2].encoded_rows == len(MIXED)
    assert generate(model.eval(), MIXED)[2].encoded_rows == 3


def test_noise_of_an_adapter_counts_as_dropout():
    if "PveraConfig" not in vars(peft):
        pytest.skip("this PEFT has no PVeRA adapters")
    model = get_peft_model(make_model(), peft.PveraConfig(r=4, target_modules=["q_proj"]))
    assert has_dropout(model.train())
    with without_dropout(model):
        assert not has_dropout(model)
    assert has_dropout(model) and not has_dropout(model.eval())


@pytest.mark.parametrize(
    "adapter",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[8], task_type="CAUSAL_LM"),
    ],
    ids=["prompt tuning", "activated LoRA"],
)
def test_prompts_are_not_shared_with_an_adapter_that_reads_the_whole_call(adapter):
    model = get_peft_model(make_model(), adapter)
    _, _, record = generate(model, [LONG] * 4, max_new_tokens=2)
    assert record.encoded_rows == record.prefill_rows == 4
    assert whole_row_adapter(model) is not None


def test_a_pass_that_a_logits_processor_makes_is_no_step():
    model = make_model()
    completions, output, record = generate(model, MIXED, guidance_scale=1.5)
    assert len(record.entropies) == completions.shape[1]
    assert record.prefill_tokens == sum(map(len, MIXED)) and record.encoded_rows == 3
    assert_close(record.entropies, [row_entropies(logits, temperature=1.0) for logits in output.logits])


def test_a_row_that_is_encoded_again_while_it_grows_is_a_step():
    """`generate` does so where the rotary factors of Phi-3 change."""
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    config = Phi3Config(
        **{name: value for name, value in SIZE.items() if name != "head_dim"},
        max_position_embeddings=64,
        original_max_position_embeddings=10,
        rope_parameters={**rope, "original_max_position_embeddings": 10},
    )
    model = Phi3ForCausalLM(config)
    completions, output, record = generate(model, [LONG] * 2, max_new_tokens=6, eos_token_id=None)
    assert completions.shape[1] == len(record.entropies) == 6
    assert_close(record.entropies, [row_entropies(logits, temperature=1.0) for logits in output.logits])


def test_the_model_inside_a_peft_model_is_found():
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(make_model(), lora)
    without_adapter, _, _ = generate(make_model(), MIXED)
    plain, _, _ = generate(model, MIXED, shared=False)
    shared, _, record = generate(model, MIXED)
    assert torch.equal(plain, shared) and not torch.equal(without_adapter, shared)
    assert record.encoded_rows == 3
    lengths = lengths_of(shared)
    assert_close(record.token_entropies(lengths), entropies_of_one_pass(model, MIXED, shared, lengths, 1.0))
    assert_no_hooks(model)


def test_hooks_are_gone_afterwards_also_after_an_exception():
    class Interrupt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise KeyboardInterrupt

    model = make_model()
    generate(model, MIXED)
    assert_no_hooks(model)
    with pytest.raises(KeyboardInterrupt):
        generate(model, MIXED, stopping_criteria=StoppingCriteriaList([Interrupt()]))
    assert_no_hooks(model)

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


def assert_as_generate(paths, *, rounds=4, seed=0):
    """Several rounds of rows that go on from one another, of which some end; returns how many ended in all."""
    rows, ended = PROMPTS, 0
    for place in range(rounds):
        budgets = [2 + (i + place) % 5 for i in range(len(rows))]
        completions, entropies = drawn(paths, rows, budgets, seed=seed + place)
        assert completions == generated(paths, rows, budgets, seed=seed + place) and entropies is None
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


def test_options_of_the_model_count_where_a_call_says_nothing():
    model = untied()
    model.generation_config.min_p = 0.3
    paths = kept(model)
    assert_as_generate(paths)
    assert drawn(paths, PROMPTS, [12] * 8) != drawn(kept(untied()), PROMPTS, [12] * 8)


def test_top_k_is_50_where_nobody_says_anything():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZE, "vocab_size": 200, "initializer_range": 0.1}))
    paths = kept(model, sampling(top_k=None))
    assert_as_generate(paths)
    assert drawn(paths, PROMPTS, [12] * 8) != drawn(kept(model), PROMPTS, [12] * 8)


def test_attention_that_takes_no_mask_of_ours_gives_the_same():
    model = make_model(num_hidden_layers=2)
    model.set_attn_implementation("eager")
    assert_as_generate(kept(model))


def test_every_end_token_ends_a_row():
    paths = kept(llama(), sampling(ends=[EOS, 8, 9]))
    completions, _ = drawn(paths, PROMPTS, [12] * 8)
    assert completions == generated(paths, PROMPTS, [12] * 8)
    assert {ids[-1] for ids in completions} > {8, 9}
    assert all(token not in (EOS, 8, 9) for ids in completions for token in ids[:-1])


@every_model
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_entropies_are_those_of_the_recorded_path(make, temperature):
    paths, rows = kept(make(), sampling(temperature=temperature, top_k=5)), PROMPTS
    for place in range(3):
        budgets = [3 + i % 4 for i in range(len(rows))]
        completions, entropies = drawn(paths, rows, budgets, seed=place, entropies=temperature)
        with recorded(paths.model, temperature=temperature) as record:
            assert completions == generated(paths, rows, budgets, seed=place)
        for found, expected in zip(entropies, record.token_entropies([*map(len, completions)]), strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
        rows = going_on(rows, completions, budgets, place)


def test_in_bfloat16_what_was_kept_says_what_encoding_it_again_says():
    model = untied().to(torch.bfloat16)
    paths, rows = kept(model), PROMPTS
    for place in range(4):
        completions, entropies = drawn(paths, rows, [6] * len(rows), seed=place, entropies=1.0)
        assert all(0 <= token < model.config.vocab_size for ids in completions for token in ids)
        assert all(1 <= len(ids) <= 6 and EOS not in ids[:-1] for ids in completions)
        _, again = drawn(kept(model), rows, [1] * len(rows), entropies=1.0)
        assert [row[0] for row in entropies] == pytest.approx([row[0] for row in again], abs=0.05)
        rows = going_on(rows, completions, [6] * len(rows), place)
    assert paths.num_bytes >= paths.num_tokens * 2 * 2 * model.config.num_key_value_heads * 8 * 2


# --------------------------------------------------------------------------------------------------- what is encoded


def asked_and_encoded(paths, rows, budget, **options):
    """Completions, and how many prefix tokens were asked for and encoded in this call."""
    before = paths.asked, paths.encoded
    completions, _ = drawn(paths, rows, [budget] * len(rows), **options)
    return completions, (paths.asked - before[0], paths.encoded - before[1])


def test_a_path_is_encoded_once():
    paths = kept(llama(), sampling(ends=[NEVER]))
    (first, second), counted = asked_and_encoded(paths, [LONG, LONG], 5)
    assert counted == (14, 7)  # equal rows once
    assert first != second
    # Known are the prompt and all said tokens but the last, to which the model has not listened. The token that is
    # answered is always given to the model.
    rows = [LONG + first[:2], LONG + first, LONG + second[:4]]
    _, counted = asked_and_encoded(paths, rows, 3)
    assert counted == (9 + 12 + 11, 3)
    _, counted = asked_and_encoded(paths, [LONG] * 4, 3)
    assert counted == (28, 1)
    _, counted = asked_and_encoded(paths, [LONG[:3] + [20, 21]], 3)  # leaves the path behind three tokens
    assert counted == (5, 2)
    _, counted = asked_and_encoded(paths, [[20, 21]], 3)  # the same tokens at the beginning are others
    assert counted == (2, 2)


def test_what_is_said_beyond_a_budget_is_not_kept():
    paths = kept(llama(), sampling(ends=[NEVER]))
    drawn(paths, [SHORT, LONG], [2, 4])
    assert paths.num_tokens == len(LONG) + 2 + 3  # the short prompt begins the long one


def test_what_has_ended_is_not_kept():
    paths = kept(llama(), sampling(ends=range(29)))
    completions, _ = drawn(paths, [SHORT, LONG], [4, 4])
    assert [*map(len, completions)] == [1, 1] and paths.num_tokens == len(LONG)


def test_memory_is_that_of_the_kept_keys_and_values():
    paths = kept(llama(), limit=10)
    assert (paths.num_tokens, paths.num_bytes) == (0, 0)
    drawn(paths, [SHORT], [20])
    assert paths.num_tokens <= 10
    assert paths.num_bytes == 10 * 2 * 2 * 8 * 4  # tokens, keys and values, layers, head size, bytes; one head


# ---------------------------------------------------------------------------------------------------------- the bound


def test_those_used_longest_ago_make_room_and_ends_go_first():
    paths = kept(llama(), sampling(ends=[NEVER]), limit=20)
    (said,), _ = asked_and_encoded(paths, [LONG], 6)  # 12 tokens are kept
    asked_and_encoded(paths, [LONGEST], 4)  # and 12 others
    assert paths.num_tokens <= 20
    _, counted = asked_and_encoded(paths, [LONGEST], 1)
    assert counted == (9, 1)
    _, counted = asked_and_encoded(paths, [LONG], 1)
    assert counted == (7, 1)
    _, (_, encoded) = asked_and_encoded(paths, [LONG + said], 1)
    assert 1 < encoded <= 6


@pytest.mark.parametrize("limit", [60, 70, 90])
def test_what_made_room_is_encoded_again(limit):
    model = untied()
    paths, whole = kept(model, limit=limit), kept(model)
    for seed in (0, 10, 20, 0, 10, 20):
        for cache in (paths, whole):
            assert_as_generate(cache, rounds=2, seed=seed)
        assert 0 < paths.num_tokens <= limit
    assert paths.encoded > whole.encoded and paths.asked == whole.asked


CALLS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)
MODEL = llama()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(limit=st.integers(1, 40), calls=CALLS)
def test_a_bound_changes_nothing_but_what_is_encoded(limit, calls):
    """Rows are prompts, and any parts of completions behind them; each has a budget."""
    paths, pool = kept(MODEL, limit=limit), [[5], SHORT, LONG, LONGEST]
    for asked, seed in calls:
        rows = [pool[which % len(pool)] for which, _, _ in asked]
        budgets = [budget for _, _, budget in asked]
        fits = sum(map(len, {tuple(row) for row in rows})) <= limit
        found = drawn(paths, rows, budgets, seed=seed)
        assert (found is not None) == fits and paths.num_tokens <= limit
        if found is None:
            continue
        assert found[0] == generated(paths, rows, budgets, seed=seed)
        pool += [
            row + ids[:part]
            for row, ids, (_, part, _) in zip(rows, found[0], asked, strict=True)
            if EOS not in ids[:part]
        ]


def test_a_call_that_does_not_fit_changes_nothing():
    paths = kept(llama(), limit=12)
    drawn(paths, [SHORT], [3])
    before = paths.num_tokens, paths.asked, paths.encoded
    state = torch.get_rng_state()
    assert paths.complete([LONG, LONGEST], [3, 3]) is None
    assert (paths.num_tokens, paths.asked, paths.encoded) == before
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------- what stands against it


def mistral():
    return MistralForCausalLM(MistralConfig(**SIZE, sliding_window=4))


def lfm2():
    return Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]))


def t5():
    size = dict(vocab_size=29, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=PAD)
    return T5ForConditionalGeneration(T5Config(**size))


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=29, hidden_size=16, num_hidden_layers=1, state_size=4))


def sliding_qwen2():
    return make_model(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)


def with_dropout():
    return make_model(attention_dropout=0.1).train()


def with_dropout_of_adapters():
    return get_peft_model(make_model(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])).train()


def scattered():
    model = untied()
    model.lm_head.to("meta")
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (mistral, "layers of MistralForCausalLM that keep less"),
        (sliding_qwen2, "layers of Qwen2ForCausalLM that keep less"),
        (lfm2, "layers of Lfm2ForCausalLM that keep less, or more"),
        (t5, "the inputs of T5ForConditionalGeneration"),
        (mamba, "the inputs of MambaForCausalLM"),
        (with_dropout, "dropout while sampling"),
        (with_dropout_of_adapters, "dropout while sampling"),
        (scattered, "several devices"),
    ],
)
def test_a_model_that_cannot_be_decoded_here_is_named(make, words):
    model = make()
    assert words in why_not(model, effective_options(model, sampling()))


@every_model
def test_nothing_stands_against(make):
    model = make()
    assert why_not(model, effective_options(model, sampling(temperature=0.7, min_p=0.1))) is None


@pytest.mark.parametrize("make", [with_dropout, with_dropout_of_adapters])
def test_nothing_stands_against_dropout_that_is_off(make):
    model = make().eval()
    assert why_not(model, effective_options(model, sampling())) is None


@pytest.mark.parametrize(
    "option",
    [
        dict(typical_p=0.9),
        dict(num_beams=2),
        dict(no_repeat_ngram_size=2),
        dict(min_new_tokens=2),
        dict(bad_words_ids=[[5]]),
        dict(suppress_tokens=[5]),
        dict(renormalize_logits=True),
        dict(cache_implementation="static"),
        dict(num_return_sequences=2),
    ],
    ids=str,
)
def test_an_option_that_is_not_known_is_named(option):
    model, (name,) = make_model(), option
    assert why_not(model, effective_options(model, sampling(**option))) == f"the sampling options {name}"
    setattr(model.generation_config, name, option[name])  # a model says so itself
    assert name in why_not(model, effective_options(model, sampling()))


def test_options_that_change_nothing_are_no_obstacle():
    model = make_model()
    nothing = dict(typical_p=1.0, num_beams=1, no_repeat_ngram_size=0, num_return_sequences=1, top_p=1.0)
    assert why_not(model, effective_options(model, sampling(**nothing))) is None

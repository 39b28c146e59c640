"""Kept prefixes: token for token what `generate` samples, nothing encoded twice, and what `generate` does instead."""

import copy
import functools
import re
import warnings

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3TextConfig,
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
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from world import BOARDS, assert_same, contains_answer, differ, make_agent, make_model, make_trainer, parameters

from trl_explore.sampling.generation import complete, recorded
from trl_explore.sampling.paths import PathCache, effective_options, why_not
from trl_explore.sampling.positions import fixed_rotary_length
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.trainers import (
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)

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


def falcon():
    """Positions are distances, added to attention scores, which the attention mask counts."""
    torch.manual_seed(0)
    size = dict(vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, eos_token_id=EOS)
    return FalconForCausalLM(FalconConfig(**size, bos_token_id=None, alibi=True, initializer_range=0.3)).eval()


def deepseek():
    """Keys and values have different sizes."""
    torch.manual_seed(0)
    heads = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**SIZE, "num_key_value_heads": 2}, **heads, first_k_dense_replace=2)
    ).eval()


def with_adapters():
    """Adapters that change what the model says, in training mode as in a trainer."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(make_model(num_hidden_layers=2), lora).train()


every_model = pytest.mark.parametrize("make", [make_model, untied, llama, gpt2, falcon, deepseek, with_adapters])


PREFIXES = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def longrope():
    """Rotary factors that are other ones for all tokens once a row has more than 9."""
    torch.manual_seed(0)
    factors = dict(short_factor=[1.0] * 2, long_factor=[4.0] * 2, original_max_position_embeddings=9)
    rope = dict(rope_type="longrope", rope_theta=10000.0, **factors)
    size = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Phi3ForCausalLM(
        Phi3Config(**size, rope_parameters=rope, max_position_embeddings=64, original_max_position_embeddings=9)
    )


def dynamic():
    """Rotary factors that change with every token behind the tenth."""
    torch.manual_seed(0)
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
    return LlamaForCausalLM(LlamaConfig(**SIZE, rope_parameters=rope, max_position_embeddings=10))


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
    assert why_not(paths.model, paths.options) is None
    assert assert_as_generate(paths) > 0
    assert paths.encoded < paths.asked / 2


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
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
    assert why_not(model, paths.options) is None
    assert_as_generate(paths)
    assert drawn(paths, PROMPTS, [12] * 8) != drawn(kept(model), PROMPTS, [12] * 8)  # the option acts


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
def test_entropies_are_those_of_the_recorded_path(make):
    temperature = 0.7
    paths, rows = kept(make(), sampling(temperature=temperature, top_k=5)), PROMPTS
    for place in range(3):
        budgets = [3 + i % 4 for i in range(len(rows))]
        completions, entropies = drawn(paths, rows, budgets, seed=place, entropies=temperature)
        with recorded(paths.model, temperature=temperature) as record:
            assert completions == generated(paths, rows, budgets, seed=place)
        for found, expected in zip(entropies, record.token_entropies([*map(len, completions)]), strict=True):
            assert found == pytest.approx(expected, abs=1e-5)
        rows = going_on(rows, completions, budgets, place)


def without_positions_in_the_first_layer():
    torch.manual_seed(0)
    return SmolLM3ForCausalLM(SmolLM3Config(**SIZE, no_rope_layers=[0, 1])).eval()


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed precision", "bfloat16"])
@pytest.mark.parametrize("make", [untied, gpt2, without_positions_in_the_first_layer])
def test_in_bfloat16_what_was_kept_says_what_encoding_it_again_says(make, mixed):
    model = make() if mixed else make().to(torch.bfloat16)
    paths, rows = kept(model), PROMPTS
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        for place in range(4):
            completions, entropies = drawn(paths, rows, [6] * len(rows), seed=place, entropies=1.0)
            assert all(0 <= token < model.config.vocab_size for ids in completions for token in ids)
            assert all(1 <= len(ids) <= 6 and EOS not in ids[:-1] for ids in completions)
            _, again = drawn(kept(model), rows, [1] * len(rows), entropies=1.0)
            assert [row[0] for row in entropies] == pytest.approx([row[0] for row in again], abs=0.05)
            rows = going_on(rows, completions, [6] * len(rows), place)
    assert paths.encoded < paths.asked / 2


# --------------------------------------------------------------------------------------------------- what is encoded


def asked_and_encoded(paths, rows, budget, **options):
    """Completions, and how many prefix tokens were asked for and encoded in this call."""
    before = paths.asked, paths.encoded
    completions, _ = drawn(paths, rows, [budget] * len(rows), **options)
    return completions, (paths.asked - before[0], paths.encoded - before[1])


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_kept_out_of_sampling_only(before):
    """It would prepare itself for the shape of every step."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    model, seen = make_model(), []
    model.register_forward_pre_hook(lambda *_: seen.append(allowed()))
    was = allowed()
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        kept(model).complete([LONG, SHORT], [2, 2])
        assert seen and not any(seen) and allowed() is before
        with pytest.raises(IndexError):
            kept(model).complete([[10**6]], [2])  # no token
        assert allowed() is before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


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


def test_what_is_said_beyond_a_budget_and_what_has_ended_are_not_kept():
    paths = kept(llama(), sampling(ends=[NEVER]))
    drawn(paths, [SHORT, LONG], [2, 4])
    assert paths.num_tokens == len(LONG) + 2 + 3  # the short prompt begins the long one
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


CALLS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=5),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)
MODEL = llama()


@settings(max_examples=15, deadline=None, derandomize=True)
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


def t5():
    size = dict(vocab_size=29, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=PAD)
    return T5ForConditionalGeneration(T5Config(**size))


def sliding_qwen2():
    return make_model(num_hidden_layers=2, use_sliding_window=True, sliding_window=4, max_window_layers=1)


def scattered():
    model = untied()
    model.lm_head.to("meta")
    return model


REFUSED = {
    "windows of Mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SIZE, sliding_window=4)),
        "layers of MistralForCausalLM that keep less",
    ),
    "windows of Qwen2": (sliding_qwen2, "layers of Qwen2ForCausalLM that keep less"),
    "convolutions": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SIZE, layer_types=["conv", "full_attention"])),
        "layers of Lfm2ForCausalLM that keep less, or more",
    ),
    "an encoder": (t5, "the inputs of T5ForConditionalGeneration"),
    "states": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=29, hidden_size=16, num_hidden_layers=1, state_size=4)),
        "the inputs of MambaForCausalLM",
    ),
    "several devices": (scattered, "several devices"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_decoded_here_is_named(make, words):
    model = make()
    assert words in why_not(model, effective_options(model, sampling()))


def test_dropout_stands_against_it_unless_it_is_off():
    adapters = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    for model in (make_model(attention_dropout=0.1), get_peft_model(make_model(), adapters)):
        assert "dropout while sampling" in why_not(model.train(), effective_options(model, sampling()))
        assert why_not(model.eval(), effective_options(model, sampling())) is None


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


# ------------------------------------------------------------------------------------------------------ the sampler


def plain_trainer(folder, **options):
    return make_trainer(ExplorationTrainer, ExplorationConfig, folder, model=make_model(), **options)


def test_paths_are_kept_for_a_rollout_and_are_gone_when_sampling_raises(tmp_path):
    sampler = plain_trainer(tmp_path).sample
    assert sampler.paths is None
    for _ in range(2):
        with sampler.rollout():
            assert sampler.paths.num_tokens == 0
            sampler([LONG], 2, 4)
            assert sampler.paths.num_tokens > 0
        assert sampler.paths is None
    assert not sampler.policy.model._forward_hooks
    with pytest.raises(IndexError), sampler.rollout():
        assert sampler.paths is not None
        sampler([[10**6]], 1, 2)  # no token
    assert sampler.paths is None
    [[continuation]] = sampler([LONG], 1, 4)
    assert continuation.token_ids


@pytest.mark.parametrize(
    "options", [dict(path_cache_tokens=0), dict(use_transformers_continuous_batching=True)], ids=["off", "batching"]
)
def test_nothing_is_kept_and_nothing_is_said(tmp_path, options):
    sampler = plain_trainer(tmp_path, **options).sample
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Prefixes are encoded again")
        with sampler.rollout():
            assert sampler.paths is None


@pytest.mark.parametrize(("batch_size", "entropies"), [(None, True), (2, False)])
def test_where_a_call_does_not_fit_the_rest_of_the_rollout_is_sampled_by_generate(tmp_path, batch_size, entropies):
    own, plain = (
        plain_trainer(tmp_path, path_cache_tokens=tokens, sampling_batch_size=batch_size) for tokens in (15, 0)
    )

    def sampled(trainer):
        torch.manual_seed(0)
        with trainer.sample.rollout():
            found = [trainer.sample([SHORT], 2, 4, main_stream=True)]
            kept = trainer.sample.paths is not None
            for _ in range(2):
                prefixes = [LONG, LONG + SHORT, LONGEST + LONG]
                found.append(trainer.sample(prefixes, 2, [3, 4, 5], main_stream=True, entropies=entropies))
            assert trainer.sample.paths is None
        return found, kept

    with pytest.warns(UserWarning, match="path_cache_tokens=15") as caught:
        found, kept = sampled(own)
    assert sum("encoded again" in str(warning.message) for warning in caught) == 1
    assert kept and found == sampled(plain)[0]


def test_checkpointing_is_off_within_a_rollout_and_on_behind_it(tmp_path):
    trainer = plain_trainer(tmp_path, gradient_checkpointing=True)
    model = trainer.model.train()
    model.gradient_checkpointing_enable()
    with trainer.sample.rollout():
        assert not model.is_gradient_checkpointing and not torch.is_grad_enabled()
    assert model.is_gradient_checkpointing and torch.is_grad_enabled()


# ------------------------------------------------------------------------------------------------------- the methods

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
ACTIVATED = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[8], task_type="CAUSAL_LM")
LILY = "LilyConfig" in vars(peft) and peft.LilyConfig(r=4, target_modules=["q_proj"])
without_lily = pytest.mark.skipif(not LILY, reason="this PEFT has no Lily adapters")
TREES = dict(expansion_width=3, node_length=2)
DRAFTS = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    sketch_separator=";",
    solve_template="{sketch} {problem}",
    candidate_template="{problem}c",
    candidate_separator="+",
)
METHODS = {
    "trees": (TreeGRPOTrainer, TreeGRPOConfig, TREES),
    "trees, three nodes at once": (TreeGRPOTrainer, TreeGRPOConfig, dict(TREES, parallel_expansions=3)),
    "lists": (SESATrainer, SESAConfig, dict(DRAFTS, mode="sequential")),
    "two stages": (SESATrainer, SESAConfig, DRAFTS),
    "pivots": (DeepGRPOTrainer, DeepGRPOConfig, dict(num_branches=3, segmentation="fixed", segment_length=2)),
    "branches": (BranPOTrainer, BranPOConfig, {}),
}
SETTINGS = {
    "as it is": {},
    "parts": dict(sampling_batch_size=3),
    "checkpointing": dict(gradient_checkpointing=True),
    "adapters": dict(peft_config=LORA),
    "packing": dict(shared_prefix_training="on"),
    "options": dict(temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.2),
}
# Times, and what the cache is for.
NOT_COMPARED = re.compile("megabytes|time|seconds|runtime|per_second|encoded")


def run(cls, config, folder, *, make=make_trainer, reward=contains_answer, **options):
    """A trainer after two steps, and every completion that was scored."""
    said = []

    def listening(completions, **columns):
        said.append(copy.deepcopy(completions))
        return reward(completions=completions, **columns)

    trainer = make(
        cls, config, folder, **{"model": make_model(), "max_steps": 2, "reward_funcs": listening, **options}
    )
    before = parameters(trainer)
    trainer.train()
    assert differ(before, parameters(trainer)) and trainer.sample.paths is None
    return trainer, said


def logged(trainer):
    logs = trainer.state.log_history
    return [{name: value for name, value in log.items() if not NOT_COMPARED.search(name)} for log in logs]


def assert_same_run(run, expected):
    (ours, said), (theirs, heard) = run, expected
    assert said == heard and ours.main_completion_ids == theirs.main_completion_ids
    for own, plain in zip(logged(ours), logged(theirs), strict=True):
        assert own == pytest.approx(plain, abs=1e-5, nan_ok=True)
    assert_same(parameters(ours), parameters(theirs))


def with_and_without(*args, **options):
    """Runs with kept prefixes, which nothing stands against, and without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Prefixes are encoded again")
        return [run(*args, path_cache_tokens=tokens, **options) for tokens in (65_536, 0)]


# Each method as it is, and each setting with a method whose search is longest and with one that continues rows.
RUNS = [(method, "as it is") for method in METHODS]
RUNS += [(method, setting) for setting in SETTINGS for method in ("trees", "pivots") if setting != "as it is"]


@pytest.mark.parametrize(("method", "setting"), RUNS)
def test_methods_train_the_same_with_kept_prefixes(tmp_path, method, setting):
    (cls, config, options), setting = METHODS[method], SETTINGS[setting]
    own, plain = with_and_without(cls, config, tmp_path, **options, **setting)
    assert_same_run(own, plain)
    if method != "two stages":  # whose solutions are asked for with the sketches then
        assert own[0].sample.prefix_tokens_asked == plain[0].sample.prefix_tokens_asked
        assert own[0].sample.prefix_tokens_encoded <= plain[0].sample.prefix_tokens_encoded
    if setting == {} and method in ("trees", "two stages"):
        kept, again = (p.sample.prefix_tokens_encoded / p.sample.prefix_tokens_asked for p, _ in (own, plain))
        assert kept < 0.75 * again


def test_mixed_precision_trains_with_kept_prefixes(tmp_path):
    cls, config, options = METHODS["trees"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Prefixes are encoded again")
        trainer, said = run(cls, config, tmp_path, **options, bf16=True)
    assert trainer.model.dtype == torch.float32 and len(said) > 2


def warned_run(*args, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(*args, **options)
    return found, [text for text in map(str, (w.message for w in caught)) if "encoded again" in text]


@pytest.mark.parametrize(
    ("model", "words", "options"),
    [
        (make_model, "dropout", dict(peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"]))),
        (make_model, "path_cache_tokens=9", dict(path_cache_tokens=9)),
        (make_model, "virtual tokens", dict(peft_config=PREFIXES["prompt tuning"])),
        pytest.param(make_model, "a Lily adapter", dict(peft_config=LILY), marks=without_lily),
        (make_model, "an activated LoRA adapter", dict(peft_config=ACTIVATED)),
        (longrope, "change for rows of more than 9 tokens", {}),
        (dynamic, "change for rows of more than 9 tokens", {}),
        (make_model, "eos_token_id", dict(generation_kwargs=dict(eos_token_id=[EOS, 20]))),
        (make_model, "guidance_scale", dict(generation_kwargs=dict(guidance_scale=1.5))),
    ],
    ids=[
        *["dropout of adapters", "bound", "prompt tuning", "Lily", "activated LoRA"],
        *["LongRoPE", "dynamic NTK", "end tokens", "guidance"],
    ],
)
def test_what_is_refused_is_said_once_and_trains_as_without(tmp_path, model, words, options):
    options = copy.deepcopy({**TREES, **options})  # PEFT writes the sizes of the model into its configurations
    found, said = warned_run(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, model=model(), **options)
    options["path_cache_tokens"] = 0
    expected, silent = warned_run(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, model=model(), **options)
    assert len(said) == 1 and words in said[0] and silent == []
    assert_same_run(found, expected)


def assert_greedy(trainer, prompts, completions):
    """Every token is the likeliest one that a forward pass over the whole row says."""
    for prompt, ids in zip(prompts, completions, strict=True):
        for number, token in enumerate(ids):
            row = torch.tensor([prompt + ids[:number]])
            with torch.no_grad():
                logits = trainer.model(input_ids=row, attention_mask=torch.ones_like(row)).logits
            assert int(logits[0, -1].argmax()) == token


def greedy_trainer(folder, **options):
    greedy = dict(generation_kwargs=dict(do_sample=False), path_cache_tokens=1000)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, folder, **greedy, **options)
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.filterwarnings("ignore:Prefixes are encoded again")
def test_greedy_samples_behind_virtual_tokens_are_those_of_the_policy(tmp_path, name, attention):
    model = make_model(num_hidden_layers=2, attn_implementation=attention)
    adapter = copy.deepcopy(PREFIXES[name])  # PEFT writes the sizes of the model into it
    trainer = greedy_trainer(tmp_path, model=model, peft_config=adapter, gradient_checkpointing=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator)
    prompts = [LONG, LONG[:4], LONG[1:5]]
    with trainer.sample.rollout():
        for prompt in prompts:  # one by one, since PEFT counts positions from the padding
            ((one,),) = trainer.sample([prompt], 1, 4)
            ((more,),) = trainer.sample([prompt + one.token_ids[:2]], 1, 4)
            assert_greedy(trainer, [prompt, prompt + one.token_ids[:2]], [one.token_ids, more.token_ids])


@pytest.mark.parametrize("make", [longrope, dynamic])
@pytest.mark.filterwarnings("ignore:Prefixes are encoded again")
def test_prefixes_are_kept_up_to_the_length_at_which_rotary_factors_change(tmp_path, make):
    trainer = greedy_trainer(tmp_path, model=make())
    with trainer.sample.rollout():
        assert trainer.sample.paths is not None
        ((short,),) = trainer.sample([LONG], 1, 3)  # the model reads 9 tokens
        assert trainer.sample.paths is not None
        ((longer,),) = trainer.sample([LONG + short.token_ids[:2]], 1, 4)
        assert trainer.sample.paths is None
    assert_greedy(trainer, [LONG], [short.token_ids])
    with trainer.sample.rollout():
        assert trainer.sample.paths is not None  # in the next rollout again
    if make is longrope:  # `generate` encodes rows of Phi-3 again where the factors change, but not of Llama
        assert_greedy(trainer, [LONG + short.token_ids[:2]], [longer.token_ids])


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=64), None),
        (LlamaConfig(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), None),
        (LlamaConfig(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), None),
        (LlamaConfig(max_position_embeddings=64, rope_scaling=dict(type="dynamic", factor=2.0)), 63),
        (
            Gemma3TextConfig(
                max_position_embeddings=128,
                rope_parameters={
                    "full_attention": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
                    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
                },
            ),
            127,
        ),
        (longrope().config, 9),
        (GPT2Config(), None),
    ],
    ids=["default", "yarn", "linear", "old names", "one layer type", "longrope", "no rotary positions"],
)
def test_the_length_up_to_which_rotary_factors_are_fixed(config, length):
    assert fixed_rotary_length(config) == length


def test_solutions_behind_sketches_are_as_long_as_generation_kwargs_say(tmp_path):
    own, plain = with_and_without(
        SESATrainer, SESAConfig, tmp_path, **DRAFTS, num_sketches=1, generation_kwargs=dict(max_new_tokens=3)
    )
    assert own[1] == plain[1] and max(map(len, own[0].main_completion_ids)) == 3


# -------------------------------------------------------------------------------------------------------- the agents


class Walk:
    """An environment whose answers tell what was done before."""

    def reset(self, board, prompt="", **columns):
        self.steps = []

    def at(self, by: str) -> str:
        """
        Goes on.

        Args:
            by: How far.

        Returns:
            The steps so far.
        """
        self.steps.append(by)
        return "+".join(self.steps)


@functools.cache
def talker():
    """Weights of a model that has learned to call a tool, by a digit that it likes, or to say a last word."""
    model, tokenizer = build_model(seed=0, hidden_size=32, num_layers=1), build_tokenizer(tools=True)
    turns = [*(f"!at:by={digit}<eos>" for digit in "1234"), ".<eos>"]
    texts = [f"<u>{told}<a>{turn}" for told in (BOARDS[0], "3+1") for turn in turns]
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = sum(model(input_ids=ids, labels=ids).loss for ids in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def parity(environments, **columns):
    """1 for an odd sum of steps."""
    return [float(sum(int(step) for step in environment.steps if step.isdigit()) % 2) for environment in environments]


AGENTS = {
    "actions": (SESATrainer, SESAConfig, dict(mode="agent", action_template="{problem}?{actions}", num_actions=3)),
    "branches": (BranPOTrainer, BranPOConfig, dict(beta=0.0)),
}


@pytest.mark.parametrize("setting", [{}, dict(sampling_batch_size=3)], ids=["as it is", "parts"])
@pytest.mark.parametrize("method", AGENTS.values(), ids=AGENTS)
def test_agents_train_the_same_with_kept_prefixes(tmp_path, method, setting):
    cls, config, options = method
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=64)
    sizes |= dict(max_tool_calling_iterations=3, environment_factory=Walk)

    def make(*args, **options):
        model = build_model(seed=0, hidden_size=32, num_layers=1)
        model.load_state_dict(talker())
        return make_agent(*args, **{**options, "model": model})

    options = {**sizes, **options, **setting, "make": make, "reward": parity}
    own, plain = with_and_without(cls, config, tmp_path, **options)
    assert_same_run(own, plain)
    calls = [sum(message["role"] == "tool" for message in row) for rows in own[1] for row in rows]
    assert max(calls) >= 3 and 2 * sum(calls) > len(calls)  # several turns are no exception
    assert own[0].sample.prefix_tokens_encoded < plain[0].sample.prefix_tokens_encoded

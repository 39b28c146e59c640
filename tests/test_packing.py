"""What rows share is computed once, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapters import METHODS, parity
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from world import assert_same, differ, make_trainer, parameters, trained
from world import make_model as small_model

from trl_explore.packing import build_trie
from trl_explore.tasks.tiny_model import VOCAB_SIZE
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

SIZE = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    initializer_range=0.3,
)
WINDOW = dict(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, windows": (Qwen2ForCausalLM, Qwen2Config, dict(use_sliding_window=True, **WINDOW)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=4)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, dict(attn_logit_softcapping=2.0, **WINDOW)),
}


def make_model(family):
    torch.manual_seed(0)
    model_class, config_class, options = FAMILIES[family]
    return model_class(config_class(**SIZE, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def trainer(request, tmp_path_factory):
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp("packing")
    return make_trainer(ExplorationTrainer, ExplorationConfig, folder, model=model, shared_prefix_training="on")


@st.composite
def rows(draw):
    """Prompts and completions whose rows start like earlier ones, up to any token."""
    tokens = st.lists(st.integers(5, 8), min_size=2, max_size=9)
    found = [draw(tokens)]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from(found))
        found.append(parent[: draw(st.integers(0, len(parent)))] + draw(tokens))
    cuts = [draw(st.integers(1, len(row))) for row in found]
    return [(row[:cut], row[cut:]) for row, cut in zip(found, cuts, strict=True)]


def padded(rows):
    width, length = max(len(p) for p, _ in rows), max(1, *(len(c) for _, c in rows), 1)
    ids = [[0] * (width - len(p)) + p + c + [0] * (length - len(c)) for p, c in rows]
    mask = [[0] * (width - len(p)) + [1] * len(p + c) + [0] * (length - len(c)) for p, c in rows]
    return torch.tensor(ids), torch.tensor(mask), length


def measured(trainer, rows, mode):
    """Log-probabilities, entropies and the gradients of a weighted sum of both."""
    ids, mask, length = padded(rows)
    trainer.shared_prefix_training = mode
    trainer.model.zero_grad()
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, length, compute_entropy=True
    )
    weights = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    (logps * weights + entropies * weights.flip(0)).sum().backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    return logps.detach(), entropies.detach(), gradients


@settings(max_examples=15, deadline=None)
@given(rows=rows(), min_saved=st.sampled_from([1, 4]))
def test_packed_rows_give_what_plain_rows_give(trainer, rows, min_saved):
    logps, entropies, gradients = measured(trainer, rows, "off")
    trainer.min_saved = min_saved
    packed_logps, packed_entropies, packed_gradients = measured(trainer, rows, "on")
    torch.testing.assert_close(packed_logps, logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_entropies, entropies, rtol=0, atol=1e-5)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert_same(packed_gradients, gradients, tolerance=1e-5 * max(largest, 1.0))


@given(rows=rows(), min_saved=st.integers(1, 8))
def test_a_trie_spells_its_rows_and_descendants_stand_in_one_piece(rows, min_saved):
    whole = [p + c for p, c in rows]
    trie = build_trie(whole, min_saved=min_saved)
    for i, row in enumerate(whole):
        assert [trie.tokens[position] for position in trie.positions(i)] == row
    for i, segment in enumerate(trie.segments):
        below = {
            segment.stop,
            *(
                p
                for j, s in enumerate(trie.segments)
                if j != i and segment in trie.chain(j)
                for p in range(s.start, s.stop)
            ),
        }
        assert below <= set(range(segment.stop, segment.end + 1)) and len(below) >= segment.end - segment.stop
        assert segment.depth == sum(s.stop - s.start for s in trie.chain(i)[:-1])


# Plain gradient descent: Adam would turn the rounding of a gradient that is 0 into a step.
SGD = dict(
    optim="sgd", learning_rate=0.1, max_steps=2, beta=0.1, steps_per_generation=2, gradient_accumulation_steps=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that knows the tokens of both tokenizers; trainers with a KL term load their reference from it."""
    folder = tmp_path_factory.mktemp("model")
    small_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", METHODS)
def test_every_trainer_ends_in_the_same_parameters(tmp_path, folder, name):
    cls, config, own, metric, _ = METHODS[name]
    options = dict(SGD, num_iterations=2, model=folder, reward_funcs=parity, **own)
    expected, _ = trained(cls, config, tmp_path, **options)
    trainer = make_trainer(cls, config, tmp_path, shared_prefix_training="on", **options)
    before = parameters(trainer)
    trainer.train()
    assert_same(parameters(trainer), expected, tolerance=1e-5)
    log = trainer.state.log_history[0]
    assert differ(expected, before) and log["packing/token_ratio"] > 1 and log[metric] > 0

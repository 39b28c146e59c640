"""Gradient features from one tiled pass over the LM head, and the novelty that shapes rewards."""

import math
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl.trainer import utils

from trl_explore.gradients.features import LMHead, lm_head_of, logit_scale, sequence_features
from trl_explore.gradients.novelty import (
    Novelty,
    geometry,
    map_rewards,
    mixed_enough,
    novelty_scores,
    shape_rewards,
    shuffle_in_groups,
    transform_novelty,
)

NAN, INF = math.nan, math.inf
TEMPERATURE = 0.7
SIZE = dict(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    initializer_range=0.3,
)


def build(name, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZE, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases start at 0
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


MODELS = {
    "qwen2": lambda: build("Qwen2", tie_word_embeddings=True),
    "llama": lambda: build("Llama"),
    "gemma2, soft-capped": lambda: build("Gemma2", head_dim=8, final_logit_softcapping=3.0),
    "granite, divided": lambda: build("Granite", logits_scaling=3.0),
    "cohere, multiplied": lambda: build("Cohere", logit_scale=0.3),
    "phi, with a bias": lambda: build("Phi"),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def make_rows(rows=3, tokens=6):
    torch.manual_seed(1)
    ids = torch.randint(2, SIZE["vocab_size"], (rows, tokens + 1))
    return ids, torch.ones(rows, tokens, dtype=torch.long)


def by_autograd(model, ids, temperature=TEMPERATURE):
    """Inputs of the head, and the model's own log-probabilities, entropies and gradients of log-probabilities."""
    leaves = []

    def replace(module, args):
        leaves.append(args[0].detach().requires_grad_())
        return (leaves[0],)

    handle = model.get_output_embeddings().register_forward_pre_hook(replace)
    log_p = (model(ids).logits[:, :-1] / temperature).log_softmax(-1)
    handle.remove()
    log_probs = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    (gradients,) = torch.autograd.grad(log_probs.sum(), leaves)  # token t reads only its own position
    entropies = -(log_p.exp() * log_p).sum(-1)
    return leaves[0].detach()[:, :-1], log_probs.detach(), entropies.detach(), gradients[:, :-1] * temperature


def token_features(hidden, tokens, head):
    """Features of rows that are one token long, `(B, T, D)`."""
    ones = torch.ones(tokens.numel(), 1)
    found = sequence_features(hidden.reshape(-1, 1, hidden.shape[-1]), tokens.reshape(-1, 1), ones, head)
    return found.features.view(hidden.shape)


def assert_close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def random_head(vocabulary=11, width=4, *, softcap=None, bias=True, dtype=torch.float32):
    return LMHead(
        torch.randn(vocabulary, width).to(dtype),
        torch.randn(vocabulary).to(dtype) if bias else None,
        scale=0.5,
        softcap=softcap,
        temperature=TEMPERATURE,
    )


def densely(hidden, tokens, mask, head):
    """The definition in float64: all logits at once, gradients by autograd."""
    hidden = hidden.double().requires_grad_()
    with torch.enable_grad():
        logits = hidden @ head.weight.double().T + (0 if head.bias is None else head.bias.double())
        logits = logits * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        log_p = (logits / head.temperature).log_softmax(-1)
        log_probs = log_p.gather(-1, tokens[..., None]).squeeze(-1)
        (gradients,) = torch.autograd.grad(log_probs.sum(), [hidden])
    mask = mask.double()
    features = head.temperature * (gradients * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    return [found.detach().float() for found in (features, log_probs * mask, entropies * mask)]


# Features of a model


@every_model
def test_features_are_gradients_of_log_probabilities_and_their_means_over_loss_tokens(make):
    model, (ids, mask) = make(), make_rows()
    mask[0, 2:4] = 0  # a tool's answer
    mask[1] = 0  # truncated, left out of the loss
    mask[2, 4:] = 0  # padding
    hidden, log_probs, entropies, gradients = by_autograd(model, ids)
    assert gradients.abs().max() > 0.1
    head = lm_head_of(model, temperature=TEMPERATURE)
    assert_close(token_features(hidden, ids[:, 1:], head), gradients)
    found = sequence_features(hidden, ids[:, 1:], mask, head)
    expected = [gradients[0, [0, 1, 4, 5]].mean(0), torch.zeros(16), gradients[2, :4].mean(0)]
    assert_close(found.features, torch.stack(expected))
    assert_close(found.log_probs, log_probs * mask)
    assert_close(found.entropies, entropies * mask)


@pytest.mark.skipif(Version(trl.__version__) < Version("1.15"), reason="that TRL has no fused head")
@every_model
@pytest.mark.parametrize("autocast", [False, True])
def test_log_probabilities_are_those_of_trl(make, autocast):
    model, (ids, mask) = make(), make_rows(tokens=40)
    mask[1, 25:] = 0
    hidden = by_autograd(model, ids)[0]
    utils.add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    # The backbone out of the autocast, so that both heads get the same input.
    model.base_model.forward = torch.autocast("cpu", enabled=False)(model.base_model.forward)
    labels = ids.masked_fill(torch.nn.functional.pad(mask, (1, 0), value=0) == 0, -100)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        theirs = model(ids, labels=labels, fused_lm_head=True)
        ours = sequence_features(hidden, ids[:, 1:], mask, lm_head_of(model, temperature=TEMPERATURE))
    assert ours.features.dtype == ours.log_probs.dtype == torch.float32
    assert_close(ours.log_probs, theirs.log_probs)
    assert_close(ours.entropies, theirs.entropy)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 1.0),
        (dict(logit_scale=None), 1.0),
        (dict(logit_scale=0.0, output_multiplier=2.0), 0.0),
        (dict(output_multiplier=2.0), 2.0),
        (dict(lm_head_multiplier=3.0), 3.0),
        (dict(logits_scaling=4.0), 0.25),
        (dict(model_type="hyperclovax", logits_scaling=4.0), 4.0),
    ],
)
def test_logit_scales_are_found_where_trl_finds_them(fields, scale):
    assert logit_scale(SimpleNamespace(**{"model_type": "llama", **fields})) == scale


# Adapters


def with_adapter(**options):
    base = build("Llama", tie_word_embeddings=False)
    return get_peft_model(base, LoraConfig(init_lora_weights=False, r=2, **options)).eval()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["q_proj", "lm_head"]),
        dict(target_modules=["q_proj", "lm_head"], lora_alpha=3, use_rslora=True),
        dict(target_modules=["q_proj"]),
        dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
    ids=["on the head", "scaled", "elsewhere", "a copy of the head"],
)
def test_heads_with_adapters(options, enabled):
    torch.manual_seed(0)
    model, (ids, mask) = with_adapter(**options), make_rows()
    plain = model.get_base_model().get_output_embeddings().weight.clone()
    if "modules_to_save" in options:
        model.get_base_model().lm_head.weight.data.normal_()
    with nullcontext() if enabled else model.disable_adapter():
        hidden, log_probs, _, gradients = by_autograd(model, ids)
        head = lm_head_of(model, temperature=TEMPERATURE)
        found = sequence_features(hidden, ids[:, 1:], mask, head)
    assert_close(found.features, gradients.mean(1))
    assert_close(found.log_probs, log_probs)
    touched = "lm_head" in str(options)
    assert torch.equal(head.weight, plain) == (not enabled or not touched)


def test_an_adapter_with_a_bias_and_a_merged_one():
    torch.manual_seed(0)
    model, (ids, _) = with_adapter(target_modules=["lm_head"], lora_bias=True), make_rows()
    model.get_base_model().lm_head.lora_B["default"].bias.data.normal_()
    model.get_base_model().lm_head.base_layer.bias = torch.nn.Parameter(torch.randn(29))
    for _ in range(2):
        hidden, _, _, gradients = by_autograd(model, ids)
        assert_close(token_features(hidden, ids[:, 1:], lm_head_of(model, temperature=TEMPERATURE)), gradients)
        model.merge_adapter()


def test_heads_whose_gradient_is_not_known_are_refused():
    with pytest.raises(ValueError, match="LlamaModel has no output embeddings .* `AutoModelForCausalLM`"):
        lm_head_of(transformers.LlamaModel(transformers.LlamaConfig(**SIZE)))
    with pytest.raises(ValueError, match="adapter 'default' of the kind DoraLinearVariant"):
        lm_head_of(with_adapter(target_modules=["lm_head"], use_dora=True))
    with pytest.raises(ValueError, match="is a peft.utils.other.TrainableTokensWrapper"):
        lm_head_of(with_adapter(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3]}))
    quantized = MODELS["llama"]()
    quantized.lm_head.weight = torch.nn.Parameter(torch.zeros(29, 16, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM is quantized .*torch.uint8.*llm_int8_skip_modules"):
        lm_head_of(quantized)


# One pass


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=7),
    max_tile_bytes=st.integers(1, 4 * 11 * 8),
    softcap=st.sampled_from([None, 2.0]),
    bias=st.booleans(),
)
def test_any_tile_size_gives_the_definition(seed, mask, max_tile_bytes, softcap, bias):
    torch.manual_seed(seed)
    head, mask = random_head(softcap=softcap, bias=bias), torch.tensor(mask)
    hidden, tokens = torch.randn(*mask.shape, 4), torch.randint(0, 11, mask.shape)
    expected = densely(hidden, tokens, mask, head)
    tokens = tokens.masked_fill(~mask, -100)  # tokens that do not count are not read
    found = sequence_features(hidden, tokens, mask, head, max_tile_bytes=max_tile_bytes)
    for ours, reference in zip(found, expected, strict=True):
        assert_close(ours, reference)


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    head, hidden, tokens = random_head(), torch.randn(4, 6, 4), torch.randint(0, 11, (4, 6))
    together = sequence_features(hidden, tokens, torch.ones(4, 6), head)
    alone = sequence_features(hidden[2:3], tokens[2:3], torch.ones(1, 6), head)
    assert torch.equal(together.log_probs[2:3], alone.log_probs)
    assert_close(together.features[2:3], alone.features, 1e-6)


def random_batch(rows, tokens=6, **options):
    """A head, its inputs and token ids."""
    torch.manual_seed(0)
    return random_head(**options), torch.randn(rows, tokens, 4), torch.randint(0, 11, (rows, tokens))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_numbers_that_are_not_finite_stay_in_their_row(poison):
    head, hidden, tokens = random_batch(3)
    mask = torch.tensor([[1] * 6, [1] * 6, [0] * 6])
    clean = sequence_features(hidden, tokens, mask, head)
    hidden[1, 3, 0] = poison
    hidden[2] = poison  # nothing of this row counts
    hidden[0, 5], mask[0, 5] = poison, 0
    found = sequence_features(hidden, tokens, mask, head, max_tile_bytes=4 * 11 * 4)
    assert found.features[1].isnan().all() and found.log_probs[1, 3].isnan()
    assert torch.equal(found.features[2], torch.zeros(4))
    assert_close(found.log_probs[0, :5], clean.log_probs[0, :5])
    assert found.features[0].isfinite().all() and found.log_probs[[0, 2]].isfinite().all()


def test_tokens_that_are_scored_only_do_not_count():
    head, hidden, tokens = random_batch(2, softcap=2.0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [0] * 6])
    scored = torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6])
    found = sequence_features(hidden, tokens, mask, head, score_mask=scored, max_tile_bytes=4 * 11 * 2)
    assert_close(found.features, sequence_features(hidden, tokens, mask, head).features)
    assert_close(found.log_probs, sequence_features(hidden, tokens, scored, head).log_probs)
    assert_close(found.entropies, sequence_features(hidden, tokens, scored, head).entropies)


def test_bfloat16_is_close_to_float32():
    torch.manual_seed(0)
    head = random_head(101, 32, softcap=5.0, dtype=torch.bfloat16)
    hidden, tokens = torch.randn(4, 30, 32).bfloat16(), torch.randint(0, 101, (4, 30))
    found = sequence_features(hidden, tokens, torch.ones(4, 30), head)
    expected = densely(hidden, tokens, torch.ones(4, 30), head)
    assert found.features.dtype == torch.float32
    assert_close(found.features, expected[0], 5e-3)
    assert_close(found.log_probs, expected[1], 5e-2)


def test_autocast_rounds_logits_only():
    head, hidden, tokens = random_batch(2, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sequence_features(hidden, tokens, torch.ones(2, 6), head)
    logits = (hidden.bfloat16() @ head.weight.bfloat16().T).float() * head.scale / head.temperature
    residuals = torch.nn.functional.one_hot(tokens, 11) - logits.softmax(-1)
    assert_close(found.features, head.scale * residuals.mean(1) @ head.weight, 1e-6)


class Shapes(TorchDispatchMode):
    """Shapes and types of all tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.seen.add((tuple(tensor.shape), tensor.dtype))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_tokens_are_never_held(dtype):
    torch.manual_seed(0)
    rows, tokens, vocabulary, width, at_once = 12, 40, 101, 8, 5
    head = random_head(vocabulary, width, softcap=2.0, dtype=dtype)
    hidden, ids = torch.randn(rows, tokens, width).to(dtype), torch.randint(0, vocabulary, (rows, tokens))
    with Shapes() as shapes:
        sequence_features(hidden, ids, torch.ones(rows, tokens), head, max_tile_bytes=4 * vocabulary * at_once)
    wide = [shape for shape, _ in shapes.seen if shape[-1:] == (vocabulary,) and shape != (width, vocabulary)]
    assert max(map(math.prod, wide)) == at_once * vocabulary
    assert max(math.prod(shape) for shape, _ in shapes.seen) < rows * tokens * width
    copies = {shape for shape, kind in shapes.seen if kind == torch.float32 and shape[-1:] == (width,)}
    assert dtype == torch.float32 or (vocabulary, width) not in copies


def test_shapes_that_do_not_match_are_named():
    head, hidden, tokens = random_head(), torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"`mask` \(2, 4\)"):
        sequence_features(hidden, tokens, torch.ones(2, 4), head)
    with pytest.raises(ValueError, match=r"weight \(0,\) .* gather it first"):
        sequence_features(hidden, tokens, torch.ones(2, 3), head._replace(weight=torch.empty(0)))


def test_an_empty_batch_gives_nothing():
    head = random_head()
    found = sequence_features(torch.randn(0, 3, 4), torch.zeros(0, 3, dtype=torch.long), torch.ones(0, 3), head)
    assert found.features.shape == (0, 4) and found.log_probs.shape == found.entropies.shape == (0, 3)
    found = sequence_features(torch.randn(2, 0, 4), torch.zeros(2, 0, dtype=torch.long), torch.ones(2, 0), head)
    assert torch.equal(found.features, torch.zeros(2, 4)) and found.log_probs.shape == (2, 0)


# Novelty


def slowly(features, rewards, group_size):
    """Eq. 9-11, one number after the other."""

    def valid(i):
        return all(map(math.isfinite, features[i])) and math.isfinite(rewards[i])

    def cosine(a, b):
        norms = math.hypot(*a) * math.hypot(*b)
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms if norms else 0.0

    scores = []
    for i in range(len(rewards)):
        first = i - i % group_size
        peers = [j for j in range(first, first + group_size) if j != i and valid(j)]
        if not valid(i) or not peers:
            scores.append(0.0)
            continue
        total = math.fsum(math.exp(rewards[k]) for k in peers)
        explained = math.fsum(math.exp(rewards[j]) / total * cosine(features[i], features[j]) ** 2 for j in peers)
        scores.append(math.sqrt(max(1 - explained, 0.0)))
    return scores, [valid(i) for i in range(len(rewards))]


coordinate = st.sampled_from([0.0, 1.0, -1.0, 0.25, 3.0])


@st.composite
def batches(draw, broken=True):
    group_size, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    count = group_size * groups
    entry = coordinate | st.sampled_from([NAN, INF]) if broken else coordinate
    features = draw(st.lists(st.lists(entry, min_size=3, max_size=3), min_size=count, max_size=count))
    reward = st.sampled_from([-1.0, 1.0, 0.5, NAN] if broken else [-1.0, 1.0, 0.5])
    return features, draw(st.lists(reward, min_size=count, max_size=count)), group_size


@settings(max_examples=100, deadline=None)
@given(batches())
def test_scores_are_those_of_the_paper(batch):
    features, rewards, group_size = batch
    scores, valid = slowly(features, rewards, group_size)
    found = novelty_scores(torch.tensor(features), torch.tensor(rewards), group_size)
    assert_close(found.nu, torch.tensor(scores), 1e-6)
    assert found.valid.tolist() == valid and found.nu.dtype == torch.float32
    assert ((found.nu >= 0) & (found.nu <= 1)).all()


@settings(max_examples=50, deadline=None)
@given(batches(broken=False), st.floats(1e-6, 1e6), st.randoms(use_true_random=False))
def test_scores_do_not_depend_on_scale_or_order(batch, factor, random):
    features, rewards, group_size = torch.tensor(batch[0]), torch.tensor(batch[1]), batch[2]
    nu = novelty_scores(features, rewards, group_size).nu
    factors = torch.tensor([factor, -1 / factor] * len(rewards))[: len(rewards), None]
    assert_close(novelty_scores(features * factors, rewards, group_size).nu, nu, 1e-6)
    order = []
    for first in range(0, len(rewards), group_size):
        order += random.sample(range(first, first + group_size), group_size)
    assert_close(novelty_scores(features[order], rewards[order], group_size).nu, nu[order], 1e-6)


def test_identical_responses_have_no_novelty():
    torch.manual_seed(0)
    features = torch.randn(64).expand(4, -1)
    found = novelty_scores(features, torch.tensor([1.0, 1.0, -1.0, 1.0]), 4)
    assert found.nu.max() < 1e-6
    for transform in ["minmax", "centered"]:
        assert transform_novelty(found.nu, 4, transform).tolist() == [0.0] * 4
    assert geometry(features, 4, found)["mean_cosine"] == pytest.approx(1.0, abs=1e-12)


def test_large_rewards_do_not_overflow():
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = novelty_scores(features, torch.tensor([0.0, 1e4, -1e4]), 3)
    assert found.nu.tolist() == pytest.approx([0.0, 0.0, 1.0], abs=1e-6)  # row 1 sees row 0 as its better peer


def test_transforms_by_hand():
    nu = torch.tensor([0.2, 0.6, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    assert transform_novelty(nu, 4, "raw").tolist() == nu.tolist()
    valid = torch.tensor([True, True, True, False, True, True, True, True])
    low = transform_novelty(nu, 4, "minmax", valid=valid)
    assert low.tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert transform_novelty(nu, 4, "centered", valid=valid)[:4].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)
    assert transform_novelty(nu, 4, "centered")[4:].tolist() == [0.0] * 4  # all equal: no shaping
    for transform in ["minmax", "centered", "raw"]:
        assert transform_novelty(nu, 8, transform, valid=torch.zeros(8).bool()).tolist() == [0.0] * 8


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 1, width=32)), min_size=8, max_size=8), st.sampled_from([2, 4, 8])
)
def test_shuffled_scores_are_those_of_the_groups_valid_rows(rows, group_size):
    values, valid = torch.arange(8.0), torch.tensor([scored for scored, _ in rows])
    keys = torch.tensor([key for _, key in rows])
    found = shuffle_in_groups(values, keys, group_size, valid=valid).tolist()
    for first in range(0, 8, group_size):
        kept = [i for i in range(first, first + group_size) if rows[i][0]]
        assert [found[i] for i in kept] == sorted(kept, key=lambda i: rows[i][1])  # equal keys: in order
    assert all(found[i] == i for i in range(8) if not rows[i][0])


def test_every_order_of_shuffled_scores_is_equally_likely():
    generator = torch.Generator().manual_seed(0)
    values = torch.arange(3.0).repeat(6000)
    found = shuffle_in_groups(values, torch.rand(18000, generator=generator), 3).view(-1, 3).int().tolist()
    counts = Counter(map(tuple, found))
    assert len(counts) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 20.5  # chi-squared, one in a thousand


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ("binary", [-1.0, -1.0, 1.0, NAN, 1.0, -1.0, 1.0, -1.0]),
        ("scaled", [-1.0, -0.5, 1.0, NAN, 1.0, -1.0, 1.0, -1.0]),  # spans -1 to 1 in each group
        ("none", [0.2, 0.3, 0.6, NAN, 1.0, 0.0, 1.0, 0.0]),
    ],
)
def test_rewards_are_mapped(mapping, expected):
    rewards = torch.tensor([0.2, 0.3, 0.6, NAN, 1.0, 0.0, 1.0, 0.0, 0.3, 0.3, 0.3, 0.3])
    equal = [0.3 if mapping == "none" else -1.0] * 4
    mapped = map_rewards(rewards, mapping, threshold=0.5, group_size=4)
    assert_close(mapped.nan_to_num(9.0), torch.tensor([*expected, *equal]).nan_to_num(9.0))


def test_rewards_are_shaped_and_clipped():
    rewards, nu_bar = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, NAN]), torch.tensor([0.0, 0.5, 1.0, -1.0, 0.5, 0.5])
    shaped = shape_rewards(rewards, nu_bar, weight=1.0, clip=1.75)
    assert shaped[:5].tolist() == [1.0, -1.5, 1.75, 0.0, 1.5] and shaped[5].isnan()
    rows = torch.tensor([True, False, False, True, True, True])
    assert shape_rewards(rewards, nu_bar, weight=1.0, clip=1.75, rows=rows)[:5].tolist() == [1.0, -1.0, 1.0, 0.0, 1.5]
    assert torch.equal(shape_rewards(rewards, nu_bar, weight=0.0, clip=3.0)[:5], rewards[:5])


def test_groups_with_too_few_correct_answers_are_left_alone():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, NAN])

    def enough(group_size, min_correct, min_wrong):
        return mixed_enough(rewards, group_size, min_correct=min_correct, min_wrong=min_wrong, threshold=1.0).tolist()

    assert enough(2, 1, 0) == [True, True, False, False, True, True]
    assert enough(2, 1, 1) == [True, True, False, False, False, False]
    assert enough(3, 2, 0) == [False] * 6 and enough(3, 0, 0) == [True] * 6


def test_geometry_counts_pairs_within_groups():
    features = torch.tensor(
        [[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [1.0, 0.0], [NAN, 0.0], [1.0, 1.0], [3.0, 0.0]]
    )
    found = geometry(features, 4, novelty_scores(features, torch.ones(8), 4))
    cosines = [-1.0, 0.0, 0.0, math.sqrt(0.5), 1.0, math.sqrt(0.5)]
    assert found["mean_cosine"] == pytest.approx(sum(cosines) / 6) and found["negative_pairs"] == pytest.approx(1 / 6)
    nothing = Novelty(torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert geometry(torch.zeros(2, 3), 2, nothing) == {}


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match="`transform='max'` is unknown: choose one of 'minmax', 'raw', 'centered'"):
        transform_novelty(torch.zeros(2), 2, "max")
    with pytest.raises(ValueError, match="`mapping='sign'` is unknown: choose one of 'scaled', 'binary', 'none'"):
        map_rewards(torch.zeros(2), "sign", threshold=0.5, group_size=1)
    with pytest.raises(ValueError, match="3 rows cannot be split into groups of `group_size=2`"):
        novelty_scores(torch.zeros(3, 2), torch.zeros(3), 2)

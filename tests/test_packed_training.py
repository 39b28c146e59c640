"""Training on packed rows: what rows share is computed once, and nothing else changes."""

import re
from contextlib import contextmanager

import peft
import pytest
import torch
import transformers
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig
from test_adapters import CASES, parity
from test_generation import SIZE
from test_packing import forests
from world import TINY, assert_same, differ, make_dataset, make_trainer, parameters, trained
from world import make_model as small_model

from trl_explore.methods import METHODS
from trl_explore.packing.forward import PackedForward
from trl_explore.rows.streams import LOSS_NORMALISERS
from trl_explore.tasks.tiny_model import VOCAB_SIZE
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

WINDOW = dict(sliding_window=4, layer_types=["full_attention", "sliding_attention"])
FAMILIES = {
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", dict(use_sliding_window=True, **WINDOW)),
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=4)),
    "gemma2": ("Gemma2", dict(attn_logit_softcapping=2.0, **WINDOW)),
}


# Plain gradient descent: Adam would turn the rounding of a gradient that is 0 into a step.
SGD = dict(
    optim="sgd", learning_rate=0.1, max_steps=2, beta=0.1, steps_per_generation=2, gradient_accumulation_steps=2
)


def longrope_of(longest):
    """A Phi-3 whose rotary factors change for rows that are longer."""
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    config = transformers.Phi3Config(
        **{name: value for name, value in SIZE.items() if name != "head_dim"},
        max_position_embeddings=64,
        original_max_position_embeddings=longest,
        rope_parameters={**rope, "original_max_position_embeddings": longest},
    )
    return transformers.Phi3ForCausalLM(config)


def dynamic_of(longest):
    """A Llama whose rotary factors change for rows that are longer."""
    torch.manual_seed(0)
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZE, max_position_embeddings=longest + 1, rope_parameters=rope)
    )


class SharingTrainer(ExplorationTrainer):
    def setup(self):
        super().setup()
        self.packing.min_saved = 1  # the prompts of the small world are short


def make_model(family):
    torch.manual_seed(0)
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZE, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.fixture(scope="module", params=FAMILIES)
def trainer(request, tmp_path_factory):
    model = make_model(request.param)
    folder = tmp_path_factory.mktemp("packing")
    return make_trainer(ExplorationTrainer, ExplorationConfig, folder, model=model, shared_prefix_training="on")


def padded(rows):
    width, length = max(len(p) for p, _ in rows), max(1, *(len(c) for _, c in rows), 1)
    ids = [[0] * (width - len(p)) + p + c + [0] * (length - len(c)) for p, c in rows]
    mask = [[0] * (width - len(p)) + [1] * len(p + c) + [0] * (length - len(c)) for p, c in rows]
    return torch.tensor(ids), torch.tensor(mask), length


def measured(trainer, rows, mode):
    """Log-probabilities, entropies and the gradients of a weighted sum of both."""
    ids, mask, length = padded(rows)
    trainer.packing.mode = mode
    trainer.model.zero_grad()
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, length, compute_entropy=True
    )
    weights = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    (logps * weights + entropies * weights.flip(0)).sum().backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    return logps.detach(), entropies.detach(), gradients


@contextmanager
def widths_of_passes(model):
    """Tokens per row of every forward pass."""
    widths = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].size(1)), with_kwargs=True
    )
    try:
        yield widths
    finally:
        handle.remove()


@settings(max_examples=10, deadline=None)
@given(rows=forests(), min_saved=st.sampled_from([1, 4]), room=st.none() | st.integers(0, 10))
def test_packed_rows_give_what_plain_rows_give(trainer, rows, min_saved, room):
    logps, entropies, gradients = measured(trainer, rows, "off")
    trainer.packing.min_saved = min_saved
    trainer.packing.token_budget = None if room is None else max(len(p + c) for p, c in rows) + room
    with widths_of_passes(trainer.model) as widths:
        packed_logps, packed_entropies, packed_gradients = measured(trainer, rows, "on")
    log = trainer._metrics["train"]
    assume(log["packing/packed"][-1])  # rows that share too little are TRL's to compute
    assert log["packing/sequences"][-1] == len(widths)
    assert len(widths) == 1 if room is None else max(widths) <= trainer.packing.token_budget
    torch.testing.assert_close(packed_logps, logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_entropies, entropies, rtol=0, atol=1e-5)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert_same(packed_gradients, gradients, tolerance=1e-5 * max(largest, 1.0))


def saved_bytes(trainer, rows, mode):
    """What the forward pass keeps for the backward pass, without the weights."""
    ids, mask, length = padded(rows)
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trainer.packing.mode = mode
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
    assert logps.requires_grad
    return sum(kept.values())


def test_packed_rows_never_keep_more_memory_than_plain_ones(trainer):
    prompt = list(range(5, 25))
    siblings = [(prompt, [i, *prompt[:9]]) for i in range(5, 13)]
    strangers = [([i, *prompt], [i, *prompt[:9]]) for i in range(5, 13)]
    trainer.packing.min_saved, trainer.packing.token_budget = 16, None
    assert saved_bytes(trainer, siblings, "on") < 0.6 * saved_bytes(trainer, siblings, "off")
    assert trainer._metrics["train"]["packing/packed"][-1] == 1.0
    assert saved_bytes(trainer, strangers, "on") <= saved_bytes(trainer, strangers, "off")
    assert trainer._metrics["train"]["packing/packed"][-1] == 0.0  # the pass was TRL's


LOSSES = sorted(set(LOSS_NORMALISERS) - {"bnpo"})  # "bnpo" is a mean over the tokens of a micro-batch


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """A trainer, and the micro-batches of a generation batch as TRL splits it and as they are grouped."""
    options = dict(SGD, per_device_train_batch_size=4, steps_per_generation=4, gradient_accumulation_steps=4)
    folder = tmp_path_factory.mktemp("batches")
    trainer = make_trainer(SharingTrainer, ExplorationConfig, folder, shared_prefix_training="on", **options)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    trainer.packing.mode = "off"  # which would group them
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.packing.mode = "on"
    return trainer, trainer._buffered_inputs, trainer.packing.regrouped(trainer._buffered_inputs)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_grouping_leaves_the_sum_over_a_generation_batch(batches, loss_type):
    trainer, *splits = batches
    trainer.loss_type = loss_type
    trainer.importance_sampling_level = "sequence" if loss_type == "luspo" else "token"
    sums, ratios = [], []
    for split in splits:
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        for batch in split:
            trainer.compute_loss(trainer.model, batch).backward()
        sums.append({name: p.grad for name, p in trainer.model.named_parameters()})
        ratios.append(sum(trainer._metrics["train"]["packing/token_ratio"]))
    assert_same(sums[1], sums[0], tolerance=1e-5)
    assert ratios[1] > 1.15 * ratios[0]


# Fields that TRL's loss, or ours, computes from rows: from one row, a micro-batch, an optimizer step or all of them.
REUSED = dict(num_iterations=2, max_steps=2)
FIELDS = {
    **{f"loss_type={name}": dict(loss_type=name) for name in sorted(set(LOSS_NORMALISERS) - {"luspo"})},
    "loss_type=luspo": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "top_entropy_quantile": dict(top_entropy_quantile=0.3),
    "top_entropy_quantile, bnpo": dict(top_entropy_quantile=0.3, loss_type="bnpo"),
    "entropy_coef": dict(entropy_coef=3.0),
    "use_adaptive_entropy": dict(
        use_adaptive_entropy=True, entropy_target=9.0, entropy_coef=3.0, entropy_coef_max=9.0
    ),
    "importance_sampling_level": dict(importance_sampling_level="sequence", **REUSED),
    "off_policy_mask_threshold": dict(off_policy_mask_threshold=0.01, **REUSED),
    "delta": dict(delta=1.01, **REUSED),
    "use_bias_correction_kl": dict(use_bias_correction_kl=True, **REUSED),
    "mask_truncated_completions": dict(mask_truncated_completions=True, loss_type="bnpo"),
    "drop_zero_advantage": dict(drop_zero_advantage=True, loss_type="bnpo"),
    "clip_cov": dict(clip_cov=0.2, clip_cov_low=0.0),
    "kl_cov": dict(kl_cov=0.2, loss_type="bnpo", **REUSED),
    "several optimizer steps": dict(gradient_accumulation_steps=2, max_steps=4),
    "steps over batches": dict(steps_per_generation=2, gradient_accumulation_steps=4),
    "uneven steps": dict(gradient_accumulation_steps=3, max_steps=3),
}
SMALL = dict(per_device_train_batch_size=4, steps_per_generation=4, gradient_accumulation_steps=4)


@pytest.mark.parametrize("options", FIELDS.values(), ids=FIELDS)
def test_training_is_the_same_with_every_field(tmp_path, options):
    options = {**SGD, **SMALL, **options}
    expected, _ = trained(SharingTrainer, ExplorationConfig, tmp_path, **options)
    found, log = trained(SharingTrainer, ExplorationConfig, tmp_path, shared_prefix_training="on", **options)
    assert log[0]["packing/packed"] > 0
    assert_same(found, expected, tolerance=1e-5)


class SharingDeepGRPO(DeepGRPOTrainer):
    def setup(self):
        super().setup()
        self.packing.min_saved = 1


@pytest.mark.parametrize("name", ["top_entropy_quantile", "loss_type=bnpo", "several optimizer steps", "entropy_coef"])
def test_training_on_further_streams_is_the_same_with_fields_of_a_micro_batch(tmp_path, name):
    options = {**SGD, **SMALL, **TINY["deep_grpo"].options, **FIELDS[name]}
    expected, _ = trained(SharingDeepGRPO, DeepGRPOConfig, tmp_path, **options)
    found, log = trained(SharingDeepGRPO, DeepGRPOConfig, tmp_path, shared_prefix_training="on", **options)
    assert log[0]["packing/packed"] > 0 and log[0]["pivots/sampled_tokens"] > 0
    assert_same(found, expected, tolerance=1e-5)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize(
    "options, tolerance",
    [
        (dict(gradient_checkpointing=True, peft_config=LORA), 1e-5),
        (dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True)), 1e-5),
        (dict(bf16=True), 2e-3),
    ],
    ids=["lora, checkpointing", "reentrant checkpointing", "bf16"],
)
def test_lora_checkpointing_and_bf16(tmp_path, options, tolerance):
    options = dict(SGD, **options)
    expected, _ = trained(SharingTrainer, ExplorationConfig, tmp_path, **options)
    for budget in (None, 24):
        packing = dict(shared_prefix_training="on", packed_token_budget=budget)
        got, log = trained(SharingTrainer, ExplorationConfig, tmp_path, **packing, **options)
        assert_same(got, expected, tolerance=tolerance)
        assert (log[0]["packing/sequences"] > 1) == (budget is not None)


def test_modes_pack_where_enough_is_shared(tmp_path):
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, shared_prefix_training="auto")
    shared = [([5, 6, 7, 8, 9, 10], [i, 5]) for i in range(11, 19)]
    alone, long = shared[:1], [(list(range(5, 25)), [5, 6])]
    trainer.model.train()
    for mode, rows, budget, packed in (
        ("auto", shared, None, 1.0),
        ("auto", alone, None, 0.0),
        ("on", alone, None, 1.0),
        ("on", long, None, 0.0),  # 22 tokens for 21
        ("auto", shared, 14, 1.0),
        ("auto", alone, 14, 0.0),
        ("auto", shared[:1] + long, 22, 1.0),  # little is shared, but it does not fit into one sequence
    ):
        trainer.packing.mode, trainer.packing.token_budget = mode, budget
        ids, mask, length = padded(rows)
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
        assert trainer._metrics["train"]["packing/packed"][-1] == packed, (mode, budget, len(rows))
    ratios = [64 / 14, 8 / 7, 8 / 7, 22 / 21, 64 / 14, 8 / 7, 30 / 28]
    assert trainer._metrics["train"]["packing/token_ratio"] == ratios
    assert trainer._metrics["train"]["packing/sequences"] == [1, 1, 1, 1, 1, 1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that knows the tokens of both tokenizers; trainers with a KL term load their reference from it."""
    folder = tmp_path_factory.mktemp("model")
    small_model(vocab_size=VOCAB_SIZE, max_position_embeddings=256).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", CASES)
def test_every_trainer_ends_in_the_same_parameters(tmp_path, folder, name, monkeypatch):
    monkeypatch.setattr(PackedForward, "min_saved", 1)  # the prompts of the small world are short
    cls, config, own = CASES[name]
    options = dict(SGD, num_iterations=2, model=folder, reward_funcs=parity, **own)
    expected, _ = trained(cls, config, tmp_path, **options)
    for budget in (None, 160 if METHODS[name].needs_tools else 24):  # rows of agents are longer
        trainer = make_trainer(
            cls, config, tmp_path, shared_prefix_training="on", packed_token_budget=budget, **options
        )
        before = parameters(trainer)
        with widths_of_passes(trainer.model) as widths:
            trainer.train()
        assert_same(parameters(trainer), expected, tolerance=1e-5)
        log = trainer.state.log_history[0]
        assert differ(expected, before) and log["packing/token_ratio"] > 1 and log[TINY[name].metric] > 0
        assert log["packing/packed"] == 1.0 and (log["packing/sequences"] > 1) == (budget is not None)
        assert budget is None or max(widths) <= budget


REFUSED = {
    "layers without attention": (
        transformers.Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]),
        "Lfm2ForCausalLM has layers without full or sliding-window attention (conv)",
    ),
    "attention sinks": (
        transformers.GptOssConfig(**SIZE, num_local_experts=2, num_experts_per_tok=1, router_aux_loss_coef=0.0),
        "GptOssForCausalLM gives packed rows other log-probabilities",
    ),
    "learned positions": (
        transformers.GPT2Config(vocab_size=29, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0, initializer_range=0.3),
        "GPT2LMHeadModel gives packed rows other log-probabilities",
    ),
    "another interface": (
        transformers.GPTNeoConfig(
            vocab_size=29, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]
        ),
        "GPTNeoForCausalLM does not use the attention interface of transformers",
    ),
    "dropped arguments": (
        transformers.StableLmConfig(**{**SIZE, "head_dim": None}),
        "StableLmAttention does not get `packed_rows`",
    ),
    "attention dropout": (
        transformers.LlamaConfig(**SIZE, attention_dropout=0.1),
        "`attention_dropout=0.1` drops different tokens in each row: load the model with `attention_dropout=0.0`",
    ),
}


@pytest.mark.parametrize("config, reason", REFUSED.values(), ids=REFUSED)
def test_models_that_cannot_share_prefixes_are_refused_with_the_reason(tmp_path, config, reason):
    def make(mode):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, model=model, shared_prefix_training=mode)

    with pytest.raises(ValueError, match=re.escape(f"`shared_prefix_training='on'` cannot be used: {reason}")):
        make("on")
    with pytest.warns(UserWarning, match="It stays off"):
        assert make("auto").packing.mode == "off"


def test_yaml_reads_on_and_off_as_truth_values(tmp_path):
    for mode in ("on", "off", "auto"):
        [value] = yaml.safe_load(f"shared_prefix_training: {mode}").values()
        assert ExplorationConfig(tmp_path, use_cpu=True, shared_prefix_training=value).shared_prefix_training == mode


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    def make(**options):
        make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **{"shared_prefix_training": "on", **options})

    with pytest.raises(ValueError, match="`shared_prefix_training`: unknown value 'always'; choose one of auto, off"):
        make(shared_prefix_training="always")
    with pytest.raises(ValueError, match="set `per_device_train_batch_size` to at least 2; or leave"):
        make(per_device_train_batch_size=1, steps_per_generation=4)
    with pytest.raises(ValueError, match="set `torch_compile=False`"):
        make(torch_compile=True)
    with pytest.raises(ValueError, match="virtual tokens precede every row: train LoRA"):
        make(peft_config=PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="`packed_token_budget=0` must be at least 1, or None"):
        make(packed_token_budget=0)
    with pytest.raises(ValueError, match="`packed_token_budget=64` splits packed rows, but .*='off'. packs none: set"):
        make(packed_token_budget=64, shared_prefix_training="off")
    for mode in ("on", "auto"):
        with pytest.raises(ValueError, match="`packed_token_budget=8` cannot hold a prompt and `max_completion_leng"):
            make(packed_token_budget=8, shared_prefix_training=mode)
        with pytest.raises(ValueError, match="`packed_token_budget=9` cannot hold a row of 12 tokens .* set it to at"):
            make(packed_token_budget=9, shared_prefix_training=mode)  # prompts have four, completions up to eight
    lora = dict(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(
        ValueError, match="cannot be used: the model has an activated LoRA adapter .*: train plain LoRA"
    ):
        make(peft_config=LoraConfig(**lora, alora_invocation_tokens=[8]))
    if "LilyConfig" in vars(peft):
        with pytest.raises(ValueError, match="cannot be used: the model has a Lily adapter, which mixes the tokens"):
            make(peft_config=peft.LilyConfig(r=4, target_modules=["q_proj"]))
    flash = make_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take a tree of rows: load the model with"):
        make(model=flash)


@pytest.mark.parametrize("longest", [9, 30], ids=["beyond", "below"])
@pytest.mark.parametrize("make", [longrope_of, dynamic_of], ids=["LongRoPE", "dynamic NTK"])
def test_rows_are_packed_only_where_rotary_factors_are_fixed(tmp_path, make, longest):
    make(longest).save_pretrained(tmp_path / "model")  # the reference model is loaded from there, too
    options = dict(SGD, model=str(tmp_path / "model"), **TINY["deep_grpo"].options)
    expected, _ = trained(SharingDeepGRPO, DeepGRPOConfig, tmp_path, **options)
    for budget in (None, 24):
        packing = dict(shared_prefix_training="on", packed_token_budget=budget)
        found, log = trained(SharingDeepGRPO, DeepGRPOConfig, tmp_path, **packing, **options)
        assert ("packing/packed" in log[0]) == (longest == 30)
        assert_same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_row_longer_than_the_budget_stops_the_step_before_it_is_computed(tmp_path, mode):
    seen = []
    trainer = make_trainer(
        ExplorationTrainer,
        ExplorationConfig,
        tmp_path,
        shared_prefix_training=mode,
        packed_token_budget=9,  # prompts have four tokens, which a stream does not tell
        train_dataset=make_dataset().to_iterable_dataset(),
        reward_funcs=lambda completions, **columns: seen.append(completions) or [0.0] * len(completions),
    )
    with pytest.raises(ValueError, match=r"`packed_token_budget=9` cannot hold a row of 1\d tokens .*: set it to at"):
        trainer.train()
    assert not seen and trainer.state.global_step == 0


def test_generation_by_continuous_batching_sees_the_models_own_attention(tmp_path):
    trainer = make_trainer(
        ExplorationTrainer,
        ExplorationConfig,
        tmp_path,
        shared_prefix_training="on",
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 64},
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.log_history[0]["packing/packed"] == 1.0
    assert trainer.model.config._attn_implementation == "packed_sdpa"


def test_a_run_resumed_off_a_boundary_is_exact(tmp_path):
    options = dict(shared_prefix_training="on", per_device_train_batch_size=4, steps_per_generation=4, max_steps=4)
    whole = make_trainer(SharingTrainer, ExplorationConfig, tmp_path, save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = make_trainer(SharingTrainer, ExplorationConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))

"""G2RL: reductions to GRPO, features against autograd, what is shaped and logged, composition, and its errors."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from commands import TINY_RUN, as_flags, run_example
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    differ,
    make_dataset,
    make_model,
    make_trainer,
    never,
    parameters,
    saved_model,
    some_letter,
    trained,
)

from trl_explore.gradients.feature_pass import FeatureRows
from trl_explore.gradients.novelty import geometry, novelty_scores
from trl_explore.trainers import (
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
    G2RLConfig,
    G2RLTrainer,
    GradientGuided,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)
from trl_explore.trainers.geometry_callback import GeometryCallback

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
DROPOUT = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.05)
OFF = dict(novelty_weight=0.0, reward_mapping="none")
SETTINGS = {
    "beta 0": {},
    "two iterations": dict(num_iterations=2, max_steps=4),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora, beta, two iterations": dict(peft_config=LORA, beta=0.1, num_iterations=2, max_steps=4),
    "conversational": dict(conversational=True),
    "two rewards": dict(reward_funcs=[contains_answer, some_letter], reward_weights=[1.0, 0.5]),
}
# TRL makes old log-probabilities in the second one.
PASSES = {"own pass": {}, "with old log-probabilities": dict(steps_per_generation=2)}


def signed(completions, answer, **columns):
    return [2 * reward - 1 for reward in contains_answer(completions, answer)]


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_novelty_it_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(G2RLTrainer, G2RLConfig, tmp_path, **OFF, **options)
    assert_same(got, expected)
    assert not any(key.startswith("geometry") for entry in log for key in entry)


def test_without_novelty_the_mapping_is_what_remains(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=signed)
    got, log = trained(G2RLTrainer, G2RLConfig, tmp_path, novelty_weight=0.0)
    assert_same(got, expected)
    assert all(0 <= entry["reward"] <= 1 for entry in log if "reward" in entry)  # raw: 0 and 1


@pytest.mark.parametrize("setting", ["generation longer than accumulation", "lora, beta, two iterations"])
def test_novelty_changes_what_is_learned(tmp_path, setting):
    options = SETTINGS[setting]
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(G2RLTrainer, G2RLConfig, tmp_path, **options)
    assert differ(got, expected)
    assert all(torch.isfinite(value).all() for value in got.values())
    assert 0 < log[0]["geometry/mean_novelty"] <= 1 and -1 <= log[0]["geometry/mean_cosine"] <= 1


class Watched(G2RLTrainer):
    """Keeps features and rewards of the last batch, and counts passes through the backbone."""

    def setup(self):
        super().setup()
        if self.features is not None:
            self.of_batch, self.features.of_batch = self.features.of_batch, self.kept

    def kept(self):
        self.rows = self.features._rows
        self.found = self.of_batch()
        return self.found

    def shape_rewards(self, rewards_per_func):
        self.raw, self.shaped = rewards_per_func, super().shape_rewards(rewards_per_func)
        return self.shaped


def batch_of(trainer):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    passes = []
    backbone = trainer.accelerator.unwrap_model(trainer.model)
    backbone = (backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone).base_model
    rows = next(iter(trainer.get_train_dataloader()))
    original = trainer._generate

    def then_count(prompts):
        result = original(prompts)
        trainer.counting = backbone.register_forward_hook(lambda *args: passes.append(1))
        return result

    trainer._generate = then_count
    output = trainer._generate_and_score_completions(rows)
    trainer.counting.remove()
    return output, len(passes)


def autograd_feature(model, prompt, ids, mask, temperature):
    """Mean over loss tokens of temperature * d log p / d (input of the head)."""
    seen = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        seen.append(output.last_hidden_state)

    handle = model.base_model.register_forward_hook(keep)
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    handle.remove()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    mask = torch.tensor(mask, dtype=chosen.dtype)
    (chosen * mask).sum().backward()
    model.zero_grad()
    return temperature * seen[0].grad[0].sum(0) / mask.sum()


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize(
    "more",
    [{}, dict(peft_config=DROPOUT), dict(temperature=0.7)],
    ids=["", "dropout", "temperature"],
)
def test_features_are_autograds(tmp_path, options, more):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, **options, **more)
    batch_of(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if "peft_config" in more else model
    model.eval()
    rows = trainer.rows
    assert len(trainer.found) == len(rows.completion_ids)
    for i in range(0, len(trainer.found), 3):
        mask = rows.loss_mask[i]
        expected = autograd_feature(model, rows.prompt_ids[i], rows.completion_ids[i], mask, trainer.temperature)
        torch.testing.assert_close(trainer.found[i], expected, rtol=1e-4, atol=1e-5)


def dynamic_ntk(length):
    """Rotary factors change for rows of so many tokens, or more."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return make_model(max_position_embeddings=length, rope_parameters=rope)


@pytest.mark.parametrize(
    "options, passes, own",
    [
        ({}, 0, 0),
        (PASSES["with old log-probabilities"], 2, 0),  # two batches of 8 rows each
        (dict(PASSES["with old log-probabilities"], peft_config=DROPOUT), 2, 2),  # TRL's pass has dropout
        (dict(model=dynamic_ntk(64)), 0, 0),  # rotary factors are fixed up to this length
    ],
)
def test_features_cost_no_pass_of_their_own_without_dropout(tmp_path, options, passes, own):
    assert batch_of(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options))[1] == passes
    assert batch_of(make_trainer(G2RLTrainer, G2RLConfig, tmp_path, **options))[1] == passes + own


class Elsewhere(G2RLTrainer):
    """Samples behind other prompts than it trains."""

    def rollout(self, prompt_ids, plain):
        return plain([ids[-1:] for ids in prompt_ids])


@pytest.mark.parametrize(
    "trainer_class, options",
    [
        (Elsewhere, {}),
        (G2RLTrainer, dict(generation_kwargs={"num_beams": 2})),
        (G2RLTrainer, dict(generation_kwargs={"use_cache": False})),
        (G2RLTrainer, dict(bf16=True)),
        (G2RLTrainer, dict(generation_kwargs={"guidance_scale": 1.5})),
        (G2RLTrainer, dict(peft_config=LoraConfig(r=2, alora_invocation_tokens=[8], target_modules=["q_proj"]))),
        (G2RLTrainer, dict(model=dynamic_ntk(8))),
    ],
)
def test_features_cost_a_pass_where_sampling_shows_other_hidden_states(tmp_path, trainer_class, options):
    assert batch_of(make_trainer(trainer_class, G2RLConfig, tmp_path, **options))[1] == 1


def test_features_cost_a_pass_where_rows_are_sampled_in_several_calls(tmp_path, monkeypatch):
    sample = GRPOTrainer._generate_single_turn

    def one_by_one(trainer, contexts, **options):
        return [sample(trainer, [context], **options)[0][0] for context in contexts], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", one_by_one)
    assert batch_of(make_trainer(G2RLTrainer, G2RLConfig, tmp_path))[1] == 1


@pytest.mark.parametrize("options", [{}, dict(mask_truncated_completions=True), dict(cast_lm_head_to_fp32=True)])
def test_features_seen_while_sampling_are_those_of_a_pass(tmp_path, options):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, **options)
    _, passes = batch_of(trainer)
    rows = replace(trainer.rows, features=[])
    trainer.features.run(rows)
    assert passes == 0
    again = torch.cat(rows.features)
    torch.testing.assert_close(trainer.found.nan_to_num(), again.nan_to_num(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES.keys())
def test_identical_completions_are_not_novel_whatever_dropout_draws(tmp_path, options):
    def rollout(prompts, trainer):
        prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": [[10, 11, 12, 13, 1] for _ in prompts], "logprobs": None}

    trainer = make_trainer(Watched, G2RLConfig, tmp_path, rollout_func=rollout, peft_config=DROPOUT, **options)
    batch_of(trainer)
    assert trainer._novelty.abs().max() < 1e-6
    assert set(trainer.shaped.flatten().tolist()) <= {1.0, -1.0}
    assert trainer.model.training


@pytest.mark.parametrize(("passes", "checkpointing"), [("own pass", True), ("with old log-probabilities", False)])
def test_features_change_neither_old_logprobs_nor_dropout(tmp_path, passes, checkpointing):
    """Without a reward there is nothing to shape: what is left to learn from is the KL term, under dropout."""
    options = dict(PASSES[passes], peft_config=DROPOUT, gradient_checkpointing=checkpointing)
    options |= dict(reward_funcs=never, beta=0.1)
    expected, _ = batch_of(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options))
    got, _ = batch_of(make_trainer(G2RLTrainer, G2RLConfig, tmp_path, reward_mapping="none", **options))
    assert ("old_per_token_logps" in expected) == ("steps_per_generation" in options)
    for name in expected:
        assert torch.equal(expected[name], got[name]), name
    first, log = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    second, shaped = trained(G2RLTrainer, G2RLConfig, tmp_path, reward_mapping="none", **options)
    assert_same(second, first)
    assert log[0]["grad_norm"] > 0 and "geometry/mean_cosine" in shaped[0]


def test_only_tokens_of_the_loss_count(tmp_path):
    def rollout(prompts, trainer):
        ids = [[10, 11, 12, 13, 1] for _ in prompts]
        if not hasattr(trainer, "second"):
            ids = [[10, 20, 21, 13, 1] for _ in prompts]
        prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        mask = [[1, 0, 0, 0, 0]] * len(ids)
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": mask}

    trainer = make_trainer(Watched, G2RLConfig, tmp_path, rollout_func=rollout, reward_funcs=always)
    batch_of(trainer)
    first = trainer.found
    again = make_trainer(Watched, G2RLConfig, tmp_path, rollout_func=rollout, reward_funcs=always)
    again.second = True
    batch_of(again)
    torch.testing.assert_close(first, again.found, rtol=0, atol=1e-6)
    assert trainer._metrics["train"]["geometry/mean_cosine"][0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("transform", ["minmax", "raw", "centered"])
def test_rewards_are_shaped_as_documented_and_logged_raw(tmp_path, transform):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, novelty_transform=transform, novelty_weight=3.0)
    output, _ = batch_of(trainer)
    raw = trainer.raw[:, 0]
    r = 2 * raw - 1
    novelty = novelty_scores(trainer.found, r, 4)
    nu = novelty.nu.view(-1, 4)
    low, high = nu.amin(1, keepdim=True), nu.amax(1, keepdim=True)
    nu_bar = {"raw": nu, "minmax": (nu - low) / (high - low), "centered": 2 * (nu - low) / (high - low) - 1}[transform]
    shaped = (r * (1 + 3 * nu_bar.flatten().float())).clamp(-3, 3)
    torch.testing.assert_close(trainer.shaped[:, 0], shaped, rtol=1e-5, atol=1e-5)
    centred = shaped.view(-1, 4) - shaped.view(-1, 4).mean(1, keepdim=True)
    expected = centred / (shaped.view(-1, 4).std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(output["advantages"], expected.flatten(), rtol=1e-4, atol=1e-4)
    metrics = trainer._metrics["train"]
    assert metrics["reward"] == [pytest.approx(raw.mean().item())]
    assert metrics["shaped_reward"] == [pytest.approx(shaped.mean().item(), abs=1e-5)]
    assert metrics["rewards/contains_answer/mean"] == [pytest.approx(raw.mean().item())]
    for name, value in geometry(trainer.found, 4, novelty).items():
        assert metrics[f"geometry/{name}"] == [pytest.approx(value)]
    assert metrics["geometry/feature_seconds"][0] > 0 and metrics["geometry/unshaped_rows"] == [0]


def test_groups_that_only_novelty_tells_apart_have_a_spread(tmp_path):
    trainer = make_trainer(G2RLTrainer, G2RLConfig, tmp_path, reward_funcs=always, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["frac_reward_zero_std"] == 0 and log["reward_std"] == 0


def test_shuffled_scores_are_those_of_other_completions_of_the_group(tmp_path):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, novelty_scores="shuffled", novelty_transform="raw")
    batch_of(trainer)
    r = 2 * trainer.raw[:, 0] - 1
    novelty = novelty_scores(trainer.found, r, 4)
    shown = torch.tensor(trainer.completion_columns()["novelty"])
    assert not torch.allclose(shown, novelty.nu)
    assert torch.equal(shown.view(-1, 4).sort(1).values, novelty.nu.view(-1, 4).sort(1).values)
    torch.testing.assert_close(trainer.shaped[:, 0], r * (1 + shown))
    (logged,) = trainer._metrics["train"]["geometry/mean_novelty"]
    assert logged == pytest.approx(novelty.nu.mean().item())


def test_several_reward_functions_are_shaped_as_a_sum(tmp_path):
    options = dict(reward_funcs=[contains_answer, some_letter], reward_weights=[0.5, 2.0], success_threshold=0.5)
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, **options)
    batch_of(trainer)
    total = (trainer.raw * torch.tensor([0.5, 2.0])).nansum(1)
    shaped = (trainer.shaped * torch.tensor([0.5, 2.0])).nansum(1)
    assert torch.equal(shaped > 0, total >= 0.5) and (shaped.abs() >= 1 - 1e-6).all() and (shaped.abs() > 1.01).any()


def test_groups_with_too_few_right_answers_keep_their_rewards(tmp_path):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, reward_funcs=never, min_correct=1)
    output, _ = batch_of(trainer)
    assert (trainer.shaped == -1).all() and (output["advantages"] == 0).all()
    assert trainer._metrics["train"]["geometry/unshaped_rows"] == [8]
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, reward_funcs=never)
    output, _ = batch_of(trainer)
    assert output["advantages"].abs().max() > 0.5  # as in the paper: novelty alone ranks them


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_never_reach_the_loss(tmp_path, value):
    class Broken(Watched):
        def kept(self):
            features = super().kept()
            features[1] = value
            return features

    trainer = make_trainer(Broken, G2RLConfig, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.shaped[1].abs() == 1
    assert [log["geometry/unshaped_rows"] for log in trainer.state.log_history[:2]] == [1, 1]
    assert all(torch.isfinite(p).all() for p in parameters(trainer).values())


def test_truncated_completions_that_are_masked_are_no_peers(tmp_path):
    trainer = make_trainer(Watched, G2RLConfig, tmp_path, mask_truncated_completions=True, max_completion_length=3)
    batch_of(trainer)
    truncated = [ids[-1] not in (0, 1) for ids in trainer.rows.completion_ids]
    assert 0 < sum(truncated) and trainer.found.isnan().any(1).tolist() == truncated
    assert trainer._metrics["train"]["geometry/unshaped_rows"] == [sum(truncated)]


def test_evaluation_is_plain_grpo(tmp_path):
    options = dict(eval_dataset=make_dataset().select(range(8)), num_generations_eval=2)
    results = []
    for cls, config in ((GRPOTrainer, GRPOConfig), (G2RLTrainer, G2RLConfig)):
        trainer = make_trainer(cls, config, tmp_path, **options)
        torch.manual_seed(5)
        results.append(trainer.evaluate())
    same = [key for key in results[0] if "time" not in key and "second" not in key]
    assert {k: results[1][k] for k in same} == {k: results[0][k] for k in same}


@pytest.mark.parametrize("scores", ["gradient", "shuffled"])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, scores):
    options = dict(novelty_scores=scores, steps_per_generation=4, max_steps=7)
    whole = make_trainer(G2RLTrainer, G2RLConfig, tmp_path, save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = make_trainer(G2RLTrainer, G2RLConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


@dataclass
class GuidedConfig(G2RLConfig, DeepGRPOConfig):
    pass


class GuidedFirst(GradientGuided, DeepGRPOTrainer):
    config_class = GuidedConfig


class DeepFirst(DeepGRPOTrainer, GradientGuided):
    config_class = GuidedConfig


def test_it_composes_with_deep_grpo_in_either_order(tmp_path):
    deep, _ = trained(DeepGRPOTrainer, DeepGRPOConfig, tmp_path)
    off, _ = trained(GuidedFirst, GuidedConfig, tmp_path, **OFF)
    assert_same(off, deep)
    runs = []
    for cls in (GuidedFirst, DeepFirst):
        trainer = make_trainer(cls, GuidedConfig, tmp_path, log_completions=True)
        trainer.train()
        assert sorted(trainer.completion_columns()) == ["novelty", "pivot_depth", "recovered", "shaped_reward"]
        runs.append(parameters(trainer))
    log = trainer.state.log_history[0]
    assert differ(runs[0], deep) and log["geometry/mean_novelty"] > 0 and any("pivots" in key for key in log)
    assert_same(*runs)


@pytest.mark.parametrize("field", ["tools", "rollout_func"])
@pytest.mark.parametrize("first", [True, False])
def test_a_composition_takes_only_what_each_of_its_methods_takes(tmp_path, first, field):
    def tool(text: str) -> str:
        """
        Echoes.

        Args:
            text: What to echo.
        """
        return text

    config = dataclass(type("Both", (G2RLConfig, TreeGRPOConfig), {}))
    bases = (G2RLTrainer, TreeGRPOTrainer) if first else (TreeGRPOTrainer, G2RLTrainer)
    both = type("Both", bases, {"config_class": config})
    with pytest.raises(ValueError, match=f"Both.*`{field}`|`{field}`.*Both"):
        make_trainer(both, config, tmp_path, **{field: [tool] if field == "tools" else tool})


@pytest.mark.parametrize("bases", [(GradientGuided, BranPOTrainer), (BranPOTrainer, GradientGuided)])
def test_what_all_methods_take_a_composition_takes(bases):
    assert type("Guided", bases, {}).requires.tools


# --------------------------------------------------------------------------------------------------------- errors


ERRORS = {
    "novelty_weight=-1.* must be at least 0": dict(novelty_weight=-1.0),
    "novelty_weight=nan": dict(novelty_weight=float("nan")),
    "reward_clip=0.5` must be at least 1": dict(reward_clip=0.5),
    "novelty_transform.*unknown value 'min-max'; did you mean 'minmax'": dict(novelty_transform="min-max"),
    "novelty_scores.*unknown value 'shufled'; did you mean 'shuffled'": dict(novelty_scores="shufled"),
    "reward_mapping.*unknown value 'sign'": dict(reward_mapping="sign"),
    "min_correct=-1": dict(min_correct=-1),
    "min_wrong=-2": dict(min_wrong=-2),
    "success_threshold=inf": dict(success_threshold=float("inf")),
    "does not support prompt-learning adapters .*PROMPT_TUNING": dict(
        peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ),
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=ERRORS.keys())
def test_bad_input_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        make_trainer(G2RLTrainer, G2RLConfig, tmp_path, **options)


def test_a_model_without_output_embeddings_is_refused(tmp_path):
    model = make_model()
    model.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="Qwen2ForCausalLM.*output embeddings"):
        make_trainer(G2RLTrainer, G2RLConfig, tmp_path, model=model)


def test_unusual_rewards_without_mapping_are_warned_about_once(tmp_path):
    trainer = make_trainer(G2RLTrainer, G2RLConfig, tmp_path, reward_mapping="none")
    with pytest.warns(UserWarning, match="rewards other than \\+1 and -1") as caught:
        trainer.train()
    assert sum("other than" in str(w.message) for w in caught) == 1


# ------------------------------------------------------------------------------------------------------- callback


def test_the_callback_measures_any_trainer_and_leaves_no_trace(tmp_path):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path)
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path)
    trainer.add_callback(GeometryCallback(trainer))
    trainer.train()
    assert_same(parameters(trainer), expected)
    assert "_generate_and_score_completions" not in vars(trainer)
    _, own = trained(G2RLTrainer, G2RLConfig, tmp_path)
    for name in ("mean_cosine", "negative_pairs", "mean_novelty"):
        assert trainer.state.log_history[0][f"geometry/{name}"] == pytest.approx(own[0][f"geometry/{name}"], abs=1e-6)


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PrefixTuningConfig])
def test_the_callback_measures_behind_virtual_tokens(tmp_path, adapter):
    options = dict(peft_config=adapter(task_type="CAUSAL_LM", num_virtual_tokens=3), gradient_checkpointing=False)
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options)
    prompt, completion = [5, 6, 7], [8, 9, 10, 11]
    found = GeometryCallback(trainer).features.gathered(FeatureRows([prompt], [completion], [[1] * 4]))
    row = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, -5:-1]
    weight = trainer.model.get_base_model().lm_head.weight
    expected = (weight[completion] - logits.softmax(-1) @ weight).mean(0)
    torch.testing.assert_close(found[0], expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_callback_measures_as_often_as_asked(tmp_path):
    trainer = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, max_steps=4)
    trainer.add_callback(GeometryCallback(trainer, every=2))
    trainer.train()
    assert ["geometry/mean_cosine" in log for log in trainer.state.log_history[:4]] == [True, False, True, False]


def test_the_callback_measures_once_after_a_run_that_was_interrupted(tmp_path):
    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, max_steps=4)
    callback, interrupts = GeometryCallback(trainer, every=2), Interrupts()
    trainer.add_callback(callback)
    trainer.add_callback(interrupts)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback.num_batches == 1
    trainer.remove_callback(interrupts)
    trainer.train()
    assert callback.num_batches == 5


def test_the_callback_refuses_what_makes_no_sense(tmp_path):
    trainer = make_trainer(G2RLTrainer, G2RLConfig, tmp_path)
    with pytest.raises(ValueError, match="logs `geometry/\\*` itself"):
        GeometryCallback(trainer)
    with pytest.raises(ValueError, match="every=0"):
        GeometryCallback(trainer, every=0)
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, budget="knapsack")
    with pytest.raises(ValueError, match="`budget='knapsack'` gives prompts unequally many rows, and `GeometryCall"):
        GeometryCallback(trainer)


def test_the_callback_compares_the_trained_rows_of_a_group(tmp_path, monkeypatch):
    sizes = []

    def noted(features, groups, scores):
        sizes.append((len(features), groups))
        return geometry(features, groups, scores)

    monkeypatch.setattr("trl_explore.trainers.geometry_callback.geometry", noted)
    for number in (2, 3):
        options = dict(trained_generations=number, per_device_train_batch_size=8, max_steps=1)
        trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
        trainer.add_callback(GeometryCallback(trainer))
        trainer.train()
    assert sizes == [(4, 2), (6, 3)]


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path, monkeypatch):
    rows = [{"problem": f"{i}+{i}=", "solution": rf"It is \boxed{{{2 * i % 10}}}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {**TINY_RUN, "dataset_name": "data.jsonl", "model_name_or_path": saved_model()}
    fields |= {"gradient_accumulation_steps": 2, "max_completion_length": 8}
    run_example("g2rl.py", *as_flags(fields), folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file()
    logged = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert "geometry/mean_cosine" in logged[0]

"""Clip-Cov and KL-Cov: which tokens they take, what these get, and the authors' loss by autograd."""

import pytest
import torch
from peft import LoraConfig
from test_credit_trainers import odd
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_trainer, one_batch, tiny_methods, trained

from trl_explore.trainers import ExplorationConfig, ExplorationTrainer, TreeGRPOConfig, TreeGRPOTrainer

DROPOUT = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.3)
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


def odd_but_for_the_first_group(completion_ids, **columns):
    return [1.0] * 4 + odd(completion_ids[4:])


def make(folder, cls=ExplorationTrainer, config=ExplorationConfig, **options):
    return make_trainer(cls, config, folder, **{"reward_funcs": odd, "loss_type": "grpo", **options})


def loss_tokens(output):
    return (output["completion_mask"] * output.get("tool_mask", 1)).bool()


def wide(output):
    advantages = output["advantages"]
    return advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(output["completion_ids"].shape)


def test_clipped_tokens_are_a_share_of_those_in_the_range_and_nothing_else_changes(tmp_path):
    options = dict(steps_per_generation=2)  # TRL makes old log-probabilities
    plain = one_batch(make(tmp_path, **options))
    trainer = make(tmp_path, clip_cov=0.1, clip_cov_low=0.2, clip_cov_high=2.0, **options)
    output = one_batch(trainer)
    mask, before = loss_tokens(plain), wide(plain)
    clipped = (output["advantages"] != before) & mask
    logprobs = plain["old_per_token_logps"]
    cov = (before - before[mask].mean()) * (logprobs - logprobs[mask].mean())
    number = int(0.1 * mask.sum())
    assert clipped.sum() == number > 3
    assert (output["advantages"][clipped] == 0).all() and (before[clipped] != 0).all()
    assert (cov[clipped] > 0.2).all() and (cov[clipped] < 2.0).all()
    metrics = trainer._metrics["train"]
    assert metrics["credit/clip_cov_fraction"] == [pytest.approx(number / mask.sum().item())]
    assert metrics["credit/covariance_mean"] == [pytest.approx(cov[mask].mean().item(), abs=1e-5)]


def test_where_trl_has_no_old_logprobs_they_are_what_it_would_compute(tmp_path):
    chosen = []
    for options in (dict(per_device_train_batch_size=16), dict(steps_per_generation=2)):
        trainer = make(tmp_path, clip_cov=0.1, clip_cov_low=0.2, **options)
        output = one_batch(trainer)
        assert ("old_per_token_logps" in output) == ("steps_per_generation" in options)
        chosen.append(output["advantages"])
    torch.testing.assert_close(*chosen)


@pytest.mark.parametrize("peft_config", [None, DROPOUT], ids=["no dropout", "dropout"])
def test_without_candidates_nothing_is_clipped_and_dropout_and_random_states_are_left_alone(tmp_path, peft_config):
    """Nothing but the pass for log-probabilities happens. With dropout, training uses random states."""
    options = dict(reward_funcs=odd, peft_config=peft_config)
    expected, _ = trained(ExplorationTrainer, ExplorationConfig, tmp_path, **options)
    off = dict(clip_cov=0.5, clip_cov_low=1e6, clip_cov_high=2e6)
    got, log = trained(ExplorationTrainer, ExplorationConfig, tmp_path, **off, **options)
    assert_same(got, expected)
    assert log[0]["credit/clip_cov_fraction"] == 0


def test_only_trained_tokens_are_counted_and_clipped(tmp_path):
    def rollout(prompts, trainer):
        ids = [[10, 11, 12, 13 + i % 2, 1] for i in range(len(prompts))]
        prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": [[0, 1, 0, 1, 1]] * 8}

    trainer = make(tmp_path, rollout_func=rollout, clip_cov=1.0, clip_cov_low=-1e6, clip_cov_high=1e6)
    output = one_batch(trainer)
    mask = loss_tokens(output)
    assert mask.sum() == 24 and (output["advantages"][mask] == 0).all() and (output["advantages"][~mask] != 0).all()


KL = dict(kl_cov=0.2, kl_cov_coef=0.7, num_iterations=2)


def test_the_tokens_with_the_largest_covariance_are_marked(tmp_path):
    trainer = make(tmp_path, **KL)
    output = one_batch(trainer)
    mask, advantages, logprobs = loss_tokens(output), wide(output), output["old_per_token_logps"]
    cov = (advantages - advantages[mask].mean()) * (logprobs - logprobs[mask].mean())
    chosen = output["kl_cov"]
    number = int(0.2 * mask.sum())
    assert output["advantages"].dim() == 1 and chosen.sum() == number and not (chosen & ~mask).any()
    assert cov[chosen].min() >= cov[mask & ~chosen].max() - 1e-6
    assert trainer._metrics["train"]["credit/kl_cov_fraction"] == [pytest.approx(number / mask.sum().item())]


def moved(trainer):
    """Weights that are not those that sampled, so that ratios leave every clip range."""
    torch.manual_seed(1)
    with torch.no_grad():
        for value in trainer.model.parameters():
            value += 0.1 * torch.randn_like(value)


def authors_loss(trainer, rows, coef):
    """Of row 4's code: `-A * ratio + coef * |log ratio|` on chosen tokens, `-A * ratio` on the others."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    width = rows["completion_ids"].shape[1]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = trainer.model(ids, attention_mask=attention, position_ids=positions).logits[:, -width - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, rows["completion_ids"].unsqueeze(2)).squeeze(2)
    log_ratio, mask = logprobs - rows["old_per_token_logps"], loss_tokens(rows)
    penalty = torch.where(rows["kl_cov"], coef * log_ratio.abs(), 0.0)
    tokens = (-wide(rows) * log_ratio.exp() + penalty) * mask
    per_row = tokens.sum(1) / mask.sum(1).clamp(min=1)
    return {
        "grpo": per_row[mask.any(1)].sum() / (mask.any(1).sum() if trainer.args.drop_zero_advantage else len(mask)),
        "bnpo": tokens.sum() / mask.sum(),
        "dr_grpo": tokens.sum() / (len(mask) * trainer.args.max_completion_length),
        "dapo": tokens.sum() / mask.sum(),
    }[trainer.args.loss_type], (log_ratio.exp() * mask)


def gradients(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in trainer.model.named_parameters()}


MORE = {
    "": {},
    "packed": dict(shared_prefix_training="on"),
    "scaled": dict(drop_zero_advantage=True, reward_funcs=odd_but_for_the_first_group),
    "tree": dict(cls=TreeGRPOTrainer, config=TreeGRPOConfig, expansion_width=3, node_length=2),
}


@pytest.mark.parametrize(
    "loss_type, more",
    [*((loss, "") for loss in LOSSES), ("dapo", "packed"), ("grpo", "scaled"), ("grpo", "tree")],
)
def test_the_gradient_is_that_of_the_authors_loss(tmp_path, loss_type, more):
    trainer = make(tmp_path, loss_type=loss_type, **KL, **MORE[more])
    output = one_batch(trainer)
    moved(trainer)
    before = {name: value.clone() for name, value in output.items()}
    assert (trainer.stream_training.main_scale(output) != 1) == (more == "scaled")
    found = gradients(trainer, trainer.compute_loss(trainer.model, output))
    assert trainer._metrics["train"].get("packing/packed", [0]) == [more == "packed"]
    loss, ratios = authors_loss(trainer, output, coef=0.7)
    expected = gradients(trainer, loss)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert ratios.max() > 1.5 and 0 < ratios[ratios > 0].min() < 0.5  # outside every clip range
    assert sum(value.abs().sum() for value in expected.values()) > 0.1
    assert differ(expected, gradients(trainer, authors_loss(trainer, output, coef=0.0)[0]))  # the penalty is in it
    assert all(torch.equal(output[name], value) for name, value in before.items())  # trained again in the next pass


def test_a_penalty_of_weight_zero_only_lifts_the_clip(tmp_path):
    options = dict(reward_funcs=odd, num_iterations=2, max_steps=6, learning_rate=0.05, loss_type="grpo")
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, epsilon=1e6, **options)
    got, log = trained(ExplorationTrainer, ExplorationConfig, tmp_path, kl_cov=0.1, kl_cov_coef=0.0, **options)
    assert_same(got, expected, tolerance=1e-6)
    assert all(entry.get("clip_ratio/region_mean", 0) == 0 for entry in log)
    assert differ(trained(GRPOTrainer, GRPOConfig, tmp_path, **options)[0], expected)


def test_the_clip_is_back_after_the_loss_and_in_evaluation(tmp_path):
    trainer = make(tmp_path, eval_dataset=make(tmp_path).train_dataset.select(range(8)), num_generations_eval=2, **KL)
    before = trainer.epsilon_low, trainer.epsilon_high
    trainer.train()
    assert (trainer.epsilon_low, trainer.epsilon_high) == before == (0.2, 0.2)
    assert "eval_reward" in trainer.evaluate()


def test_rows_of_further_streams_keep_their_clip(tmp_path):
    cls, config, options = tiny_methods()["deep_grpo"]
    seen = set()

    class Noting(cls):
        def _compute_loss(self, model, rows):
            seen.add((self.current is None, self.epsilon_high))
            return super()._compute_loss(model, rows)

    make(tmp_path, Noting, config, **{**options, **KL, "max_steps": 2}).train()
    assert seen == {(True, float("inf")), (False, 0.2)}

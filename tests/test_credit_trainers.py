"""Credit in trainers: neutral values are GRPO, each value is its formula; all five methods, resume, and errors."""

import pandas as pd
import pytest
import torch
from test_branpo import agent, sound_lake, voice  # noqa: F401  # fixtures
from test_plain_grpo import make_seeing_trainer
from trl import GRPOConfig, GRPOTrainer
from world import (
    BOARDS,
    assert_same,
    contains_answer,
    differ,
    make_dataset,
    make_trainer,
    never,
    one_batch,
    parameters,
    tiny_methods,
    trained,
)

from trl_explore import trainers
from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import normalised
from trl_explore.credit.subsets import pass_at_k_advantages, pkpo
from trl_explore.credit.unlikeliness import discounted
from trl_explore.rewards.checks import RewardError
from trl_explore.rows.streams import LOSS_NORMALISERS
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer, ExplorationConfig, ExplorationTrainer

METHODS = tiny_methods()
OURS = (ExplorationTrainer, ExplorationConfig)
NEUTRAL = dict(passk_k=2, unlikeliness_beta=0.0, count_bonus=0.0, count_bonus_scope="batch", clip_cov=0.0, kl_cov=0.0)
NEUTRAL |= dict(clip_cov_low=0.0, clip_cov_high=9.0, kl_cov_coef=3.0)


def odd(completion_ids, **columns):
    """About every other completion succeeds."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def odd_or_unscored(completion_ids, **columns):
    return [float(sum(ids) % 2) if len(ids) > 6 else None for ids in completion_ids]


def make(folder, pair=OURS, **options):
    return make_trainer(*pair, folder, **{"reward_funcs": odd, **options})


@pytest.mark.parametrize("advantage", ["grpo", "unlikeliness"])
@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
def test_neutral_values_are_grpo_bit_for_bit(tmp_path, loss_type, advantage):
    options = dict(loss_type=loss_type, reward_funcs=odd, num_iterations=2, max_steps=4)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(*OURS, tmp_path, advantage=advantage, **NEUTRAL, **options)
    assert_same(got, expected)
    assert not any(name.startswith("credit/") for entry in log for name in entry)


@pytest.mark.parametrize("scope", ["history", "batch"])
def test_completions_without_answers_get_no_bonus(tmp_path, scope):
    """None of these is a number or has a mark."""
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=odd)
    with pytest.warns(UserWarning, match=r"`count_bonus=5.0` counts answers, and none was found .*`count_bonus=0`"):
        got, log = trained(*OURS, tmp_path, reward_funcs=odd, count_bonus=5.0, count_bonus_scope=scope)
    assert_same(got, expected)
    assert log[0]["credit/answered_fraction"] == 0


@pytest.mark.parametrize("loss_type", sorted(LOSS_NORMALISERS))
@pytest.mark.parametrize("advantage", ["maxrl", "pkpo_loo"])
def test_other_advantages_train_with_every_loss_type(tmp_path, loss_type, advantage):
    options = dict(loss_type=loss_type, reward_funcs=odd, num_iterations=2, max_steps=2)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, _ = trained(*OURS, tmp_path, advantage=advantage, passk_k=2, **options)
    assert differ(got, expected) and all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("reward", [odd_or_unscored, never], ids=lambda reward: reward.__name__)
@pytest.mark.parametrize("advantage", ["maxrl", "passk", "pkpo", "pkpo_loo"])
def test_the_advantage_is_the_formula_of_the_total_rewards(tmp_path, advantage, reward):
    trainer = make(tmp_path, advantage=advantage, passk_k=2, reward_funcs=reward, per_device_train_batch_size=16)
    found, rewards = one_batch(trainer)["advantages"], trainer.scorer.totals().view(-1, 4)
    formulas = {
        "maxrl": maxrl,
        "passk": lambda rewards: pass_at_k_advantages(rewards, k=2),
        "pkpo": lambda rewards: pkpo(rewards, k=2),
        "pkpo_loo": lambda rewards: pkpo(rewards, k=2, leave_one_out=True),
    }
    assert torch.equal(found, formulas[advantage](rewards).flatten())
    assert (found[rewards.flatten().isnan()] == 0).all() and (found.abs().max() > 0) == (reward is not never)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("options", [dict(num_iterations=2), {}], ids=["old log-probabilities", "none of TRL's"])
def test_unlikeliness_goes_by_the_mean_log_probability_of_own_tokens(tmp_path, options, scale):
    trainer = make(tmp_path, advantage="unlikeliness", unlikeliness_beta=0.5, scale_rewards=scale, **options)
    output, plain = one_batch(trainer), one_batch(make(tmp_path, num_iterations=2))
    mask, rewards = output["completion_mask"], trainer.scorer.totals().view(-1, 4)
    assert torch.equal(plain["completion_ids"], output["completion_ids"])
    logprobs = ((plain["old_per_token_logps"] * mask).sum(1) / mask.sum(1)).view(-1, 4)
    worth = discounted(rewards, logprobs, beta=0.5)
    torch.testing.assert_close(output["advantages"], normalised(worth, scale=scale).flatten())
    assert differ({"": worth}, {"": rewards})


def test_groups_that_only_ranks_tell_apart_have_no_advantage(tmp_path):
    def all_right_in_the_first_group(completion_ids, **columns):
        return [1.0] * 4 + odd(completion_ids[4:])

    output = one_batch(make(tmp_path, advantage="unlikeliness", reward_funcs=all_right_in_the_first_group))
    assert (output["advantages"][:4] == 0).all() and (output["advantages"][4:] != 0).all()


def test_success_is_what_the_methods_threshold_says(tmp_path):
    def half(completion_ids, **columns):
        return [reward / 2 for reward in odd(completion_ids)]

    options = dict(aux_loss_weight=0.0, success_threshold=0.5, num_branches=2)
    pair = (DeepGRPOTrainer, DeepGRPOConfig)
    trainer = make(tmp_path, pair, advantage="passk", passk_k=2, reward_funcs=half, **options)
    found = one_batch(trainer)["advantages"]
    expected = pass_at_k_advantages((trainer.scorer.totals().view(-1, 4) == 0.5).float(), k=2)
    assert torch.equal(found, expected.flatten()) and found.abs().max() > 0


def test_success_is_what_the_deciding_function_says(tmp_path):
    options = dict(reward_funcs=[odd, contains_answer], reward_weights=[1.0, 0.3], success_reward="odd")
    trainer = make(tmp_path, advantage="passk", passk_k=2, **options)
    found = one_batch(trainer)["advantages"]
    expected = pass_at_k_advantages(trainer.scorer.rewards_per_func[:, 0].view(-1, 4), k=2)
    assert torch.equal(found, expected.flatten()) and found.abs().max() > 0


def test_the_table_shows_the_advantage_that_is_trained(tmp_path):
    options = dict(advantage="maxrl", clip_cov=0.2, clip_cov_low=0.0, max_steps=1)
    trainer = make(tmp_path, log_completions=True, num_completions_to_print=0, **options)
    trainer.train()
    rows = trainer._buffered_inputs[0]
    shown = pd.read_parquet(next((tmp_path / "completions").iterdir()))["advantage"]
    mask = rows["completion_mask"]
    trained_ones = (rows["advantages"] * mask).sum(1) / mask.sum(1)
    assert sorted(shown) == pytest.approx(sorted(trained_ones.tolist()), abs=1e-6) and shown.abs().max() > 0


def test_rows_without_advantage_leave_by_the_new_one(tmp_path):
    """Two wrong rows are fewer than k = 3: such groups learn nothing in pass@3, though rewards differ."""

    def two_right(completion_ids, **columns):
        return [1.0, 1, 0, 0, 1, 0, 0, 0]

    options = dict(advantage="passk", passk_k=3, drop_zero_advantage=True, reward_funcs=two_right)
    output = one_batch(make(tmp_path, **options))
    assert output["tool_mask"].any(dim=1).tolist() == [False] * 4 + [True] * 4


CHARACTERS = {"7": 12, "3": 8, "a": 21}


def answers(prompts, trainer):
    """Two sevens, a three and no number for every prompt."""
    assert trainer._tokenizer.convert_ids_to_tokens([*CHARACTERS.values()]) == [*CHARACTERS]
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    said = [[CHARACTERS["773a"[i % 4]], 1] for i in range(len(prompts))]
    return {"prompt_ids": prompt_ids, "completion_ids": said, "logprobs": None}


def bonuses(folder, batches, **options):
    """Advantages of a prompt's group in so many batches of the same two prompts."""
    data = make_dataset().select([0, 1])
    options = dict(rollout_func=answers, train_dataset=data, reward_funcs=never, shuffle_dataset=False) | options
    trainer = make(folder, count_bonus=2.0, **options)
    return trainer, [one_batch(trainer)["advantages"][:4].tolist() for _ in range(batches)]


def test_answers_that_were_seen_less_often_get_more_also_where_all_are_wrong(tmp_path):
    trainer, (first, second, third) = bonuses(tmp_path, 3)
    assert first == [0.0] * 4  # nothing was seen before
    worth = 2**-0.5
    mean = (2 * worth + 1) / 3
    assert second == pytest.approx([2 * (worth - mean)] * 2 + [2 * (1 - mean), 0.0])
    assert third[2] == pytest.approx(2 * (2**-0.5 - (2 * 0.5 + 2**-0.5) / 3))
    assert [dict(own) for own in trainer.credit.counts.values()] == [{"7": 6, "3": 3}] * 2
    metrics = trainer._metrics["train"]
    assert metrics["credit/bonus_mean"] == pytest.approx([1.0, mean, (2 * 0.5 + 2**-0.5) / 3])
    assert metrics["credit/distinct_answers"] == [2.0] * 3 and metrics["credit/answered_fraction"] == [0.75] * 3


def test_answers_that_others_of_the_group_give_cost(tmp_path):
    trainer, found = bonuses(tmp_path, 2, count_bonus_scope="batch")
    assert found == [pytest.approx([-2 / 3, -2 / 3, 0.0, 0.0])] * 2
    assert trainer._metrics["train"]["credit/bonus_mean"] == pytest.approx([-2 / 9] * 2)


def test_rows_without_a_reward_have_no_answer(tmp_path):
    def scores_a_seven_and_a_letter(completion_ids, **columns):
        return [None, 0.0, None, 0.0] * 2

    trainer, (_, second) = bonuses(tmp_path, 2, reward_funcs=scores_a_seven_and_a_letter)
    assert second == [0.0] * 4 and [dict(own) for own in trainer.credit.counts.values()] == [{"7": 2}] * 2


def test_the_bonus_is_added_to_any_advantage_and_kept_with_rows_that_learn(tmp_path):
    def seven(completion_ids, **columns):
        return [float(ids[0] == CHARACTERS["7"]) for ids in completion_ids]

    _, (first, second) = bonuses(tmp_path, 2, advantage="maxrl", reward_funcs=seven)
    assert first == [1.0, 1.0, -1.0, -1.0]
    assert [s - f for s, f in zip(second, first, strict=True)] == pytest.approx(
        [-0.195262] * 2 + [0.390524, 0], abs=1e-5
    )
    trainer, (first, second) = bonuses(tmp_path, 2, drop_zero_advantage=True)
    assert first == [0.0] * 4 and second[2] > 0


def test_evaluation_counts_no_answers(tmp_path):
    trainer, _ = bonuses(tmp_path, 1, eval_dataset=make_dataset().select([0, 1]), num_generations_eval=4)
    before = trainer.credit.state()
    trainer.evaluate()
    assert trainer.credit.state() == before and "eval_credit/bonus_mean" not in trainer._metrics["eval"]


TOKENS = dict(clip_cov=0.1, clip_cov_low=0.0, kl_cov=0.1)
ALL = dict(count_bonus=0.5, passk_k=2, max_completion_length=3, **TOKENS)
CREDIT = {
    "deep_grpo": dict(advantage="passk", segment_length=1, **ALL),
    "sesa": dict(advantage="maxrl", **ALL),
    "g2rl": dict(advantage="unlikeliness", **ALL),
    "branpo": dict(advantage="pkpo", **ALL),
    "tree_grpo": TOKENS,
}
METRICS = {"credit/covariance_mean", "credit/clip_cov_fraction", "credit/kl_cov_fraction"}
# Two passes over a generation batch of two micro-batches: the third step is in the middle of the first.
REUSED = dict(num_iterations=2, steps_per_generation=2, max_steps=7, save_steps=3)


@pytest.mark.parametrize("method", CREDIT)
def test_methods_train_and_resume_with_it_bit_for_bit(tmp_path, method):
    trainer_class, config_class, own = METHODS[method]
    options = {"reward_funcs": odd, **own, **REUSED}
    plain, _ = trained(trainer_class, config_class, tmp_path / "plain", **{**options, "max_completion_length": 3})
    options |= CREDIT[method]
    whole = make_trainer(trainer_class, config_class, tmp_path, **options, save_strategy="steps")
    whole.train()
    assert differ(parameters(whole), plain) and all(v.isfinite().all() for v in parameters(whole).values())
    log = whole.state.log_history[0]
    assert METRICS <= log.keys() and log["credit/clip_cov_fraction"] > 0 < log["credit/kl_cov_fraction"]
    assert ("credit/bonus_mean" in log) == (method != "tree_grpo")
    again = make_trainer(trainer_class, config_class, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))
    assert again.credit.state() == whole.credit.state()
    assert bool(whole.credit.counts) == (method != "tree_grpo")


def test_a_checkpoint_of_a_run_that_counted_nothing_starts_without_counts(tmp_path):
    make(tmp_path, save_strategy="steps", save_steps=2, max_completion_length=2).train()
    assert "credit" not in torch.load(tmp_path / "checkpoint-2" / "explore_state_0.pt", weights_only=True)
    again = make(tmp_path, count_bonus=0.5, max_completion_length=2, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    answered = [entry["credit/answered_fraction"] * 8 for entry in again.state.log_history[2:4]]
    assert sum(sum(answers.values()) for answers in again.credit.counts.values()) == sum(answered) > 0


def test_branches_of_deep_grpo_keep_grpos_credit_among_siblings(tmp_path):
    class Kept(DeepGRPOTrainer):
        def extra_streams(self, output, examples, rewards):
            self.kept = super().extra_streams(output, examples, rewards)
            return self.kept

    options = dict(advantage="pkpo", passk_k=2, num_branches=3, segmentation="fixed", segment_length=2)
    trainer = make(tmp_path, (Kept, DeepGRPOConfig), **options)
    one_batch(trainer)
    scored = trainer.kept["aux"][0]
    expected = normalised(scored.rewards.view(-1, 3), scale="group").flatten()
    torch.testing.assert_close(scored.rows["advantages"][scored.real], expected, atol=1e-4, rtol=1e-4)


def test_sesas_weights_multiply_it(tmp_path):
    trainer_class, config_class, own = METHODS["sesa"]
    options = dict(own, off_policy_correction=True, off_policy_scope="all")
    found = {}
    for advantage in ("grpo", "maxrl"):
        trainer = make(tmp_path, (trainer_class, config_class), advantage=advantage, **options)
        output = one_batch(trainer)
        rewards = trainer.scorer.totals().view(-1, 4)
        own = maxrl(rewards) if advantage == "maxrl" else normalised(rewards, scale="group")
        known = own.flatten() != 0
        found[advantage] = (output["advantages"] / own.flatten().unsqueeze(1))[known]
    torch.testing.assert_close(found["maxrl"], found["grpo"], rtol=1e-4, atol=1e-5)
    assert found["maxrl"].std() > 0


def test_prompts_with_a_branch_of_branpo_have_its_credit_and_others_this_one(tmp_path, voice):  # noqa: F811
    def solved_or_odd(environments, board, **columns):
        steps = [environment.episode.steps for environment in environments]
        return [1.0 if b == BOARDS[0] else float(s % 2) for b, s in zip(board, steps, strict=True)]

    voice(0.3)
    options = dict(
        advantage="pkpo", passk_k=2, num_branches_solved=0, redundancy_tries=0, reward_funcs=[solved_or_odd]
    )
    trainer = agent(tmp_path, **options)
    explore, branched = trainer.branch_explorer.explore, {}

    def watched(groups):
        branches = explore(groups)
        branched.update(branches.main_advantages)
        return branches

    trainer.branch_explorer.explore = watched
    output = one_batch(trainer)
    own = pkpo(trainer.scorer.totals().view(-1, 4), k=2).flatten()
    solved = [example["board"] == BOARDS[0] for example in trainer.main_examples]
    assert [row in branched for row in range(8)] == [not s for s in solved] and sum(solved) == 4
    for row, found in enumerate(output["advantages"]):
        credit = torch.full_like(found, 0.5) if solved[row] else torch.tensor(branched[row])
        assert torch.equal(found[: len(credit)], credit)
    assert (own[solved] == 0.5).all()


REFUSED = {
    "`advantage`: unknown value 'max_rl'; did you mean 'maxrl'": dict(advantage="max_rl"),
    "`passk_k=0` must be at least 1 completion": dict(passk_k=0),
    "`passk_k=5` is more than the `num_generations=4` rows of a group": dict(advantage="passk", passk_k=5),
    "`passk_k=6` is more than": dict(advantage="pkpo_loo", passk_k=6),
    "`passk_k=4` and `num_generations=4` gives every row the advantage 0": dict(advantage="passk", passk_k=4),
    "`unlikeliness_beta=1.5` must be in": dict(unlikeliness_beta=1.5),
    "`unlikeliness_beta=nan`": dict(unlikeliness_beta=float("nan")),
    "`count_bonus=-1.0` must be at least 0": dict(count_bonus=-1.0),
    "`count_bonus=inf` must": dict(count_bonus=float("inf")),
    "`count_bonus_scope`: unknown value 'run'; choose one of batch, history": dict(count_bonus_scope="run"),
    "drops groups .*`count_bonus=0.1` trains them": dict(count_bonus=0.1, dynamic_sampling="filter"),
    "`clip_cov=2.0` must be a share": dict(clip_cov=2.0),
    "`kl_cov=-0.1` must be a share": dict(kl_cov=-0.1),
    "`clip_cov_low=nan`": dict(clip_cov_low=float("nan")),
    "`clip_cov_low=5.0` must be less than `clip_cov_high=5.0`": dict(clip_cov_low=5.0),
    "`kl_cov_coef=-1.0` must be at least 0": dict(kl_cov_coef=-1.0),
    "`advantage='maxrl'` is formed from a row's total reward": dict(
        advantage="maxrl", multi_objective_aggregation="normalize_then_sum"
    ),
    "`kl_cov=0.1` does nothing with one update per generation batch.*`num_iterations=2`": dict(kl_cov=0.1),
    "does nothing with one update": dict(kl_cov=0.1, gradient_accumulation_steps=4, steps_per_generation=2),
    "`kl_cov=0.1` changes the ratio of single tokens.*`loss_type='cispo'`": dict(kl_cov=0.1, loss_type="cispo"),
    "`importance_sampling_level='sequence'`": dict(kl_cov=0.1, importance_sampling_level="sequence"),
    "`kl_cov=0.1` takes the place of all clipping, `delta=4.0` too": dict(kl_cov=0.1, delta=4.0),
    "drops groups whose rewards are all equal": dict(advantage="reinforce", dynamic_sampling="filter"),
    "`success_weight=-0.1` must be at least 0": dict(advantage="reinforce", success_weight=-0.1),
    "`off_policy_mask_threshold=0.5` too": dict(kl_cov=0.1, off_policy_mask_threshold=0.5),
}


@pytest.mark.parametrize("message, options", REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message) as error:
        make(tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [dict(advantage="maxrl"), dict(count_bonus=0.1)], ids=str)
def test_a_tree_has_its_own_credit(tmp_path, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}=.*the values of a tree are the advantages: leave `{name}` out"):
        trainers.TreeGRPOConfig(str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize("advantage", ["maxrl", "passk"])
def test_shaped_rewards_with_signs_are_no_successes(tmp_path, advantage):
    with pytest.raises(ValueError, match=f"`advantage='{advantage}'` needs rewards of .*G2RL's can be negative"):
        trainers.G2RLConfig(str(tmp_path), use_cpu=True, advantage=advantage)


LOOKING_AT_TOKENS = [dict(advantage="unlikeliness"), dict(count_bonus=0.1), dict(clip_cov=0.1), dict(kl_cov=0.1)]


@pytest.mark.parametrize("options", LOOKING_AT_TOKENS, ids=str)
def test_what_looks_at_tokens_alone_refuses_images(tmp_path, options):
    with pytest.raises(ValueError, match=f"`{[*options][0]}=.*not at a prompt's images"):
        make_seeing_trainer(*OURS, tmp_path, num_iterations=2, **options)


def test_advantages_of_rewards_alone_take_images(tmp_path):
    make_seeing_trainer(*OURS, tmp_path, advantage="maxrl", max_steps=1).train()


def signed(completion_ids, **columns):
    return [2 * reward - 1 for reward in odd(completion_ids)]


@pytest.mark.parametrize(
    "advantage, message",
    {"maxrl": "no.* may be negative, and row", "passk": "rewards must be 0 or 1"}.items(),
)
def test_rewards_that_do_not_fit_end_a_run_at_its_first_batch(tmp_path, advantage, message):
    trainer = make(tmp_path, advantage=advantage, passk_k=2, reward_funcs=signed)
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    assert one_batch(make(tmp_path, advantage="pkpo", passk_k=2, reward_funcs=signed))["advantages"].isfinite().all()


def test_fields_that_others_do_not_use_do_not_matter(tmp_path):
    make(tmp_path, passk_k=9, clip_cov_high=7.0)
    make(tmp_path, advantage="pkpo_loo", passk_k=4)  # only pass@k training needs more rows than `passk_k`
    trainers.BranPOConfig(str(tmp_path), use_cpu=True, advantage="passk", count_bonus=0.5)


def test_reinforce_trains_groups_that_all_fail(tmp_path):
    trainer = make(tmp_path, advantage="reinforce", success_weight=0.3, reward_funcs=never)
    assert (one_batch(trainer)["advantages"] == -1).all()
    trainer = make(tmp_path, advantage="reinforce", success_weight=0.3, reward_funcs=odd)
    output = one_batch(trainer)
    expected = torch.where(trainer.scorer.success() >= 1, 0.3, -1.0)
    torch.testing.assert_close(output["advantages"], expected)
    found, _ = trained(*OURS, tmp_path, advantage="reinforce", reward_funcs=never, max_steps=1)
    assert differ(found, parameters(make(tmp_path)))

"""What a user replaces after a trainer is made: the next run follows it, as GRPO does, or refuses it."""

import copy

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, contains_answer, make_dataset, make_model, make_trainer, parameters, tiny_methods

from trl_explore.evaluation.callbacks import PassAtKCallback
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

PLAIN = ExplorationTrainer, ExplorationConfig
METHODS = tiny_methods()
DEEP = METHODS["deep_grpo"]


def differences(n=12):
    """Other prompts than those of the small world."""
    return Dataset.from_dict({"prompt": [f"{i % 10}-1=" for i in range(n)], "answer": ["0"] * n})


class Noting:
    """A reward function that notes what it is asked about."""

    __name__ = "noting"

    def __init__(self):
        self.prompts, self.lengths, self.steps = [], [], []

    def __call__(self, completions, prompts, trainer_state, **columns):
        self.prompts += prompts
        self.lengths += map(len, completions)
        self.steps.append(trainer_state.global_step)
        return [float(len(completion) % 2) for completion in completions]


@pytest.mark.parametrize(
    "options",
    [dict(dynamic_sampling="refill"), dict(explore_threshold=0.5), dict(budget="vip"), dict(budget="knapsack")],
    ids=str,
)
def test_the_next_run_samples_prompts_of_new_data_only(tmp_path, options):
    noting = Noting()
    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=noting, max_steps=2, **options)
    trainer.train()
    noting.prompts.clear()
    trainer.train_dataset = differences()
    trainer.train()
    assert noting.prompts and all("-" in prompt for prompt in noting.prompts)


def test_the_next_run_goes_through_new_data_in_the_order_of_grpo(tmp_path):
    seen = {}
    for cls, config, options in ((GRPOTrainer, GRPOConfig, {}), (*PLAIN, dict(explore_threshold=0.99))):
        noting = Noting()
        trainer = make_trainer(cls, config, tmp_path, reward_funcs=noting, max_steps=2, **options)
        trainer.train()
        trainer.train_dataset = differences(40)
        noting.prompts.clear()
        trainer.train()
        seen[cls] = noting.prompts
    assert seen[GRPOTrainer] == seen[ExplorationTrainer]


def test_success_rates_stay_with_their_data(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, explore_threshold=0.5, max_steps=2)
    trainer.train()
    first = trainer.rounds.solved.rates
    trainer.train()
    assert trainer.rounds.solved.rates is first
    trainer.train_dataset = differences()
    trainer.train()
    assert trainer.rounds.solved.rates is not first and len(trainer.rounds.solved.rates) == 4


def test_a_checkpoint_of_other_data_gives_no_success_rates(tmp_path):
    options = dict(explore_threshold=0.5, save_strategy="steps", save_steps=2, max_steps=2)
    first = make_trainer(*PLAIN, tmp_path, **options)
    first.train()
    other = make_trainer(*PLAIN, tmp_path, **{**options, "max_steps": 3}, train_dataset=differences(36))
    with pytest.warns(UserWarning, match="written with other training data"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(other.rounds.solved.rates) == 2  # of the two prompts of the third step


def test_new_data_resume_bit_for_bit(tmp_path):
    options = dict(explore_threshold=0.2, save_strategy="steps", save_steps=2, max_steps=4)
    whole = make_trainer(*PLAIN, tmp_path, **options)
    whole.train()
    whole.train_dataset = differences()
    whole.train()
    again = make_trainer(*PLAIN, tmp_path, **options, train_dataset=differences())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))
    assert again.rounds.state() == whole.rounds.state()


def test_deferred_branches_of_the_first_data_are_dropped(tmp_path):
    noting = Noting()
    cls, config, options = DEEP
    options = dict(options, deferred_branching=True, branch_from="all")
    trainer = make_trainer(cls, config, tmp_path, reward_funcs=noting, **options)
    trainer.train()
    assert trainer.branch_explorer._queue
    noting.prompts.clear()
    trainer.train_dataset = differences()
    trainer.train()
    assert noting.prompts and all("-" in prompt for prompt in noting.prompts)


@pytest.mark.parametrize(
    "data, message",
    [
        (differences().to_iterable_dataset(), "`train_dataset` is a stream"),
        (differences().rename_column("prompt", "question"), "no `prompt` column"),
    ],
)
def test_new_data_are_checked_as_the_first(tmp_path, data, message):
    trainer = make_trainer(*PLAIN, tmp_path, explore_threshold=0.5)
    trainer.train_dataset = data
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_longer_prompts_of_new_data_must_fit(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, shared_prefix_training="on", packed_token_budget=32)
    trainer.train_dataset = Dataset.from_dict({"prompt": ["1+" * 20 + "1="] * 8, "answer": ["0"] * 8})
    with pytest.raises(ValueError, match="`packed_token_budget=32` cannot hold a row of"):
        trainer.train()


def test_reward_weights_that_a_user_changes_hold_from_then_on(tmp_path):
    def one(completions, **columns):
        return [1.0] * len(completions)

    trainer = make_trainer(*PLAIN, tmp_path, reward_funcs=[contains_answer, one], budget="vip", max_steps=1)
    assert trainer.scorer.weights.tolist() == [1.0, 1.0]
    trainer.reward_weights = torch.tensor([1.0, 5.0])
    trainer.train()
    assert trainer.scorer.totals().tolist() == [5.0 + r for r in trainer.scorer.rewards_per_func[:, 0].tolist()]


def test_advantages_follow_weights_as_in_grpo(tmp_path):
    found = []
    for cls, config, options in (
        (GRPOTrainer, GRPOConfig, {}),
        (*PLAIN, dict(budget="vip", **{"min_generations": 4, "max_generations": 4})),
    ):
        rewards = [contains_answer, Noting()]
        trainer = make_trainer(cls, config, tmp_path, reward_funcs=rewards, max_steps=2, **options)
        trainer.train()
        trainer.reward_weights = torch.tensor([0.25, -1.0])
        trainer.train()
        found.append(parameters(trainer))
    assert_same(*found)


def test_a_success_reward_that_is_gone_is_named(tmp_path):
    cls, config, options = DEEP
    trainer = make_trainer(cls, config, tmp_path, success_reward="contains_answer", **options)
    trainer.reward_funcs, trainer.reward_func_names = [Noting()], ["noting"]
    with pytest.raises(ValueError, match="`success_reward='contains_answer'` is none of the reward functions"):
        trainer.train()


def test_an_evaluation_asks_the_trainers_current_functions(tmp_path):
    noting = Noting()
    trainer = make_trainer(output_dir=tmp_path)
    evaluation = PassAtKCallback(trainer, make_dataset().select(range(2)), num_samples=2, k=(1,))
    trainer.reward_funcs, trainer.reward_weights = [noting], torch.tensor([2.0])
    metrics = evaluation.evaluate()
    assert noting.prompts and metrics["eval/pass_at_1"] == metrics["eval/reward"] / 2


def longer(trainer):
    trainer.max_completion_length = trainer.generation_config.max_new_tokens = 12


@pytest.mark.parametrize("method", ["deep_grpo", "tree_grpo"])
def test_all_rows_grow_with_a_limit_that_a_user_raises(tmp_path, method):
    cls, config, options = METHODS[method]
    noting = Noting()
    trainer = make_trainer(cls, config, tmp_path, reward_funcs=noting, **options)
    trainer.train()
    assert max(noting.lengths) <= 8
    longer(trainer)
    trainer.train()
    assert 8 < max(noting.lengths) <= 12 and trainer.args.max_completion_length == 12


def only_trainer(trainer):
    trainer.max_completion_length = 12


def only_sampling(trainer):
    trainer.generation_config.max_new_tokens = 12


@pytest.mark.parametrize("change", [only_trainer, only_sampling])
def test_two_limits_that_differ_are_taken_as_in_grpo_where_it_samples(tmp_path, change):
    found = []
    for kind in ((GRPOTrainer, GRPOConfig), PLAIN):
        trainer = make_trainer(*kind, tmp_path, loss_type="dr_grpo", max_steps=1)
        change(trainer)
        trainer.train()
        found.append(parameters(trainer))
    assert_same(*found)


def argument(**fields):
    return lambda trainer: vars(trainer.args).update(fields)


def replace_args(trainer):
    trainer.args = copy.deepcopy(trainer.args)


@pytest.mark.parametrize(
    "change, message",
    [
        (argument(max_completion_length=12), "`args.max_completion_length` changed .* set `trainer.max_completion_le"),
        (argument(temperature=0.5), "`args.temperature` changed from .* set `trainer.temperature`"),
        (argument(num_generations=2), "`args.num_generations` changed from .* set `trainer.num_generations`"),
        (argument(explore="resample"), "`explore` was changed from None to 'resample'"),
        (replace_args, "`trainer.args` was replaced"),
        (only_trainer, "are no longer the same.*set both"),
        (only_sampling, "are no longer the same.*set both"),
    ],
)
def test_what_a_run_cannot_follow_is_refused(tmp_path, change, message):
    cls, config, options = DEEP
    trainer = make_trainer(cls, config, tmp_path, **options)
    change(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_other_groups_need_another_trainer_where_a_method_samples(tmp_path):
    cls, config, options = METHODS["sesa"]
    trainer = make_trainer(cls, config, tmp_path, **options)
    trainer.num_generations = 2
    with pytest.raises(ValueError, match="`trainer.num_generations` changed from 4 to 2"):
        trainer.train()


@pytest.mark.parametrize("options", [{}, dict(explore_threshold=0.99), dict(dynamic_sampling="filter")], ids=str)
def test_other_groups_are_those_of_grpo_where_it_samples(tmp_path, options):
    prompts = []
    for cls, config, own in ((GRPOTrainer, GRPOConfig, {}), (*PLAIN, options)):
        noting = Noting()
        trainer = make_trainer(cls, config, tmp_path, reward_funcs=noting, max_steps=2, **own)
        trainer.train()
        noting.prompts.clear()
        trainer.num_generations = 2
        trainer.train()
        prompts.append(noting.prompts)
    assert prompts[0] == prompts[1]


def test_attributes_that_trl_reads_in_every_step_are_followed(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, max_steps=1)
    trainer.scale_rewards, trainer.loss_type, trainer.temperature = "none", "bnpo", 0.7
    trainer.train()
    args = trainer.args
    assert (args.scale_rewards, args.loss_type, args.temperature) == ("none", "bnpo", 0.7)
    # Prompts are chosen as the next run's arguments say.
    args.dynamic_sampling = "filter"
    trainer.train()
    assert "selection/kept_groups" in trainer.state.log_history[0]


def test_another_model_needs_another_trainer(tmp_path):
    trainer = make_trainer(*PLAIN, tmp_path, max_steps=1)
    trainer.train()
    trainer.train()
    trainer.model = make_model(seed=5)
    with pytest.raises(ValueError, match="`trainer.model` was replaced"):
        trainer.train()

"""How many tokens a trainer samples: one count for every method, read by comparisons and logged."""

from types import SimpleNamespace

import pytest
import torch
from test_branpo import Voice, make
from trl import GRPOConfig, GRPOTrainer
from world import contains_answer, make_dataset, make_trainer, never, says, tiny_methods, trained

from trl_explore.compare.run import CostCallback
from trl_explore.compare.settings import Budget
from trl_explore.methods import METHODS
from trl_explore.saving.checkpoints import STATE_FILE
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer, TreeGRPOConfig, TreeGRPOTrainer

OURS = (ExplorationTrainer, ExplorationConfig)
PLAIN = (GRPOTrainer, GRPOConfig)


class Asked:
    """A reward function that counts the tokens of the completions that it is asked about in training."""

    def __init__(self, reward=never):
        self.reward, self.tokens, self.__name__ = reward, 0, "asked"

    def __call__(self, completion_ids, trainer_state=None, **columns):
        self.tokens += sum(map(len, completion_ids))
        return self.reward(**columns)


class Searcher(ExplorationTrainer):
    """Samples further completions as `docs/own-method.md` says, twice, and throws all of them away."""

    def setup(self):
        self.own_tokens = 0

    def search(self, output):
        prompts = self.encode_prompts([example["prompt"] for example in self.main_examples])
        for number, length in ((2, 5), (1, 3)):
            found = self.sample(prompts, number, length)
            self.own_tokens += sum(len(continuation.token_ids) for group in found for continuation in group)


def charged(trainer):
    """Train, and return the cost that a comparison writes down."""
    costs = CostCallback(Budget())
    costs.count_sampled(trainer)
    trainer.add_callback(costs)
    trainer.train()
    return costs.cost.tokens


def steps_of(trainer):
    return [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]


def test_a_subclass_is_charged_for_what_it_samples_in_search(tmp_path):
    asked = Asked()
    trainer = make_trainer(Searcher, ExplorationConfig, tmp_path, reward_funcs=asked)
    tokens = charged(trainer)
    assert trainer.own_tokens > asked.tokens > 0
    assert tokens == asked.tokens + trainer.own_tokens
    assert steps_of(trainer)[-1]["generation/sampled_tokens"] == tokens


@pytest.mark.parametrize("trainer_class, config_class", [PLAIN, OURS])
def test_a_run_of_grpo_is_charged_for_its_completions(tmp_path, trainer_class, config_class):
    asked = Asked()
    options = dict(reward_funcs=asked, gradient_accumulation_steps=4, steps_per_generation=2)
    trainer = make_trainer(trainer_class, config_class, tmp_path, **options)
    assert charged(trainer) == asked.tokens > 0  # plain GRPO counts as our trainer without a method does


@pytest.mark.parametrize("trainer_class, config_class", [PLAIN, OURS])
def test_completions_of_an_evaluation_are_not_charged(tmp_path, trainer_class, config_class):
    asked = {True: 0, False: 0}  # by whether the model is trained

    def reward(completion_ids, **columns):
        asked[trainer.model.training] += sum(map(len, completion_ids))
        return [0.0] * len(completion_ids)

    options = dict(reward_funcs=reward, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    options |= dict(eval_dataset=make_dataset().select(range(4)), per_device_eval_batch_size=4)
    trainer = make_trainer(trainer_class, config_class, tmp_path, **options)
    assert charged(trainer) == asked[True] and min(asked.values()) > 0


@pytest.mark.parametrize("trainer_class, config_class", [PLAIN, OURS])
def test_tokens_of_an_environment_in_a_rollout_function_are_not_charged(tmp_path, trainer_class, config_class):
    def rollout(prompts, trainer):
        return {
            "prompt_ids": [[5, 6] for _ in prompts],
            "completion_ids": [[7, 8, 9, 1] for _ in prompts],
            "logprobs": None,
            "env_mask": [[1, 0, 1, 1] for _ in prompts],
        }

    trainer = make_trainer(trainer_class, config_class, tmp_path, rollout_func=rollout)
    assert charged(trainer) == 3 * 8 * 3  # steps, rows, tokens of the policy


@pytest.mark.parametrize("method", ["grpo", "exploration", "branpo", "gigpo", "agent_tree_grpo"])
def test_agents_are_charged_for_their_turns_and_not_for_what_tools_answer(tmp_path, monkeypatch, method):
    voice = Voice(0.3)
    spoken = []

    def speak(trainer, *args, **options):
        ids, logprobs = voice(trainer, *args, **options)
        if trainer.model.training:
            spoken.append(sum(map(len, ids)))
        return ids, logprobs

    says(speak, monkeypatch.setattr)
    row = METHODS[method]
    trainer = make(row.trainer_class, row.config_class, tmp_path)
    assert charged(trainer) == sum(spoken) > 0
    if method in ("branpo", "agent_tree_grpo"):
        assert any(entry["branch/sampled_tokens"] for entry in steps_of(trainer))


def reported(entry, num_rows):
    """Tokens of a step as the methods themselves report them."""
    of_explorers = [entry[name] for name in entry if name.startswith("explore/sampled_tokens/")]
    if of_explorers:
        return num_rows * entry["completions/mean_length"] + sum(of_explorers)
    extra = sum(entry.get(f"{name}/sampled_tokens", 0) for name in ("pivots", "branch"))
    main = entry.get("tree/sampled_tokens", entry.get("sketch/sampled_tokens"))
    return extra + (num_rows * entry["completions/mean_length"] if main is None else main)


@pytest.mark.parametrize("method, case", tiny_methods().items())
def test_a_method_is_charged_for_what_it_reports(tmp_path, method, case):
    trainer_class, config_class, own = case
    trainer = make_trainer(trainer_class, config_class, tmp_path, **own)
    tokens = charged(trainer)
    assert tokens == pytest.approx(sum(reported(entry, 8) for entry in steps_of(trainer))) and tokens > 0
    assert steps_of(trainer)[-1]["generation/sampled_tokens"] == tokens


@pytest.mark.filterwarnings("ignore:After 3 round")
@pytest.mark.parametrize("kind", ["filter", "refill"])
def test_completions_that_dynamic_sampling_discards_are_charged(tmp_path, kind):
    asked = Asked()
    options = dict(reward_funcs=asked, dynamic_sampling=kind, max_sampling_rounds=3)
    trainer = make_trainer(*OURS, tmp_path, **options)
    assert charged(trainer) == asked.tokens
    assert [entry["selection/rounds"] for entry in steps_of(trainer)] == [3 if kind == "refill" else 1] * 3


def test_kept_solutions_that_take_a_row_are_not_charged_again(tmp_path):
    options = dict(expansion_width=3, node_length=2, max_steps=6, train_dataset=make_dataset().select(range(2)))
    options |= dict(replay_buffer=True, replay_threshold=0.9, replay_solutions=2, reward_funcs=contains_answer)
    trainer = make_trainer(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **options)
    tokens = charged(trainer)
    steps = steps_of(trainer)
    assert any(entry["replay/replaced_rows"] for entry in steps)
    assert tokens == sum(entry["tree/sampled_tokens"] for entry in steps)


def test_a_server_is_charged_for(tmp_path):
    trainer = make_trainer(*OURS, tmp_path)
    answers = [[SimpleNamespace(token_ids=[7, 8, 1], logprobs=None)] * 2]
    trainer.serving = SimpleNamespace(complete=lambda asked: answers)
    trainer.model.train()
    trainer.sample([[5, 6]], 2, 4)
    assert trainer.sample.tokens.own == 6
    trainer.model.eval()
    trainer.sample([[5, 6]], 2, 4)
    assert trainer.sample.tokens.own == 6


@pytest.mark.parametrize("save_steps", [2, 3])
def test_a_resumed_run_goes_on_counting(tmp_path, save_steps):
    options = dict(max_steps=5, steps_per_generation=2, per_device_train_batch_size=4)
    saving = dict(options, save_strategy="steps", save_steps=save_steps)
    whole = make_trainer(Searcher, ExplorationConfig, tmp_path, **saving)
    whole.train()
    again = make_trainer(Searcher, ExplorationConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
    assert steps_of(again)[-1] == steps_of(again)[-1] | {
        "generation/sampled_tokens": steps_of(whole)[-1]["generation/sampled_tokens"]
    }
    assert again.sample.tokens.own == whole.sample.tokens.own > 0


def test_a_checkpoint_without_the_count_loads_and_counts_from_there(tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole = make_trainer(*OURS, tmp_path, **options)
    whole.train()
    path = tmp_path / "checkpoint-2" / STATE_FILE.format(rank=0)
    state = torch.load(path, weights_only=False)
    del state["sampled_tokens"]
    torch.save(state, path)
    again = make_trainer(*OURS, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    log = steps_of(whole)
    late = log[3]["generation/sampled_tokens"] - log[1]["generation/sampled_tokens"]
    assert steps_of(again)[-1]["generation/sampled_tokens"] == late > 0


def test_a_second_training_counts_from_the_beginning(tmp_path):
    trainer = make_trainer(*OURS, tmp_path, max_steps=1)
    first, second = charged(trainer), charged(trainer)
    assert trainer.sample.tokens.total == second and first > 0


def test_the_total_is_not_averaged_over_the_logging_interval(tmp_path):
    asked = Asked()
    _, log = trained(*OURS, tmp_path, reward_funcs=asked, max_steps=4, logging_steps=4)
    assert log[0]["generation/sampled_tokens"] == asked.tokens


def test_only_trainers_that_change_a_step_of_grpo_log_how_many(tmp_path):
    assert "method/changed_hooks" not in trained(*OURS, tmp_path, max_steps=1)[1][0]
    assert trained(Searcher, ExplorationConfig, tmp_path, max_steps=1)[1][0]["method/changed_hooks"] == 1


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.plain])
def test_every_method_changes_a_step_of_grpo(tmp_path, method):
    trainer_class, config_class, options = tiny_methods()[method]
    assert make_trainer(trainer_class, config_class, tmp_path, **options).changed_hooks

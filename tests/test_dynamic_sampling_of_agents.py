"""Dynamic sampling of agents: further trajectories, with their environments, replace groups without contrast."""

import copy

import pytest
import torch
from test_branpo import Lake, OwnState, Uncopyable, Voice, count_batches, make, search, with_tools
from world import BOARDS, always, assert_same, differ, make_agent, parameters, says

from trl_explore.methods import METHODS
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer

OURS = ExplorationTrainer, ExplorationConfig
REFILL = dict(dynamic_sampling="refill", max_sampling_rounds=4)


class OtherLake(Lake):
    """Another environment with the same tools."""


def seldom(environments, **columns):
    """1 for games of exactly two moves, so that many groups fail altogether."""
    return [float(environment.episode.steps == 2) for environment in environments]


def hardly_ever(environments, **columns):
    """1 for games of exactly four moves. BranPO finds two moves in a branch of nearly every group."""
    return [float(environment.episode.steps == 4) for environment in environments]


@pytest.fixture(autouse=True)
def sound_lake(monkeypatch):
    monkeypatch.setattr(Lake, "breaks", "")
    monkeypatch.setattr(Uncopyable, "moody", False)


def test_trained_rows_have_the_rewards_of_their_own_environments(tmp_path, monkeypatch):
    """The number of moves of a trajectory can be read from its tokens. It must fit to its reward."""
    voice = Voice(0.6)
    says(voice, monkeypatch.setattr)
    trainer = make(*OURS, tmp_path, reward_funcs=[seldom], max_steps=8, **REFILL, log_completions=True)
    batches = []
    run = type(trainer)._generate_and_score_completions

    def keep(self, inputs):
        output = run(self, inputs)
        batches.append({name: value.clone() for name, value in output.items() if isinstance(value, torch.Tensor)})
        return output

    monkeypatch.setattr(type(trainer), "_generate_and_score_completions", keep)
    before = parameters(trainer)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "selection/rounds" in entry]
    assert any(entry["selection/rounds"] > 1 for entry in log) and differ(parameters(trainer), before)
    said = sum(len(ours) for call in voice.calls for _, ours in call)  # without the tokens of tools
    assert sum(entry["selection/sampled_tokens"] for entry in log) == log[-1]["generation/sampled_tokens"] <= said
    seen = 0
    for output in batches:
        for ids, mask, advantage in zip(
            output["completion_ids"], output["completion_mask"], output["advantages"], strict=True
        ):
            text = trainer._tokenizer.decode(ids[mask.bool()])
            if advantage.abs() > 1e-6:
                assert (text.count("!move") == 2) == bool(advantage > 0)
                seen += 1
    assert seen > 8


OF_METHODS = {
    "gigpo": {},
    "branpo": dict(num_branches=2, reward_funcs=[hardly_ever]),
    "agent_tree_grpo": dict(num_expansions=2),
    "deep_grpo": dict(num_branches=2),
    "auto": dict(explore_min_share=1.0),
    "sesa": dict(mode="agent", num_actions=2),
}
STATES = [("branpo", OwnState), ("branpo", Uncopyable)]  # how states are kept does not depend on the method


@pytest.mark.parametrize(("method", "factory"), [*((method, Lake) for method in OF_METHODS), *STATES])
def test_methods_train_and_resume_bit_for_bit(tmp_path, monkeypatch, method, factory):
    says(Voice(0.6), monkeypatch.setattr)
    cls, config = METHODS[method].trainer_class, METHODS[method].config_class
    options = dict(reward_funcs=[seldom], max_steps=4, save_strategy="steps", save_steps=2, factory=factory)
    options |= {**REFILL, **OF_METHODS[method]}
    torch.manual_seed(0)
    whole = make(cls, config, tmp_path / "whole", **options)
    before = parameters(whole)
    whole.train()
    log = [entry for entry in whole.state.log_history if "selection/rounds" in entry]
    assert any(entry["selection/rounds"] > 1 for entry in log) and differ(parameters(whole), before)
    again = make(cls, config, tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


def note_places(trainer):
    """Return a list that gets an entry per round of sampling: the places of its prompts in the data."""
    noted, take = [], trainer.rounds._taken

    def taken(needs):
        noted.append(take(needs))
        return noted[-1]

    trainer.rounds._taken = taken
    return noted


def test_the_prompts_of_a_step_in_which_a_service_dies_are_taken_again(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "down", False, raising=False)
    options = dict(dynamic_sampling="refill", max_sampling_rounds=2, explore_threshold=0.5, max_steps=4)
    options |= dict(gradient_accumulation_steps=2, steps_per_generation=1, save_strategy="steps", save_steps=100)
    options |= dict(max_tool_calling_iterations=2)

    def made(folder):
        voice = Voice(0.3)
        says(voice, monkeypatch.setattr)
        trainer = with_tools(folder, voice, **options)
        trainer.reward_funcs[0] = always  # no group has contrast, so the number of rounds does not depend on chance
        return trainer, note_places(trainer)

    whole, expected = made(tmp_path / "whole")
    whole.train()
    trainer, found = made(tmp_path / "dies")
    count_batches(trainer, lambda number: setattr(search, "down", number == 5))
    with pytest.raises(RuntimeError, match="checkpoint-2'"):
        trainer.train()
    per_step = len(expected) // 4
    assert found == expected[: len(found)] and len(found) > 2 * per_step + 1  # it dies in the second batch of step 3
    search.down = False
    again, found = made(tmp_path / "dies")
    again.train(resume_from_checkpoint=str(tmp_path / "dies" / "checkpoint-2"))
    assert found == expected[2 * per_step :]
    for name in ("taken", "rates"):
        assert again.rounds.state()[name] == whole.rounds.state()[name]
    assert again.rounds.counts["prompts_seen"] == whole.rounds.counts["prompts_seen"]


def test_if_all_groups_have_contrast_it_is_the_run_without_it(tmp_path, monkeypatch):
    def different(environments, **columns):
        return [float(place % 4) for place in range(len(environments))]

    runs = []
    for sampling in ("off", "refill"):
        says(Voice(0.5), monkeypatch.setattr)
        torch.manual_seed(0)
        trainer = make(*OURS, tmp_path, reward_funcs=[different], dynamic_sampling=sampling, max_steps=3)
        trainer.train()
        runs.append(parameters(trainer))
    assert_same(*runs)


def test_environments_of_several_names(tmp_path, monkeypatch):
    says(Voice(0.6), monkeypatch.setattr)
    factory = {"lake": Lake, "other": OtherLake}
    trainer = make(*OURS, tmp_path, factory=factory, kinds=[*factory], reward_funcs=[seldom], **REFILL)
    trainer.train()
    assert "selection/rounds" in trainer.state.log_history[0]


def test_environments_that_bring_their_own_prompts(tmp_path, monkeypatch):
    says(Voice(0.6), monkeypatch.setattr)
    options = dict(boards=copy.copy(BOARDS), environment_factory=Lake, reward_funcs=[seldom], trained_generations=2)
    options |= dict(per_device_train_batch_size=8, num_generations=4)
    options |= dict(max_completion_length=200, max_tool_calling_iterations=4)
    trainer = make_agent(*OURS, tmp_path, **options, **REFILL)
    trainer.train()
    assert trainer.state.log_history[0]["selection/untrained_tokens"] > 0

"""DEEP-GRPO for agents: reductions to GRPO, where trajectories are left and from which state, what is trained."""

import math

import pytest
import torch
from peft import LoraConfig
from test_adapters import AGENT, parity
from test_branpo import (
    Judged,
    Lake,
    OwnState,
    Uncopyable,
    Voice,
    answers_of_a_fresh_game,
    answers_of_tools,
    make,
)
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_trainer, one_batch, parameters, says

from trl_explore.pivots.choice import turn_starts
from trl_explore.rows.streams import loss_mask
from trl_explore.tasks.tiny_model import build_model
from trl_explore.trainers import DeepGRPOConfig, DeepGRPOTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CUTS = dict(num_branches=3, segmentation="fixed", segment_length=2, depth_bias=0.0)


def even_steps(environments, **columns):
    """1 for games of an even number of moves; `get_reward` of these boards is nearly always 0."""
    return [float(environment.episode.steps % 2 == 0) for environment in environments]


def agent(folder, cls=DeepGRPOTrainer, config=DeepGRPOConfig, **options):
    own = CUTS if cls is DeepGRPOTrainer else {}
    return make(cls, config, folder, **{"reward_funcs": [even_steps], **own, **options})


@pytest.fixture
def voice(monkeypatch):
    def use(stops=0.3):
        says(Voice(stops), monkeypatch.setattr)

    return use


def test_an_environment_without_tools_scores_the_branches_and_stops_the_run_if_it_always_raises(tmp_path, voice):
    scored = []

    class Silent(Lake):
        move = None

        def get_reward(self):
            if scored is None:
                raise RuntimeError("no judge")
            scored.append(self)
            return float(torch.rand(()) < 0.5)

    voice()
    trainer = agent(tmp_path, factory=Silent, reward_funcs=None, max_tool_calling_iterations=None)
    one_batch(trainer)
    num_branches = len(trainer.branching.results[0].scored.rows["completion_ids"])
    assert num_branches > 0 and len(scored) >= 8 + num_branches
    scored = None
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=r"every environment .*\(8 of 8\).*no judge"):
        trainer.train()


def test_a_trajectory_is_cut_at_its_turns_and_inside_the_last():
    """Turns of 3, 4 and 5 tokens; the last is cut after two and four of its own."""
    assert turn_starts([(0, 3), (5, 9), (12, 17)], [0, 2, 4]) == [0, 5, 12, 14, 16]
    assert turn_starts([(0, 6)], [0, 4]) == [0, 4]


SETTINGS = {"plain": {}, "lora, beta": dict(peft_config=LORA, beta=0.1), "dr_grpo": dict(loss_type="dr_grpo")}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_agents_are_grpo_bit_for_bit(tmp_path, voice, options):
    def learned(cls, config, **own):
        torch.manual_seed(0)
        trainer = agent(tmp_path, cls, config, **options, **own)
        trainer.train()
        return parameters(trainer)

    voice()
    expected = learned(GRPOTrainer, GRPOConfig)
    for own in (dict(aux_loss_weight=0.0), dict(success_threshold=-1.0)):  # weight 0, or no failure
        assert_same(learned(DeepGRPOTrainer, DeepGRPOConfig, **own), expected)


@pytest.mark.parametrize(
    ("factory", "state"),
    [(Lake, "copy"), (OwnState, "snapshot"), (Uncopyable, "replay")],
    ids=["copy", "snapshot", "replay"],
)
def test_branches_go_on_with_their_tools_from_the_state_of_their_turn(tmp_path, voice, factory, state):
    voice(0.2)
    trainer = agent(tmp_path, factory=factory, num_pivots=4)
    judged, judge = [], trainer.forks.judge

    def watched(branches):
        judged.extend((branch, branch.environment.episode.steps) for branch in branches)
        judge(branches)

    trainer.forks.judge = watched
    one_batch(trainer)
    assert trainer.forks.states._kinds == {None: state}
    points, inside = trainer.branch_explorer._points, 0
    assert len(judged) == 3 * len(points) > 0
    for i, (branch, steps) in enumerate(judged):
        point, origin = points[i // 3], branch.origin
        assert branch.row == point.origin.row and branch.start == len(point.prefix_ids)
        assert branch.completion_ids[: branch.start] == origin.completion_ids[: branch.start] == point.prefix_ids
        first, end = origin.turns[branch.turn]
        assert first <= branch.start < end
        assert branch.start == first or branch.turn == len(origin.turns) - 1  # inside the last turn only
        inside += branch.start > first
        answers, game = answers_of_a_fresh_game(trainer, branch)
        assert answers == answers_of_tools(branch.messages) and steps == game.episode.steps
        text = trainer._tokenizer.decode(branch.completion_ids)
        assert all(answer in text for answer in answers) and text.count("<u>") == len(answers)
        assert branch.rewards[0] == float(steps % 2 == 0)
    assert inside > 0
    for main, example in zip(trainer.environments, trainer.forks.trajectories, strict=True):  # which nobody touched
        assert main.episode.steps == len(answers_of_tools(example.messages))


def test_only_what_the_policy_said_behind_the_fork_is_trained(tmp_path, voice):
    voice(0.2)
    trainer = agent(tmp_path, num_pivots=2)
    one_batch(trainer)
    points = trainer.branch_explorer._points
    branches = [branch for point in points for branch in point.branches]
    _, _, steps = trainer.stream_training.prepared["aux"]
    trained = sum(int(loss_mask(part).sum()) for parts in steps for part in parts)
    contrasts = [point for point in points if len({tuple(b.rewards) for b in point.branches}) > 1]
    # Siblings with equal rewards need no pass.
    assert trained == sum(point.num_sampled for point in contrasts) > 0
    metrics = trainer._metrics["train"]
    assert metrics["pivots/sampled_tokens"] == [sum(branch.num_sampled for branch in branches)]
    assert any(0 in branch.loss_mask[branch.start :] for branch in branches)  # tools answered behind a fork


def test_an_environment_that_raises_gives_its_branch_nothing(tmp_path, voice, monkeypatch):
    voice(0.1)
    monkeypatch.setattr(Lake, "breaks", "u")
    trainer = agent(tmp_path, reward_funcs=[lambda completions, **columns: [0.5] * len(completions)])
    with pytest.warns(UserWarning, match="no ice to the u"):
        one_batch(trainer)
    rows = {point.origin.row for point in trainer.branch_explorer._points}
    assert rows == {row for row in range(8) if not trainer.turns.failed[row]} and 0 < len(rows) < 8
    rewards = {tuple(branch.rewards) for point in trainer.branch_explorer._points for branch in point.branches}
    assert (0.0, 0.0) in rewards and len(rewards) > 1


def test_a_branch_that_loses_its_judge_gets_nothing_and_is_counted(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Judged, "calls", 0)
    monkeypatch.setattr(Judged, "lost", range(9, 1000, 2))  # every second call that is of a branch
    voice()
    trainer = agent(tmp_path, factory=Judged, reward_funcs=[lambda completions, **columns: [0.5] * len(completions)])
    one_batch(trainer)
    rewards = [branch.rewards[0] for point in trainer.branch_explorer._points for branch in point.branches]
    assert trainer._metrics["train"]["agent/environment_errors"] == [rewards.count(0.0)] and 0.5 in rewards


def test_it_learns_from_branches_and_resumes_bit_for_bit(tmp_path, voice):
    voice()
    runs = []
    for folder, weight in (("off", 0.0), ("whole", 1.0)):
        torch.manual_seed(0)
        trainer = agent(tmp_path / folder, aux_loss_weight=weight, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train()
        runs.append(parameters(trainer))
    assert differ(*runs)
    log = trainer.state.log_history
    losses = [entry["aux/loss"] for entry in log if "aux/loss" in entry]
    assert losses and all(map(math.isfinite, losses))
    resumed = agent(tmp_path / "whole", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(parameters(resumed), runs[1])


def test_tools_need_no_environment(tmp_path):
    own = {**AGENT, **CUTS, "reward_funcs": parity, "max_steps": 1}
    trainer = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, model=build_model(seed=0), **own)
    trainer.train()
    assert trainer.state.log_history[0]["pivots/sampled_tokens"] > 0


def test_what_needs_another_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`deferred_branching=True` samples branches one batch later"):
        agent(tmp_path, deferred_branching=True)
    with pytest.raises(ValueError, match="`max_completion_length=None`: the turns of an agent"):
        agent(tmp_path, max_completion_length=None)
    with pytest.raises(ValueError, match="`environment_state`: .*'kept'"):
        DeepGRPOConfig(str(tmp_path), use_cpu=True, environment_state="kept")

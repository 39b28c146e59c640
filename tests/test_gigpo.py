"""GiGPO: states and step advantages by hand and by brute force, reductions to GRPO, what is credited, its errors."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from commands import run_example
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from test_branpo import Lake, Served, Voice, as_lake_moves, make
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_trainer, one_batch, parameters, says, trained

from trl_explore.rows.streams import loss_mask
from trl_explore.step_groups.advantages import shuffled_states, step_advantages
from trl_explore.step_groups.states import equal_states, similar_states, turns_with_observations
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.trainers import GiGPOConfig, GiGPOTrainer

NAN = math.nan
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def test_equal_returns_are_worth_exactly_nothing():
    assert step_advantages([0.7] * 3, [[0], [0], [0]], discount=0.95, scale="group") == [[0], [0], [0]]


groups = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, NAN]), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=5
)


@given(groups, st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from(["group", "none"]))
@settings(deadline=None)
def test_step_advantages_by_brute_force(rows, discount, scale):
    rewards, states = [reward for reward, _ in rows], [own for _, own in rows]
    found = step_advantages(rewards, states, discount=discount, scale=scale)
    for row, own in enumerate(states):
        for step, state in enumerate(own):
            same = [
                rewards[i] * discount ** (len(others) - 1 - k)
                for i, others in enumerate(states)
                for k, other in enumerate(others)
                if other == state
            ]
            same = np.array([value for value in same if not math.isnan(value)])
            value = rewards[row] * discount ** (len(own) - 1 - step)
            expected = 0.0
            if len(same) > 1 and not math.isnan(value):
                expected = (value - same.mean()) / (np.std(same, ddof=1) + 1e-4 if scale == "group" else 1)
            assert found[row][step] == pytest.approx(expected, abs=2e-3 if scale == "group" else 1e-6)


def test_a_step_is_shown_what_stands_since_the_step_before():
    steps = turns_with_observations([7, 8], [1, 2, 5, 5, 3, 6], [1, 1, 0, 0, 1, 0])
    assert steps == [(0, 2, [7, 8]), (4, 5, [5, 5])]
    assert turns_with_observations([7], [9, 1], [0, 1]) == [(1, 2, [9])]
    assert turns_with_observations([7], [1], [0]) == []


def test_a_text_joins_the_first_state_that_it_is_similar_to():
    """`abcdefghxy` shares eight of ten characters with the first text, and nine with the second alone."""
    texts = [["abcdefghij"], ["abcdefghix"], ["abcdefghxy"], ["something else"]]
    assert similar_states(texts, threshold=0.9) == [[0], [0], [1], [2]]
    assert similar_states(texts, threshold=0.8) == [[0], [0], [0], [1]]
    assert similar_states([texts[1], texts[0], texts[2]], threshold=0.9) == [[0], [0], [0]]  # another order
    assert similar_states(texts, threshold=1.0) == equal_states(texts) == [[0], [1], [2], [3]]
    assert equal_states([["a", "b"], ["a", "c"]]) == [[0, 1], [0, 2]]


def test_the_control_keeps_how_many_steps_a_state_has():
    states = [[0, 1, 1], [0], [2, 1]]
    mixed = shuffled_states(states, generator=torch.Generator().manual_seed(0))
    assert [len(own) for own in mixed] == [3, 1, 2]
    assert Counter(sum(mixed, [])) == Counter(sum(states, []))
    assert mixed != states


SETTINGS = {
    "plain": {},
    "beta": dict(beta=0.1),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "grpo loss": dict(loss_type="grpo", scale_rewards="batch"),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_weight_it_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(GiGPOTrainer, GiGPOConfig, tmp_path, **options, step_weight=0.0)
    assert_same(got, expected)
    assert not any(key.startswith("steps/") for entry in log for key in entry)


def agent(folder, cls=GiGPOTrainer, config=GiGPOConfig, **options):
    return make(cls, config, folder, **options)


def trained_agent(*args, **options):
    """An agent's final parameters and the log of its first step."""
    torch.manual_seed(0)
    trainer = agent(*args, **options)
    trainer.train()
    return parameters(trainer), trainer.state.log_history[0]


@pytest.fixture
def voice(monkeypatch):
    says(Voice(0.3), monkeypatch.setattr)


@pytest.mark.parametrize("options", [{}, dict(peft_config=LORA, beta=0.1), dict(loss_type="dr_grpo")])
def test_agents_without_weight_are_grpo_bit_for_bit(tmp_path, voice, options):
    expected, _ = trained_agent(tmp_path, GRPOTrainer, GRPOConfig, **options)
    found, _ = trained_agent(tmp_path, step_weight=0.0, **options)
    assert_same(found, expected)


def test_where_no_state_is_shared_agents_are_grpo_bit_for_bit(tmp_path, voice, monkeypatch):
    """Every answer counts the calls of its environment from another number, and every prompt is another board."""
    counter = iter(range(10**6))

    class Lone(Lake):
        def reset(self, board, prompt="", **columns):
            super().reset(board, prompt)
            return f"game {next(counter)}"

        @as_lake_moves
        def move(self, direction: str) -> str:
            return f"{super().move(direction)} {next(counter)}"

    expected, _ = trained_agent(tmp_path, GRPOTrainer, GRPOConfig, factory=Lone)
    counter = iter(range(10**6))
    found, log = trained_agent(tmp_path, factory=Lone)
    assert_same(found, expected)
    assert log["steps/shared_fraction"] == 0


def test_a_step_is_credited_beside_the_steps_from_the_same_board(tmp_path, voice):
    """Against the boards that the environments showed, and not their tokens."""
    shown = []  # per row: the answers before each of its steps but the first

    class Seen(Lake):
        def reset(self, board, prompt="", **columns):
            shown.append(self.answers) if hasattr(self, "answers") else None
            self.answers = []
            return super().reset(board, prompt)

        @as_lake_moves
        def move(self, direction: str) -> str:
            self.answers.append(super().move(direction))
            return self.answers[-1]

    options = dict(step_discount=0.9, step_scale="none", step_weight=2.0)
    trainer = agent(tmp_path, factory=Seen, log_completions=True, **options)
    grpo = []
    own = trainer.assign_advantages

    def kept(output):
        grpo.append(output["advantages"].clone())
        return own(output)

    trainer.assign_advantages = kept
    output = one_batch(trainer)
    rewards = trainer.scorer.totals().tolist()
    mask = loss_mask(output)
    advantages = output["advantages"] - grpo[0].unsqueeze(1)
    some = 0.0
    for group in ([0, 1, 2, 3], [4, 5, 6, 7]):
        spans = [turns_with_observations([], [0] * mask.shape[1], mask[row].tolist()) for row in group]
        boards = [["start", *trainer.environments[row].answers] for row in group]
        states = equal_states([own[: len(steps)] for own, steps in zip(boards, spans, strict=True)])
        worth = step_advantages([rewards[row] for row in group], states, discount=0.9, scale="none")
        for row, steps, own in zip(group, spans, worth, strict=True):
            for (start, stop, _), expected in zip(steps, own, strict=True):
                np.testing.assert_allclose(advantages[row, start:stop], 2 * expected, atol=1e-6)
                some += abs(expected)
    assert some > 0
    assert not advantages[mask == 0].any()
    assert trainer._metrics["train"]["agent/turns"][-1] == np.mean([len(row) for row in trainer._steps])
    shown = trainer.completion_columns()["step_advantages"]
    assert len(shown) == 8 and any(value for row in shown for value in row)


def test_each_knob_changes_what_agents_learn(tmp_path, voice):
    usual, log = trained_agent(tmp_path, max_steps=1)
    assert differ(usual, trained_agent(tmp_path, max_steps=1, step_weight=0.0)[0])
    assert 0 < log["steps/shared_fraction"] <= 1 and log["steps/group_size"] > 1 and log["steps/mean_advantage"] > 0
    sizes = {}
    for options in (
        dict(state_similarity=0.8),
        dict(state_similarity=0.01),
        dict(step_states="shuffled"),
        dict(step_discount=1.0),
        dict(step_scale="none"),
    ):
        found, own = trained_agent(tmp_path, max_steps=1, **options)
        assert differ(found, usual), options
        sizes[options.get("state_similarity")] = own["steps/group_size"]
    assert log["steps/group_size"] < sizes[0.8] < sizes[0.01]


def test_truncated_completions_that_are_masked_are_compared_with_nothing(tmp_path, voice):
    trainer = agent(tmp_path, max_completion_length=40, mask_truncated_completions=True)
    output = one_batch(trainer)
    masked = ~loss_mask(output).bool().any(dim=1)
    assert masked.any() and not masked.all()
    assert [len(row) == 0 for row in trainer._steps] == masked.tolist()


def test_environments_that_lost_their_service_stop_the_run(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Served, "lost_method", "get_reward")
    words = r"every environment of this generation batch raised \(8 of 8\).*ConnectionError: refused.*no step is done"
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=words):
        agent(tmp_path, factory=Served).train()


def test_an_own_rollout_tells_steps_from_observations_by_its_mask(tmp_path):
    """Two answers of one token around an observation that is 3 or 4, by turns; the second half of a group is right."""

    def rollout(prompts, trainer):
        ids = [[6, 3 + i % 2, 7, 1] for i in range(len(prompts))]
        mask = [[1, 0, 1, 1]] * len(prompts)
        prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": mask}

    def second_half(completions, **columns):
        return [float(i % 4 > 1) for i in range(len(completions))]

    trainer = make_trainer(
        *(GiGPOTrainer, GiGPOConfig, tmp_path),
        rollout_func=rollout,
        reward_funcs=second_half,
        step_scale="none",
        scale_rewards="none",
        step_discount=0.5,
    )
    output = one_batch(trainer)
    # From the prompt the returns are 0 or 0.5, of mean 0.25; from each observation 0 and 1.
    own = [[-0.75, -0.5, -1, -1]] * 2 + [[0.75, 0.5, 1, 1]] * 2
    torch.testing.assert_close(output["advantages"], torch.tensor(own * 2))


def test_without_tools_it_says_that_there_is_one_step(tmp_path):
    with pytest.warns(UserWarning, match="neither `tools` nor"):
        make_trainer(GiGPOTrainer, GiGPOConfig, tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(step_weight=-1.0), "`step_weight=-1.0` must be at least 0"),
        (dict(step_weight=NAN), "`step_weight=nan` must"),
        (dict(step_discount=0.0), r"`step_discount=0.0` must be in \(0, 1\]"),
        (dict(step_discount=1.1), r"`step_discount=1.1` must be in \(0, 1\]"),
        (dict(step_scale="batch"), "`step_scale`: .*'batch'"),
        (dict(state_similarity=0.0), "`state_similarity=0.0` must"),
        (dict(step_states="random"), "`step_states`: .*'random'"),
    ],
)
def test_bad_values_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        GiGPOConfig(str(tmp_path), use_cpu=True, **options)


def test_the_example_trains_offline(tmp_path, monkeypatch):
    model = build_model(seed=0, hidden_size=16, num_layers=1)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "model")
    build_tokenizer(tools=True).save_pretrained(tmp_path / "model")
    options = "--model_name_or_path model --use_cpu --bf16 false --max_steps 1 --num_boards 8 --report_to none".split()
    options += "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 4".split()
    options += "--max_completion_length 32 --output_dir out".split()
    run_example("gigpo_sokoban_agent.py", *options, folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file()

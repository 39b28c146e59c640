"""Tree-GRPO for agents: its maths by hand, reductions to GRPO, what is sampled and from which state, its errors."""

import math
from collections import Counter

import pytest
import torch
from commands import TINY_RUN, as_flags, run_example
from peft import LoraConfig
from test_branpo import Judged, Lake, OwnState, Uncopyable, Voice, make, only_a_branch_succeeds
from trl import GRPOConfig, GRPOTrainer
from world import assert_same, differ, make_trainer, one_batch, parameters, says, trained

from trl_explore.agent_trees.credit import leaf_advantages
from trl_explore.agent_trees.nodes import Span, draw_leaves, draw_nodes, open_nodes
from trl_explore.agents.environments import environment_error
from trl_explore.rows.advantages import relative_rewards
from trl_explore.rows.streams import loss_mask
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.trainers import AgentTreeGRPOConfig, AgentTreeGRPOTrainer

NAN = math.nan
OFF = dict(num_expansions=0)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


# --------------------------------------------------------------------------------------------------------- the maths


def test_leaves_are_compared_in_the_prompt_and_in_their_tree():
    """Trees (1, 1, 0) and (0, 0, 0): among all 1.2910 and -0.6455, in the first tree 0.5774 and -1.1547."""
    found = leaf_advantages([[1, 1, 0], [0, 0, 0]], intra_weight=1.0, scale="group")
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor([[1.8683, 1.8683, -1.8002], [-0.6455] * 3]), atol=4e-4, rtol=0
    )


def test_without_the_inner_comparison_it_is_one_group():
    rewards = [[1.0, 0.5, NAN], [0.0], [0.25, 0.25]]
    found = leaf_advantages(rewards, intra_weight=0.0, scale="group")
    assert sum(found, []) == relative_rewards(sum(rewards, []))


def test_one_tree_alone_counts_twice():
    found = leaf_advantages([[1.0, 0.0, 0.0]], intra_weight=1.0, scale="none")
    torch.testing.assert_close(torch.tensor(found[0]), 2 * (torch.tensor([1.0, 0, 0]) - 1 / 3))


def test_equal_rewards_and_missing_ones_are_worth_exactly_nothing():
    assert leaf_advantages([[0.7, 0.7], [0.7]], intra_weight=1.0, scale="group") == [[0, 0], [0]]
    assert leaf_advantages([[NAN, 1.0], [0.0]], intra_weight=1.0, scale="none") == [[0, 0.5], [-0.5]]


def test_a_tree_grows_from_its_root_and_from_every_turn_but_the_last():
    """Three turns can be left before the first (the root), after it, and after the second; a branch adds its own."""
    assert open_nodes([Span(0, 3)]) == [(0, 0), (0, 1), (0, 2)]
    assert open_nodes([Span(0, 1), Span(1, 3)]) == [(0, 0), (1, 1), (1, 2)]
    assert open_nodes([Span(0, 2), Span(2, 2)]) == [(0, 0), (0, 1)]


def test_nodes_are_drawn_alike_and_with_replacement():
    generator = torch.Generator().manual_seed(0)
    spans = [Span(0, 2), Span(1, 2)]
    drawn = Counter()
    for _ in range(3000):
        found = draw_nodes(spans, 2, generator=generator)
        assert sum(found.values()) == 2
        drawn.update(found)
    assert drawn.keys() == {(0, 0), (0, 1), (1, 1)}
    assert all(abs(number / 6000 - 1 / 3) < 0.02 for number in drawn.values())


def test_leaves_that_are_trained_hold_the_first_and_are_drawn_without_replacement():
    generator = torch.Generator().manual_seed(0)
    assert draw_leaves(3, None, generator=generator) == [0, 1, 2] == draw_leaves(3, 4, generator=generator)
    assert draw_leaves(0, 2, generator=generator) == []
    seen = Counter(place for _ in range(900) for place in draw_leaves(3, 3, generator=generator))
    assert seen.total() == 1800 and all(abs(number - 600) < 60 for number in seen.values())


# -------------------------------------------------------------------------------------------------------- reductions


SETTINGS = {
    "beta": dict(beta=0.1),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "lora": dict(peft_config=LORA, gradient_accumulation_steps=2, steps_per_generation=4),
    "grpo loss": dict(loss_type="grpo", scale_rewards="batch"),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_expansions_it_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(AgentTreeGRPOTrainer, AgentTreeGRPOConfig, tmp_path, **options, **OFF)
    assert_same(got, expected)
    assert not any(key.startswith("branch/") for entry in log for key in entry)


@pytest.fixture
def voice(monkeypatch):
    def use(stops=0.3):
        says(Voice(stops), monkeypatch.setattr)

    return use


def agent(folder, cls=AgentTreeGRPOTrainer, config=AgentTreeGRPOConfig, **options):
    return make(cls, config, folder, **options)


def test_agents_without_expansions_are_grpo_bit_for_bit(tmp_path, voice):
    runs = []
    voice()
    for cls, config, own in ((GRPOTrainer, GRPOConfig, {}), (AgentTreeGRPOTrainer, AgentTreeGRPOConfig, OFF)):
        torch.manual_seed(0)
        trainer = agent(tmp_path, cls, config, **own)
        trainer.train()
        runs.append(parameters(trainer))
    assert_same(*runs)


# ----------------------------------------------------------------------------------------------- what is sampled


def play_again(messages, board):
    """A fresh game after the calls of a branch that were answered, with what it answers."""
    game, answers = Lake(), [message["content"] for message in messages if message["role"] == "tool"]
    game.reset(board)
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or []]
    assert [game.move(**call) for call in calls[: len(answers)]] == answers
    return game


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("factory", "state"),
    [(Lake, "copy"), (OwnState, "snapshot"), (Uncopyable, "replay")],
    ids=["copy", "own", "replay"],
)
def test_branches_go_on_from_the_state_of_their_node(tmp_path, voice, factory, state, rounds):
    voice(0.2)
    judged = []
    trainer = agent(tmp_path, factory=factory, num_rounds=rounds, num_expansions=3)
    judge = trainer.forks.judge

    def watched(branches):  # instances are used again, by later rounds
        for branch in branches:
            judged.append((branch, branch.environment.episode))
        judge(branches)

    trainer.forks.judge = watched
    one_batch(trainer)
    assert trainer.forks.states._kinds == {None: state}
    assert len(judged) == 8 * 3 * rounds
    origins = Counter()
    for branch, episode in judged:
        board = trainer.main_examples[branch.row]["board"]
        assert play_again(branch.messages, board).episode[:2] == episode[:2]
        main, origin = trainer.forks.trajectories[branch.row], branch.origin
        assert branch.completion_ids[: branch.start] == origin.completion_ids[: branch.start]
        assert branch.start == origin.turns[branch.turn][0] and branch.turn < len(origin.turns)
        assert float(episode.steps % 2) in branch.rewards  # the other is the environment's own
        origins["main" if origin.completion_ids == main.completion_ids else "branch"] += 1
    assert origins["main"] > 0 and (origins["branch"] > 0) == (rounds > 1)
    metrics = trainer._metrics["train"]
    assert metrics["branch/sampled_tokens"] == [sum(branch.num_sampled for branch, _ in judged)]
    assert metrics["branch/trees"] == [8] and 0 <= metrics["branch/mean_depth"][0] < 1


@pytest.mark.parametrize(
    "options",
    [{}, dict(scale_rewards="none"), dict(scale_rewards="batch"), dict(intra_weight=0.5, leaves_per_tree=2)],
    ids=str,
)
def test_every_leaf_is_a_row_with_its_two_advantages(tmp_path, voice, options):
    voice()
    trainer = agent(tmp_path, **options)
    output = one_batch(trainer)
    trees = trainer.branch_explorer.trees
    scored = trainer.branching.results[0].scored
    kept = [branch for row in range(8) for branch in trees[row].branches]
    assert all(len(trees[row].branches) == options.get("leaves_per_tree", 3) - 1 for row in range(8))
    real = scored.rows["completion_mask"].sum(dim=1).tolist()
    for i, branch in enumerate(kept):
        assert scored.rows["completion_ids"][i, : real[i]].tolist() == branch.completion_ids
        assert loss_mask(scored.rows)[i, : real[i]].tolist() == branch.loss_mask  # the prefix is trained, too
    main = trainer.scorer.totals().tolist()
    expected_main, expected = [], []
    std = float(torch.tensor(main + [sum(branch.rewards) for branch in kept]).std()) + 1e-4
    for g in (0, 4):
        rewards = [[main[row], *(sum(b.rewards) for b in trees[row].branches)] for row in range(g, g + 4)]
        scale = "none" if "scale_rewards" in options else "group"
        found = leaf_advantages(rewards, intra_weight=options.get("intra_weight", 1.0), scale=scale)
        if options.get("scale_rewards") == "batch":
            found = [[value / std for value in own] for own in found]
        expected_main += [own[0] for own in found]
        expected += [value for own in found for value in own[1:]]
    torch.testing.assert_close(output["advantages"], torch.tensor(expected_main))
    torch.testing.assert_close(scored.rows["advantages"], torch.tensor(expected))
    assert any(expected)


def test_advantages_stay_small_if_all_main_rows_of_a_batch_have_one_reward(tmp_path, voice):
    voice()
    trainer = agent(tmp_path, scale_rewards="batch", reward_funcs=[only_a_branch_succeeds()])
    one_batch(trainer)
    assert trainer.scorer.totals().tolist() == [0.0] * 8
    advantages = trainer.branching.results[0].scored.rows["advantages"]
    assert 0 < advantages.abs().max() < 10


def test_each_knob_changes_what_agents_learn(tmp_path, voice):
    voice()

    def learned(**own):
        torch.manual_seed(0)
        trainer = agent(tmp_path, **own)
        trainer.train()
        return parameters(trainer), trainer.state.log_history[0]

    usual, _ = learned()
    assert differ(usual, learned(**OFF)[0])
    for own in (dict(intra_weight=0.0), dict(num_rounds=2), dict(num_expansions=3), dict(leaves_per_tree=2)):
        found, log = learned(**own)
        assert differ(found, usual), own
        assert 0 < log["branch/token_ratio"] < 1 and log["branch/contrast_fraction"] > 0 and "branch/reward" in log


def test_a_branch_whose_environment_raises_is_no_leaf(tmp_path, voice, monkeypatch):
    voice(0.1)
    monkeypatch.setattr(Lake, "breaks", "u")
    asked = []

    def noted(environments, **columns):
        asked.append([environment_error(environment) for environment in environments])
        return [0.0] * len(environments)

    trainer = agent(tmp_path, num_expansions=4, reward_funcs=[noted])
    with pytest.warns(UserWarning, match="no ice to the u"):
        one_batch(trainer)
    sound = [row for row in range(8) if not trainer.turns.failed[row]]
    assert asked[0] == [None] * len(sound)  # reward functions are not asked about the others
    for row in {*range(8)} - {*sound}:  # that turn was the last one
        moves = trainer._tokenizer.decode(trainer.main_completion_ids[row]).split("!move:direction=")
        assert [move.startswith("u") for move in moves] == [False] * (len(moves) - 1) + [True]
    dropped = trainer._metrics["train"]["branch/dropped"][0]
    assert sorted(trainer.branch_explorer.trees) == sound and 0 < len(sound) < 8 and dropped > 0
    assert sum(len(tree.branches) for tree in trainer.branch_explorer.trees.values()) == 4 * len(sound) - dropped
    assert trainer._metrics["train"]["agent/environment_errors"] == [8 - len(sound) + dropped]


def test_a_branch_that_loses_its_judge_is_no_leaf(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Judged, "calls", 0)
    monkeypatch.setattr(Judged, "lost", range(9, 1000, 2))  # every second call that is of a branch
    voice()
    trainer = agent(tmp_path, factory=Judged)
    one_batch(trainer)
    leaves = [branch for tree in trainer.branch_explorer.trees.values() for branch in tree.branches]
    assert len(leaves) == 8 and all(environment_error(leaf.environment) is None for leaf in leaves)
    assert trainer._metrics["train"]["branch/dropped"] == [8]
    assert trainer._metrics["train"]["agent/environment_errors"] == [8]


def first_group_succeeds(environments, **columns):
    return [float(row < 4) for row in range(len(environments))]


@pytest.mark.parametrize("factory", [Lake, OwnState, Uncopyable])
def test_only_the_last_prompt_grows_in_several_rounds(tmp_path, voice, factory):
    voice()
    options = dict(num_rounds=2, num_expansions=1, explore_prompts="unsolved")
    trainer = agent(tmp_path, factory=factory, reward_funcs=[first_group_succeeds], **options)
    one_batch(trainer)
    assert sorted(trainer.branch_explorer.trees) == [4, 5, 6, 7]


def test_trees_of_several_rounds_know_the_environment_of_their_prompt(tmp_path, voice):
    voice()
    factories = {"own": OwnState, "plain": Lake}
    trainer = agent(tmp_path, factory=factories, kinds=["own", "plain"], num_rounds=2)
    one_batch(trainer)
    assert trainer.forks.states._kinds == {"own": "snapshot", "plain": "copy"}
    for row, tree in trainer.branch_explorer.trees.items():
        assert {type(branch.environment) for branch in tree.branches} == {OwnState if row < 4 else Lake}


def test_the_table_tells_trees_and_what_left_them(tmp_path, voice):
    voice()
    trainer = agent(tmp_path, log_completions=True, max_steps=1)
    trainer.train()
    assert trainer.completion_columns()["leaves"] == [3] * 8
    assert all(turns >= 1 for turns in trainer.completion_columns()["turns"])


# -------------------------------------------------------------------------------------------------------- its limits


def test_without_tools_it_says_that_there_is_one_turn(tmp_path):
    with pytest.warns(UserWarning, match="neither `tools` nor"):
        make_trainer(AgentTreeGRPOTrainer, AgentTreeGRPOConfig, tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(num_expansions=-1), "`num_expansions=-1` must be at least 0"),
        (dict(num_rounds=0), "`num_rounds=0` must be at least 1"),
        (dict(leaves_per_tree=1), "`leaves_per_tree=1` must be at least 2"),
        (dict(intra_weight=-0.5), "`intra_weight=-0.5` must be at least 0"),
        (dict(intra_weight=NAN), "`intra_weight=nan` must"),
        (dict(environment_state="kept"), "`environment_state`: .*'kept'"),
        (dict(num_expansions=10**5), "`num_expansions=100000` can sample"),
        (dict(multi_objective_aggregation="normalize_then_sum"), "is not supported by Tree-GRPO"),
    ],
)
def test_bad_values_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        AgentTreeGRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_an_own_rollout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`rollout_func` cannot be combined with AgentTreeGRPOTrainer"):
        make_trainer(AgentTreeGRPOTrainer, AgentTreeGRPOConfig, tmp_path, rollout_func=lambda prompts, trainer: {})


def test_the_example_trains_offline(tmp_path, monkeypatch):
    model = build_model(seed=0, hidden_size=16, num_layers=1)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "model")
    build_tokenizer(tools=True).save_pretrained(tmp_path / "model")
    fields = {**TINY_RUN, "model_name_or_path": "model", "max_steps": 1, "gradient_accumulation_steps": 1}
    fields |= {"num_generations": 2, "max_completion_length": 32, "num_questions": 8}
    run_example("agent_tree_grpo_search_agent.py", *as_flags(fields), folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file()

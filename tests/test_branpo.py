"""BranPO: reductions to GRPO, what is sampled and from which state, what is trained, and its errors."""

import asyncio
import copy
import itertools
import json
import re
import threading
import types
import warnings

import pytest
import torch
from commands import run_example
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from world import BOARDS, assert_same, make_agent, make_trainer, one_batch, parameters, says, trained

from examples.benchmarks.tasks.frozen_lake import FrozenLakeEnvironment
from trl_explore.agents.environments import environment_error
from trl_explore.branches.choice import branch_advantages
from trl_explore.forks.trajectories import turns
from trl_explore.rewards.questions import search_reward
from trl_explore.tasks.tiny_model import build_model, build_tokenizer
from trl_explore.trainers import BranPOConfig, BranPOTrainer

LETTERS = "ldru"
OFF = dict(num_branches=0, num_branches_solved=0, redundancy_tries=0)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class Lake(FrozenLakeEnvironment):
    """A game of at most six moves; what it answers counts them, so that a wrong state shows. To be copied."""

    breaks = ""
    snapshot = restore = None

    def __init__(self):
        super().__init__(max_steps=6)

    def reset(self, board, prompt="", **columns):
        return super().reset(board, prompt)

    def move(self, direction: str) -> str:
        """
        Moves.

        Args:
            direction: Where to.

        Returns:
            The board.
        """
        if direction in self.breaks:
            raise RuntimeError(f"no ice to the {direction}")
        return f"{self._play(direction)} {self.episode.steps}"


def as_lake_moves(move):
    """Give the tool of a subclass the description of `Lake.move`."""
    move.__doc__ = Lake.move.__doc__
    return move


class OwnState(Lake):
    """Says itself what its state is, and cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def snapshot(self):
        return copy.deepcopy(self.episode)

    def restore(self, state):
        self.episode = copy.deepcopy(state)


class Uncopyable(Lake):
    """Can only be replayed."""

    moody = False

    def __init__(self):
        super().__init__()
        self.lock, self.count = threading.Lock(), 0

    @as_lake_moves
    def move(self, direction: str) -> str:
        self.count += 1
        return super().move(direction) + ("abcdefgh"[self.count % 8] if self.moody else "")


class Judged(Lake):
    """Loses its judge in the calls of `get_reward`, of all instances, whose numbers are in `lost`."""

    calls, lost = 0, ()

    def get_reward(self):
        Judged.calls += 1
        if Judged.calls in self.lost:
            raise ConnectionError("no judge")
        return super().get_reward()


class Voice:
    """Stands for what the model says: a random move, or, now and then, a last word."""

    def __init__(self, stops):
        self.stops, self.calls = stops, []

    def __call__(self, trainer, prompt_ids, *others, **options):
        said = [trainer._tokenizer(self.answer() + "<eos>")["input_ids"] for _ in prompt_ids]
        self.calls.append([(list(ids), ours) for ids, ours in zip(prompt_ids, said, strict=True)])
        return said, None

    def answer(self):
        if torch.rand(()) < self.stops:
            return "done"
        return f"!move:direction={LETTERS[torch.randint(4, ())]}"


@pytest.fixture
def voice(monkeypatch):
    def use(stops=0.3):
        speaker = Voice(stops)
        says(speaker, monkeypatch.setattr)
        return speaker

    return use


@pytest.fixture(autouse=True)
def sound_lake(monkeypatch):
    monkeypatch.setattr(Lake, "breaks", "")
    monkeypatch.setattr(Uncopyable, "moody", False)
    monkeypatch.setattr(Judged, "calls", 0)


def odd_steps(environments, **columns):
    """1 for games of an odd number of moves."""
    return [float(environment.episode.steps % 2) for environment in environments]


def make(cls, config, folder, *, factory=Lake, **options):
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=200)
    sizes |= dict(max_tool_calling_iterations=4, reward_funcs=[odd_steps])
    return make_agent(cls, config, folder, environment_factory=factory, **{**sizes, **options})


def agent(folder, **options):
    return make(BranPOTrainer, BranPOConfig, folder, **options)


def kept_branches(trainer, monkeypatch):
    """One batch, with the branches that were sampled and those that were kept."""
    sampled = []
    sample_branches = trainer.forks.sample_branches

    def watched(forks):
        branches = sample_branches(forks)
        for branch in branches:  # instances are used again, by later calls
            branch.steps = branch.environment.episode.steps if branch.environment else 0
        sampled.append(([(fork.origin.row, fork.turn, fork.number) for fork in forks], branches))
        return branches

    monkeypatch.setattr(trainer.forks, "sample_branches", watched)
    output = one_batch(trainer)
    return output, sampled, trainer.branch_explorer._kept


def all_branches(sampled):
    """Those of all rounds that `kept_branches` tells."""
    return [branch for _, found in sampled for branch in found]


def answers_of_tools(messages):
    return [message["content"] for message in messages if message["role"] == "tool"]


def answers_of_a_fresh_game(trainer, branch):
    """What a game answers to the moves that the text of a branch tells, from the first on, and the game."""
    moves = re.findall(r"!move:direction=(\w)", trainer._tokenizer.decode(branch.completion_ids))
    game = Lake()
    game.reset(trainer.main_examples[branch.row]["board"])
    return [game.move(move) for move in moves[: len(answers_of_tools(branch.messages))]], game


# ------------------------------------------------------------------------------------------------------ reductions

SETTINGS = {
    "plain": {},
    "beta": dict(beta=0.1),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "lora, generation longer than accumulation": dict(
        peft_config=LORA, gradient_accumulation_steps=2, steps_per_generation=4
    ),
    "grpo loss": dict(loss_type="grpo", scale_rewards="batch"),
    "conversational": dict(conversational=True),
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_a_kept_branch_it_is_grpo_bit_for_bit(tmp_path, options):
    def half(completion_ids, **columns):  # something to learn, but no success
        return [0.5 * (ids[0] % 2) for ids in completion_ids]

    options = dict(options, reward_funcs=[half])
    expected, expected_log = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    for own in (OFF, dict(success_threshold=1.0)):  # no branches, or none is kept
        found, log = trained(BranPOTrainer, BranPOConfig, tmp_path, **options, **own)
        assert_same(found, expected)
        for got, wanted in zip(log, expected_log, strict=True):
            same = [key for key in wanted if "time" not in key and "second" not in key]
            assert {key: got[key] for key in same} == {key: wanted[key] for key in same}


def test_agents_without_a_kept_branch_are_grpo_bit_for_bit(tmp_path, voice):
    def half(environments, **columns):
        return [0.5 * (environment.episode.steps % 2) for environment in environments]

    def learned(cls, config, **own):
        voice()
        trainer = make(cls, config, tmp_path, reward_funcs=[half], max_steps=3, **own)
        trainer.train()
        return parameters(trainer)

    expected = learned(GRPOTrainer, GRPOConfig)
    for own in (OFF, dict(success_threshold=0.9)):  # no branches, or none is kept
        assert_same(learned(BranPOTrainer, BranPOConfig, **own), expected)


# ------------------------------------------------------------------------------------------------ where it is left


@pytest.mark.parametrize("selection", ["tail", "random"])
def test_branches_share_their_prefix_token_by_token_and_state_by_state(tmp_path, voice, monkeypatch, selection):
    speaker = voice()
    trainer = agent(tmp_path, branch_selection=selection)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    said = {(tuple(context), tuple(ours)) for call in speaker.calls for context, ours in call}
    branches = all_branches(sampled)
    assert len(branches) >= 8 and kept
    for branch in branches:
        original = trainer.trajectories[branch.row]
        assert branch.start == original.turns[branch.turn][0]
        assert branch.completion_ids[: branch.start] == original.completion_ids[: branch.start]
        for start, end in turns(branch.loss_mask):  # every turn is what was sampled behind exactly these tokens
            ids = original.prompt_ids + branch.completion_ids
            first = len(original.prompt_ids) + start
            assert (tuple(ids[:first]), tuple(ids[first : len(original.prompt_ids) + end])) in said
        told, (answers, game) = answers_of_tools(branch.messages), answers_of_a_fresh_game(trainer, branch)
        assert told == answers and branch.steps == game.episode.steps
        text = trainer._tokenizer.decode(branch.completion_ids)
        assert all(answer in text for answer in told) and text.count("<u>") == len(told)
    for main, example in zip(trainer.environments, trainer.trajectories, strict=True):  # which nobody has touched
        assert main.episode.steps == len(answers_of_tools(example.messages))


class Remote(Lake):
    """A client: its games are played on a server, in sessions."""

    games = []  # of the server

    def reset(self, board, prompt="", **columns):
        self.session = len(self.games)
        self.games.append(Lake())
        self.games[-1].reset(board)

    @as_lake_moves
    def move(self, direction: str) -> str:
        return self.games[self.session].move(direction)

    @property
    def episode(self):
        return self.games[self.session].episode

    def get_reward(self):
        return self.games[self.session].get_reward()


def wrong_branches(trainer, sampled):
    """How many branches were answered otherwise than the game that their text tells, and how many there are."""
    branches = all_branches(sampled)
    wrong = [answers_of_tools(branch.messages) != answers_of_a_fresh_game(trainer, branch)[0] for branch in branches]
    return sum(wrong), len(wrong)


class Locked(Lake):
    """Can be copied before its first `reset` and not after."""

    def reset(self, board, prompt="", **columns):
        self.lock = threading.Lock()
        return super().reset(board, prompt)


class Waiting(Uncopyable):
    """Its tool waits, and it can only be replayed."""

    @as_lake_moves
    async def move(self, direction: str) -> str:
        await asyncio.sleep(0)
        return Lake.move(self, direction)


WAYS = [
    (OwnState, "auto", "snapshot"),
    (OwnState, "replay", "replay"),
    (Uncopyable, "auto", "replay"),
    (Lake, "replay", "replay"),
    (Waiting, "auto", "replay"),
    (Locked, "auto", "replay"),
    (Remote, "auto", "replay"),  # warns: see below
]


@pytest.mark.filterwarnings("ignore:.*of a Remote that went back")
@pytest.mark.parametrize("selection", ["tail", "random"])
def test_all_ways_to_go_back_give_the_same(tmp_path, voice, selection):
    voice()
    copied = agent(tmp_path, branch_selection=selection)
    copied.train()
    assert copied.forks.states._kinds == {None: "copy"}
    for factory, way, kind in WAYS:
        voice()
        trainer = agent(tmp_path, factory=factory, environment_state=way, branch_selection=selection)
        assert [tool.__name__ for tool in trainer.tools] == ["move"]
        trainer.train()
        assert trainer.forks.states._kinds == {None: kind}, factory
        assert_same(parameters(trainer), parameters(copied))


def test_a_state_on_a_server_is_noticed_and_replayed(tmp_path, voice, monkeypatch):
    voice()
    trainer = agent(tmp_path, factory=Remote)
    noticed = r"`move` of a Remote that went back .* by copy answered .*Branches replay"
    with pytest.warns(UserWarning, match=noticed) as said:
        _, sampled, _ = kept_branches(trainer, monkeypatch)
    assert any("session" in str(warning.message) for warning in said)
    wrong, number = wrong_branches(trainer, sampled)
    assert wrong == 0 and number >= 8


def test_a_copy_that_was_asked_for_is_kept_with_a_warning(tmp_path, voice, monkeypatch):
    voice()
    trainer = agent(tmp_path, factory=Remote, environment_state="copy")
    with pytest.warns(UserWarning, match="branches start from wrong states: set `environment_state='replay'`") as said:
        _, sampled, _ = kept_branches(trainer, monkeypatch)
    assert wrong_branches(trainer, sampled)[0] > 0  # as the warning says
    assert sum("went back" in str(warning.message) for warning in said) == 1


def test_a_snapshot_that_later_moves_change_is_noticed(tmp_path, voice):
    class Shared(Lake):
        def reset(self, board, prompt="", **columns):
            self.moves = []
            return super().reset(board, prompt)

        @as_lake_moves
        def move(self, direction: str) -> str:
            self.moves.append(direction)
            return super().move(direction) + str(len(self.moves))

        def snapshot(self):
            return self.episode, list(self.moves)

        def restore(self, state):
            self.episode, self.moves = state

    voice()
    trainer = agent(tmp_path, factory=Shared)
    with pytest.warns(UserWarning, match="of a Shared that went back to an earlier turn by snapshot answered"):
        one_batch(trainer)
    assert trainer.forks.states._kinds == {None: "snapshot"}


def test_a_copy_that_is_asked_for_and_cannot_be_made_is_an_error(tmp_path, voice):
    voice()
    with pytest.raises(RuntimeError, match="the state of a Locked could not be kept"):
        agent(tmp_path, factory=Locked, environment_state="copy").train()


def test_states_that_answered_as_before_are_trusted(tmp_path, voice, monkeypatch):
    class Counting(Lake):
        calls = 0

        @as_lake_moves
        def move(self, direction: str) -> str:
            Counting.calls += 1
            return super().move(direction)

    voice(stops=0.05)
    trainer = agent(tmp_path, factory=Counting)
    spent = []
    for _ in range(2):
        Counting.calls = 0
        _, sampled, _ = kept_branches(trainer, monkeypatch)
        told = sum(len(answers_of_tools(trajectory.messages)) for trajectory in trainer.trajectories)
        branches = all_branches(sampled)
        own = sum(len(answers_of_tools(branch.messages)) - branch.turn for branch in branches)
        spent.append(Counting.calls - told - own)
    assert 8 <= spent[0] <= 2 * 4 * 8 and spent[1] == 0  # eight trajectories, twice, at most four calls each


def test_copies_by_a_method_of_the_environment_are_guarded(tmp_path, voice, monkeypatch):
    class Rebuilt(Lake):
        def __deepcopy__(self, memo):
            twin = Rebuilt()
            twin.episode = self.episode
            return twin

        def get_reward(self):
            if self.episode.steps > 2:
                raise RuntimeError("no referee")
            return 0.0

    voice()
    trainer = agent(tmp_path, factory=Rebuilt)
    with pytest.warns(UserWarning, match="no referee"):
        _, sampled, _ = kept_branches(trainer, monkeypatch)
    assert any(branch.steps > 2 and branch.complete for branch in all_branches(sampled))


def test_a_replay_that_ends_elsewhere_stops_the_run(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Uncopyable, "moody", True)
    voice(stops=0.1)
    trainer = agent(tmp_path, factory=Uncopyable)
    with pytest.raises(RuntimeError, match="tool `move` of a Uncopyable answered .* when its call was replayed, but"):
        trainer.train()


def test_every_environment_keeps_its_state_in_its_own_way(tmp_path, voice, monkeypatch):
    rewarded = []

    def noting(environments, **columns):
        rewarded.extend(type(environment) for environment in environments)
        return odd_steps(environments)

    voice()
    kinds = {"own": OwnState, "plain": Lake, "waiting": Waiting}
    trainer = agent(tmp_path, factory=kinds, kinds=["own", "waiting"], reward_funcs=[noting])
    assert trainer.forks.states._kinds == {"own": "snapshot", "plain": "copy", "waiting": "replay"}
    _, sampled, _ = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    assert {type(branch.environment).__name__ for branch in branches} == {"OwnState", "Waiting"}
    for branch in branches:
        assert branch.steps == len(answers_of_tools(branch.messages))
    # Reward functions get environments of the user's classes, in the batch and in its branches.
    assert len(rewarded) > 8 and set(rewarded) == {OwnState, Waiting}


def test_no_branch_plays_longer_than_a_trajectory_may(tmp_path, voice, monkeypatch):
    voice(stops=0.05)
    trainer = agent(tmp_path, max_tool_calling_iterations=3)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    rounds = [branch.steps for branch in branches]
    assert max(rounds) == 3 and all(len(turns(b.loss_mask)) == r + 1 for b, r in zip(branches, rounds, strict=True))
    at_limit = [b for b in branches if b.messages[-1].get("tool_calls")]
    assert at_limit and not any(b.complete for b in at_limit) and all(b.complete for b in kept.values())
    assert all(b.loss_mask[-1] == 1 and len(b.completion_ids) == len(b.loss_mask) for b in branches)


def test_calls_of_unknown_tools_count_as_interactions(tmp_path, voice, monkeypatch):
    speaker = voice(stops=0.05)
    speaker.answer = lambda: f"!{'move' if torch.rand(()) < 0.5 else 'jump'}:direction={LETTERS[torch.randint(4, ())]}"
    trainer = agent(tmp_path, max_tool_calling_iterations=3)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    assert len(branches) >= 8 and not kept  # nobody ever comes to an end
    assert {len(turns(branch.loss_mask)) for branch in branches} == {4}
    assert all(branch.messages[-1].get("tool_calls") and branch.loss_mask[-1] for branch in branches)


def test_the_schedule_decides_how_deep_and_how_often(tmp_path, voice, monkeypatch):
    def graded(environments, **columns):  # first group: one success in four; second: all succeed
        values = iter([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]) if len(environments) == 8 else None
        return [next(values) if values else 0.5 for _ in environments]  # no branch ends the search by success...

    voice(stops=0)
    trainer = agent(tmp_path, reward_funcs=[graded], redundancy_tries=0, success_threshold=0.4)
    _, sampled, _ = kept_branches(trainer, monkeypatch)
    rounds = [requests for requests, _ in sampled]
    # ... but those of turns beyond the limit are never complete, and so none is judged.
    assert [(row, 4 - turn, n) for row, turn, n in rounds[0]] == [(r, 0, 2 if r < 4 else 1) for r in range(8)]
    assert [(row, 4 - turn, n) for row, turn, n in rounds[1]] == [(r, 1, 2) for r in range(4)]
    assert [(row, 4 - turn, n) for row, turn, n in rounds[2]] == [(r, 2, 2) for r in range(1, 4)]
    assert len(rounds) == 3


def test_random_branches_are_as_many_and_begin_anywhere(tmp_path, voice, monkeypatch):
    asked = {}
    for selection in ("tail", "random"):
        voice(stops=0)  # nothing is complete, so that all rounds are asked for
        options = dict(max_tool_calling_iterations=5, redundancy_tries=0, branch_selection=selection)
        trainer = agent(tmp_path, **options)
        _, sampled, kept = kept_branches(trainer, monkeypatch)
        assert not kept and {len(trajectory.turns) for trajectory in trainer.trajectories} == {6}
        asked[selection] = [requests for requests, _ in sampled]
    numbers = {name: [[(row, n) for row, _, n in requests] for requests in rounds] for name, rounds in asked.items()}
    assert numbers["random"] == numbers["tail"]
    for row in range(8):
        tail, drawn = ([t for requests in asked[s] for r, t, _ in requests if r == row] for s in ("tail", "random"))
        assert tail == list(range(5, 5 - len(tail), -1)) and len(set(drawn)) == len(tail)
    turns_left = {turn for requests in asked["random"] for _, turn, _ in requests}
    assert turns_left <= set(range(6)) and min(turns_left) < 3 <= max(turns_left)


# ------------------------------------------------------------------------------------------------ what is trained


@pytest.mark.parametrize("group", ["prompt", "trajectory"])
@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_prefixes_and_suffixes_get_their_own_advantages(tmp_path, voice, monkeypatch, group, scale):
    voice()
    trainer = agent(tmp_path, branch_group=group, scale_rewards=scale, redundancy_tries=0)
    output, _, kept = kept_branches(trainer, monkeypatch)
    raw = trainer.scorer.totals()
    rewards, factor = raw.tolist(), 1.0
    assert kept
    if scale == "batch":  # the deviation of all rewards, those of the branches included
        factor = 1.0 / (torch.tensor(rewards + [kept[row].rewards[0] for row in kept]).std().item() + 1e-4)
    weight, totals, steps = trainer.stream_training.prepared["branch"]
    places = {row: i for i, row in enumerate(sorted(kept))}
    (part,) = steps[0]
    mask = output["completion_mask"] * output["tool_mask"]
    assert totals.num_tokens == mask.sum() + (part["completion_mask"] * part["tool_mask"]).sum()
    assert totals.num_rows == 8 + len(kept) and weight == 1.0
    for g in (0, 4):
        lists = [[rewards[r]] + ([kept[r].rewards[0]] if r in kept else []) for r in range(g, g + 4)]
        base, suffix = branch_advantages(lists, group=group, scale="group" if scale == "group" else "none")
        for row in range(g, g + 4):
            trajectory = trainer.trajectories[row]
            fork = kept[row].start if row in kept else trajectory.turns[-1][0]
            expected = torch.tensor(
                [base[row - g]] * fork + [suffix[row - g][0]] * (len(trajectory.completion_ids) - fork)
            )
            got = output["advantages"][row, : len(expected)]
            torch.testing.assert_close(got, expected * factor, atol=1e-5, rtol=1e-5)
            if row in kept:
                place, branch = places[row], kept[row]
                trained_tokens = [0] * branch.start + branch.loss_mask[branch.start :]
                own = part["tool_mask"][place] * part["completion_mask"][place]
                assert own[: len(trained_tokens)].tolist() == trained_tokens and own.sum() == sum(trained_tokens)
                assert part["completion_ids"][place][: len(branch.completion_ids)].tolist() == branch.completion_ids
                assert part["advantages"][place].item() == pytest.approx(suffix[row - g][1] * factor, abs=1e-5)


def only_a_branch_succeeds():
    """Return a reward function that gives 0 to the main rows, which come first, and 1 to a row of each later call."""
    calls = itertools.count()

    def reward(completions, **columns):
        is_branch = next(calls) > 0
        return [float(is_branch and i == 0) for i in range(len(completions))]

    return reward


def test_advantages_stay_small_if_all_main_rows_of_a_batch_have_one_reward(tmp_path, voice):
    voice()
    trainer = agent(tmp_path, scale_rewards="batch", reward_funcs=[only_a_branch_succeeds()])
    one_batch(trainer)
    assert trainer.scorer.totals().tolist() == [0.0] * 8 and trainer.branch_explorer._kept
    (part,) = trainer.stream_training.prepared["branch"][2][0]
    assert 0 < part["advantages"].abs().max() < 10


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("steps, drop", [(1, False), (2, True)])
def test_branches_are_averaged_together_with_the_main_rows(tmp_path, voice, loss_type, steps, drop):
    """One step of plain gradient descent against the loss written out over all rows."""
    voice()
    trainer = agent(
        tmp_path,
        loss_type=loss_type,
        drop_zero_advantage=drop,
        redundancy_tries=0,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8 // steps,
        gradient_accumulation_steps=steps,
    )
    model = build_model(seed=0, hidden_size=16, num_layers=1)
    model.load_state_dict(trainer.model.state_dict())
    seen = {}
    generate = trainer._generate_and_score_completions

    def noting(inputs):
        output = generate(inputs)
        seen["rows"] = [output, *(part for parts in trainer.stream_training.prepared["branch"][2] for part in parts)]
        return output

    trainer._generate_and_score_completions = noting
    trainer.train()
    sums, tokens = [], []
    for rows in seen["rows"]:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        length = rows["completion_ids"].shape[1]
        logits = model(ids, attention_mask=attention).logits[:, -length - 1 : -1]
        logp = logits.log_softmax(-1).gather(2, rows["completion_ids"].unsqueeze(2)).squeeze(2)
        advantages = rows["advantages"] if rows["advantages"].dim() == 2 else rows["advantages"].unsqueeze(1)
        mask = rows["completion_mask"] * rows["tool_mask"]
        real = mask.sum(1) > 0
        sums.append(((logp * advantages) * mask).sum(1)[real])
        tokens.append(mask.sum(1)[real])
    sums, tokens = torch.cat(sums), torch.cat(tokens)
    assert len(sums) > (4 if drop else 8)
    loss = {
        "dapo": -sums.sum() / tokens.sum(),
        "bnpo": -sums.sum() / tokens.sum(),
        "grpo": -(sums / tokens).mean(),
        "dr_grpo": -sums.sum() / (len(sums) * 200),
    }[loss_type]
    loss.backward()
    with torch.no_grad():
        for (name, after), before in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(after, before - 0.1 * before.grad, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
def test_an_entropy_bonus_is_for_the_main_rows_and_keeps_its_size(tmp_path, voice, loss_type):
    once = dict(max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant")
    after, rows = [], {}
    for coef in (0.0, 0.3):
        voice()
        trainer = agent(tmp_path, loss_type=loss_type, entropy_coef=coef, redundancy_tries=0, **once)
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs, own=generate, at=coef: rows.setdefault(
            at, own(inputs)
        )
        trainer.train()
        assert trainer.state.log_history[0]["branch/contrastive_fraction"] > 0
        after.append(parameters(trainer))
    model, main = build_model(seed=0, hidden_size=16, num_layers=1), rows[0.0]
    ids, attention = (
        torch.cat([main[f"prompt_{part}"], main[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
    )
    mask = main["completion_mask"] * main["tool_mask"]
    logits = model(ids, attention_mask=attention).logits[:, -mask.shape[1] - 1 : -1]
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    (0.3 * (entropies * mask).sum() / mask.sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(after[1][name] - after[0][name], 0.1 * p.grad, atol=2e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("selection", ["tail", "random"])
def test_redundant_turns_are_not_reinforced(tmp_path, voice, monkeypatch, selection):
    voice(stops=0.35)
    always = [lambda environments, **columns: [1.0] * len(environments)]
    trainer = agent(tmp_path, reward_funcs=always, num_branches_solved=0, branch_selection=selection)
    output, sampled, kept = kept_branches(trainer, monkeypatch)
    lengths = [len(trajectory.turns) for trajectory in trainer.trajectories]
    means = [sum(lengths[g : g + 4]) / 4 for g in (0, 4)]
    ((requests, found),) = sampled
    assert [(r, n) for r, _, n in requests] == [(r, 5) for r in range(8) if lengths[r] > max(means[r // 4], 1)]
    depths = [lengths[r] - turn for r, turn, _ in requests]
    assert set(depths) == {2} if selection == "tail" else min(depths) >= 2 and max(depths) > 2
    assert kept
    for row, branch in kept.items():
        assert len(turns(branch.loss_mask)) < lengths[row] and branch.complete
        assert branch is next(
            b for b in found if b.row == row and b.complete and len(turns(b.loss_mask)) < lengths[row]
        )
        assert (output["advantages"][row, branch.start :] == 0).all()
    metrics = trainer._metrics["train"]
    assert metrics["branch/redundant_fraction"] == [len(kept) / 8] and metrics["branch/contrastive_fraction"] == [0.0]


def test_reward_functions_see_a_branch_as_they_see_a_row(tmp_path, voice):
    seen = []

    def noting(prompts, completions, completion_ids, environments, board, **columns):
        for row in zip(prompts, completions, completion_ids, environments, board, strict=True):
            seen.append(copy.deepcopy(row))
        return odd_steps(environments)

    voice()
    trainer = agent(tmp_path, reward_funcs=[noting])
    one_batch(trainer)
    assert len(seen) > 10
    for prompt, completion, ids, environment, board in seen:
        assert prompt == [{"role": "user", "content": board}]
        answers = [message["content"] for message in completion if message["role"] == "tool"]
        assert environment.episode.steps == len(answers) and completion[-1]["role"] == "assistant"
        assert trainer._tokenizer.decode(ids).count("<u>") == len(answers)


def test_single_turns_branch_from_the_prompt(tmp_path, monkeypatch):
    def first_is_odd(completion_ids, **columns):
        return [float(ids[0] % 2) for ids in completion_ids]

    trainer = make_trainer(
        BranPOTrainer, BranPOConfig, tmp_path, reward_funcs=[first_is_odd], max_completion_length=16
    )
    output, sampled, kept = kept_branches(trainer, monkeypatch)
    assert kept and all(branch.start == 0 and branch.messages is None for branch in kept.values())
    assert len(sampled) == 1  # there is only one response to go back
    for row, branch in kept.items():
        assert branch.rewards[0] != trainer.scorer.totals()[row]


# ------------------------------------------------------------------------------------- failures, limits and errors


def test_branches_of_broken_environments_are_discarded(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Lake, "breaks", "r")
    voice()
    trainer = agent(tmp_path)
    with pytest.warns(UserWarning, match="no ice to the r"):
        _, sampled, kept = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    broken = [b for b in branches if "direction=r" in trainer._tokenizer.decode(b.completion_ids[b.start :])]
    assert broken and not any(branch.complete for branch in broken)
    failed = {row for row, failed in enumerate(trainer.turns.failed) if failed}
    assert not failed & {b.row for b in branches}
    raised = [branch for branch in branches if environment_error(branch.environment) is not None]
    assert raised and trainer._metrics["train"]["agent/environment_errors"] == [len(failed) + len(raised)]


def test_branches_that_lose_their_judge_are_discarded(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Judged, "lost", range(9, 1000, 2))  # the first eight calls are of the main rows
    voice()
    trainer = agent(tmp_path, factory=Judged)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    lost = [branch for branch in branches if environment_error(branch.environment) is not None]
    assert kept and len(lost) > 4 and not {*map(id, lost)} & {*map(id, kept.values())}
    cut_off = [branch for branch in branches if not branch.complete]
    assert trainer._metrics["train"]["branch/incomplete"] == [len(lost) + len(cut_off)]
    assert trainer._metrics["train"]["agent/environment_errors"] == [len(lost)]


def test_main_rows_that_lose_their_judge_get_no_branches(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Judged, "lost", range(1, 9, 2))
    voice()
    trainer = agent(tmp_path, factory=Judged)
    with pytest.warns(UserWarning, match="an environment raised ConnectionError: no judge"):
        _, sampled, _ = kept_branches(trainer, monkeypatch)
    assert trainer.turns.failed == [True, False] * 4
    assert {branch.row for branch in all_branches(sampled)} == {1, 3, 5, 7}


def search(query: str) -> str:
    """
    Searches.

    Args:
        query: What for.

    Returns:
        What is found.
    """
    if search.down:
        raise search.error("connection refused")
    return f"about {query}"


search.error = ConnectionError


def with_tools(folder, speaker, **options):
    """An agent with a tool instead of an environment."""
    speaker.answer = lambda: "done" if torch.rand(()) < 0.3 else f"!search:query={LETTERS[torch.randint(4, ())]}"
    trainer = make_trainer(
        BranPOTrainer,
        BranPOConfig,
        folder,
        conversational=True,
        tools=[search],
        model=build_model(seed=0, hidden_size=16, num_layers=1),
        processing_class=build_tokenizer(tools=True),
        max_completion_length=100,
        reward_funcs=[lambda completions, **columns: [float(len(c) % 4 == 1) for c in completions]],
        **options,
    )
    return trainer


def test_tools_without_state(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(search, "down", False, raising=False)
    trainer = with_tools(tmp_path, voice(), max_tool_calling_iterations=5)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    assert kept
    for branch in kept.values():
        calls = re.findall(r"!search:query=(\w)", trainer._tokenizer.decode(branch.completion_ids))
        assert answers_of_tools(branch.messages) == [f"about {letter}" for letter in calls]


@pytest.mark.parametrize("tool, reward", [("search", 1.0), ("seek", -0.5)])
def test_the_search_reward_knows_what_trl_says_of_unknown_tools(tmp_path, voice, monkeypatch, tool, reward):
    monkeypatch.setattr(search, "down", False, raising=False)
    speaker = voice()
    trainer = with_tools(tmp_path, speaker, max_tool_calling_iterations=1)
    speaker.answer = lambda: f"!{tool}:query=a"
    one_batch(trainer)
    told = [m for m in trainer.trajectories[0].messages if m["role"] == "assistant"][:1]
    told += [m for m in trainer.trajectories[0].messages if m["role"] == "tool"]
    completion = [*told, {"role": "assistant", "content": "<answer>Paris</answer>"}]
    assert [m["role"] for m in completion] == ["assistant", "tool", "assistant"]
    assert search_reward([completion], ["Paris"]) == [reward]


def test_a_service_that_dies_in_the_middle_of_a_step_loses_only_this_step(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(search, "down", False, raising=False)
    options = dict(max_steps=4, max_tool_calling_iterations=3, save_strategy="steps", save_steps=100)
    options |= dict(gradient_accumulation_steps=2, steps_per_generation=1)
    trainer = with_tools(tmp_path, voice(), **options)
    trained = count_batches(trainer, lambda number: setattr(search, "down", number == 5))
    stopped = "every tool call .* raised .* ConnectionError: connection refused.*checkpoint-2'"
    with pytest.raises(RuntimeError, match=stopped):
        trainer.train()
    assert len(trained) == 5  # the third step has one batch of two
    search.down = False
    again = with_tools(tmp_path, voice(), **options)
    trained = count_batches(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4 and len(trained) == 4


def count_batches(trainer, then=lambda number: None):
    """Return a list that gets an entry per batch that the trainer trains on. `then` is called with their number."""
    trained, step = [], trainer.training_step

    def counted(*args, **kwargs):
        result = step(*args, **kwargs)
        trained.append(trainer.state.global_step)
        then(len(trained))
        return result

    trainer.training_step = counted
    return trained


@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
def test_a_tool_that_complains_does_not_stop_the_run(tmp_path, voice, monkeypatch, error):
    monkeypatch.setattr(search, "down", True, raising=False)
    monkeypatch.setattr(search, "error", error)
    trainer = with_tools(tmp_path, voice(), max_tool_calling_iterations=2, max_steps=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    told = f"every tool call .* {error.__name__}: connection refused. The model was sho"
    warned = [warning for warning in said if re.search(told, str(warning.message))]
    assert bool(warned) == (error is not ValueError)  # which says that the arguments are wrong
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["tools/failure_frequency"] for log in logs] == [1.0, 1.0]


def test_few_calls_of_a_dead_service_stop_the_run_once_they_are_enough(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(search, "down", True, raising=False)
    speaker = voice()
    trainer = with_tools(tmp_path, speaker, max_tool_calling_iterations=1, max_steps=4)
    rows = iter(range(10_000))
    speaker.answer = lambda: "!search:query=a" if next(rows) % 2 else "done"  # 4 calls of 8 rows
    with pytest.raises(RuntimeError, match=r"every tool call of the last 2 generation batches raised \(8 of 8\)"):
        trainer.train()
    assert trainer.state.global_step == 1


class Served(Uncopyable):
    """Loses its service in `lost_method`, in instances from number `first_lost` on."""

    lost_method, first_lost, made = "", 0, 0

    def __init__(self):
        super().__init__()
        self.number = Served.made
        Served.made += 1
        self.episode = types.SimpleNamespace(steps=0)

    def _ask_server(self, method):
        if method == self.lost_method and self.number >= self.first_lost:
            raise ConnectionError("refused")

    def reset(self, board, prompt="", **columns):
        self._ask_server("reset")
        return super().reset(board, prompt)

    @as_lake_moves
    def move(self, direction: str) -> str:
        self._ask_server("move")
        return super().move(direction)

    def get_reward(self):
        self._ask_server("get_reward")
        return super().get_reward()


@pytest.mark.parametrize("method", ["reset", "move", "get_reward"])
def test_an_environment_that_lost_its_service_stops_the_run(tmp_path, voice, monkeypatch, method):
    monkeypatch.setattr(Served, "lost_method", method)
    voice(stops=0)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="every environment .*ConnectionError: refused"):
        agent(tmp_path, factory=Served).train()


def test_a_judge_that_dies_stops_the_run_with_a_checkpoint(tmp_path, voice, monkeypatch):
    options = dict(factory=Served, max_steps=4, save_strategy="steps", save_steps=100)
    voice()
    trainer = agent(tmp_path, **options)
    count_batches(trainer, lambda number: monkeypatch.setattr(Served, "lost_method", "get_reward" * (number == 2)))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=r"raised \(8 of 8\).*checkpoint-2'"):
        trainer.train()
    monkeypatch.setattr(Served, "lost_method", "")
    again = agent(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4


@pytest.mark.parametrize("method", ["reset", "move"])
def test_a_replay_that_loses_its_service_drops_its_branch_and_not_the_run(tmp_path, voice, monkeypatch, method):
    monkeypatch.setattr(Served, "lost_method", method)
    monkeypatch.setattr(Served, "first_lost", 10_000)

    def lose_service(environments, **columns):
        """Reward the main rows, whose environments have all been made."""
        monkeypatch.setattr(Served, "first_lost", Served.made)
        return odd_steps(environments)

    voice(stops=0.1)
    trainer = agent(tmp_path, factory=Served, reward_funcs=[lose_service])
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    branches = all_branches(sampled)
    assert len(branches) >= 8 and not any(trainer.turns.failed)
    lost = [branch for branch in branches if environment_error(branch.environment) is not None]
    assert lost and (method == "move" or len(lost) == len(branches))
    assert not any(branch.complete for branch in lost) and not {*map(id, lost)} & {*map(id, kept.values())}


def test_limits_of_interaction_come_in_stages(tmp_path, voice, monkeypatch):
    voice(stops=0)
    limits = dict(interaction_limits=[1, 3], interaction_limit_steps=[2], eval_interaction_limit=2)
    options = dict(max_tool_calling_iterations=None, max_steps=4, eval_strategy="steps", eval_steps=1)
    trainer = agent(tmp_path, redundancy_tries=0, **limits, **options)
    trainer.train()
    logs = trainer.state.log_history
    assert [log["agent/turns"] for log in logs if "agent/turns" in log] == [2, 2, 4, 4]
    assert {log["eval_tools/call_frequency"] for log in logs if "eval_loss" in log} == {2.0}


def test_metrics(tmp_path, voice, monkeypatch):
    speaker = voice()
    trainer = agent(tmp_path, redundancy_tries=0)
    _, sampled, kept = kept_branches(trainer, monkeypatch)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    branches = all_branches(sampled)
    spoken = sum(len(said) for call in speaker.calls for _, said in call)
    main = sum(sum(trajectory.loss_mask) for trajectory in trainer.trajectories)
    assert metrics["branch/sampled_tokens"] == spoken - main > 0
    assert metrics["branch/token_ratio"] == pytest.approx((spoken - main) / spoken)
    assert metrics["branch/contrastive_fraction"] == len(kept) / 8
    depths = [len(trainer.trajectories[row].turns) - branch.turn for row, branch in kept.items()]
    assert metrics["branch/depth"] == sum(depths) / len(depths)
    assert metrics["branch/incomplete"] == sum(not branch.complete for branch in branches)
    assert metrics["agent/turns"] == sum(len(t.turns) for t in trainer.trajectories) / 8
    assert "branch/tools/failure_frequency" not in metrics


@pytest.mark.parametrize(
    "options",
    [
        dict(steps_per_generation=4),
        dict(num_iterations=2, steps_per_generation=2),
        dict(branch_selection="random", steps_per_generation=4),
    ],
    ids=["off a boundary", "two iterations", "random"],
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, voice, options):
    voice()
    options = dict(options, max_steps=7, boards=BOARDS * 4)
    whole = agent(tmp_path, save_strategy="steps", save_steps=2, **options)
    whole.train()
    again = agent(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))


ERRORS = {
    "`success_threshold=1.5` must be in": dict(success_threshold=1.5),
    "`num_branches=1.5` must be an integer": dict(num_branches=1.5),
    "`num_branches_solved=-1` must be an integer": dict(num_branches_solved=-1),
    "`branch_depth=0` must be an integer of at least 1": dict(branch_depth=0),
    "`branch_depth_hard=True` must be an integer": dict(branch_depth_hard=True),
    "`redundancy_tries=2.0` must be an integer": dict(redundancy_tries=2.0),
    "`branch_group`.*'prompts'.*did you mean 'prompt'": dict(branch_group="prompts"),
    "`branch_selection`.*'randon'.*did you mean 'random'": dict(branch_selection="randon"),
    "`accuracy`.*'average'": dict(accuracy="average"),
    "`environment_state`.*'copies'": dict(environment_state="copies"),
    "`interaction_limit_steps=None` with `interaction_limits=\\[4, 8\\]`": dict(
        interaction_limits=[4, 8], max_tool_calling_iterations=None
    ),
    "`interaction_limits\\[1\\]=0` must be an integer": dict(
        interaction_limits=[4, 0], interaction_limit_steps=[3], max_tool_calling_iterations=None
    ),
    "`interaction_limits=.*and `max_tool_calling_iterations=4` both limit the rounds": dict(interaction_limits=[4]),
    "`multi_objective_aggregation='normalize_then_sum'` is not supported": dict(
        multi_objective_aggregation="normalize_then_sum"
    ),
    "environment_state='snapshot'`, but Lake does not define `snapshot": dict(environment_state="snapshot"),
    "environment_state='copy'`, but Uncopyable cannot be copied": dict(factory=Uncopyable, environment_state="copy"),
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=ERRORS.keys())
def test_bad_input_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=message):
        agent(tmp_path, **options)


def test_several_turns_need_tools_or_an_environment(tmp_path):
    with pytest.raises(ValueError, match="`interaction_limits=\\[4\\]`.*neither `tools` nor an `environment_factory`"):
        make_trainer(BranPOTrainer, BranPOConfig, tmp_path, interaction_limits=[4])


def test_what_the_table_says_of_trls_correction_holds():
    ours = BranPOConfig(use_cpu=True, bf16=False)
    assert (ours.vllm_importance_sampling_mode, ours.vllm_importance_sampling_clip_max) == ("sequence_mask", 3.0)
    papers = dict(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
    assert vars(BranPOConfig(use_cpu=True, bf16=False, **papers)).items() >= papers.items()


def test_a_single_turn_is_hinted_at_once(tmp_path):
    with pytest.warns(UserWarning, match="neither `tools` nor an `environment_factory`.*every completion is one turn"):
        trainer = make_trainer(BranPOTrainer, BranPOConfig, tmp_path)
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        trainer.train()
        agent(tmp_path)
    assert not [warning for warning in later if "one turn" in str(warning.message)]


def test_an_environment_without_tools_scores_single_turns(tmp_path, voice, monkeypatch):
    class Silent(FrozenLakeEnvironment):
        move = None

        def __init__(self):
            super().__init__(max_steps=6)

        def get_reward(self):
            return float(torch.rand(()) < 0.5)

    voice()
    with pytest.warns(UserWarning, match="with tools: every completion is one turn"):
        trainer = agent(tmp_path, factory=Silent, reward_funcs=None, max_tool_calling_iterations=None)
    _, sampled, _ = kept_branches(trainer, monkeypatch)
    assert {type(branch.environment) for branch in all_branches(sampled)} == {Silent}


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path, monkeypatch):
    model, tokenizer = build_model(seed=0, hidden_size=16, num_layers=1), build_tokenizer(tools=True)
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"who is {name}", "answer": name} for name in "abcdefgh"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": row["question"]}) + "\n" for row in rows))
    options = "--model_name_or_path model --use_cpu --bf16 false --max_steps 2 --report_to none".split()
    options += "--per_device_train_batch_size 4 --gradient_accumulation_steps 2".split()
    options += "--max_completion_length 32 --output_dir out".split()
    own = ["--dataset_name", "data.jsonl", "--corpus", "corpus.jsonl", "--index", "index"]
    for more in (["--num_questions", "20"], own):
        run_example("branpo_search_agent.py", *options, *more, folder=tmp_path, monkeypatch=monkeypatch)
    assert (tmp_path / "out" / "config.json").is_file() and (tmp_path / "index" / "index.json").is_file()

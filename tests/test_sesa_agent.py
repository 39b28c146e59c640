"""SESA's agent mode: reductions, who is asked what, what is trained, environments that raise, and its errors."""

import itertools
import re
from collections import Counter

import pytest
import torch
from test_branpo import as_lake_moves
from trl import GRPOConfig, GRPOTrainer
from world import BOARDS, assert_same, make_agent, one_batch, parameters, says

from examples.benchmarks.tasks.frozen_lake import FrozenLakeEnvironment
from trl_explore.rows.streams import row_tokens
from trl_explore.trainers import SESAConfig, SESATrainer

AGENT = dict(mode="agent", action_template="{problem}?{actions}", action_separator=";")
LETTERS = "ldru"


class Lake(FrozenLakeEnvironment):
    """Raises where a test says; its reward is what it is, whatever happened before."""

    breaks = ()
    error = RuntimeError

    def __init__(self):
        super().__init__(max_steps=6)

    def reset(self, board, prompt="", **columns):
        if "reset" in self.breaks:
            raise self.error("the lake has melted")
        return super().reset(board, prompt)

    @as_lake_moves
    def move(self, direction: str) -> str:
        if direction in self.breaks:
            raise self.error(f"no ice to the {direction}")
        return self._play(direction)

    def get_reward(self):
        if "reward" in self.breaks:
            raise self.error("no referee")
        return super().get_reward() + 1.0


class Voice:
    """Stands for what the model says: a move that it was not told about, or, now and then, a last word."""

    def __init__(self, stops=0.1, stubborn=False):
        self.stops, self.stubborn, self.calls = stops, stubborn, []

    def __call__(self, trainer, prompt_ids, *others, **options):
        tokenizer = trainer._tokenizer
        shown = [tokenizer.decode(ids) for ids in prompt_ids]
        said = [tokenizer(self.answer(text) + "<eos>")["input_ids"] for text in shown]
        self.calls.append(list(zip(shown, said, strict=True)))
        return said, None

    def answer(self, text):
        if torch.rand(()) < self.stops:
            return "done"
        told = re.findall(r"movedirection=(\w)", text.rpartition("<u>")[2])
        fresh = [letter for letter in LETTERS if letter not in told or self.stubborn]
        return f"!move:direction={fresh[torch.randint(len(fresh), ())]}"


@pytest.fixture
def voice(monkeypatch):
    def use(**options):
        speaker = Voice(**options)
        says(speaker, monkeypatch.setattr)
        return speaker

    return use


@pytest.fixture(autouse=True)
def sound_lake(monkeypatch):
    monkeypatch.setattr(Lake, "breaks", ())


def steps_reward(environments, **columns):
    return [float(environment.episode.steps) for environment in environments]


def make(cls, config, folder, *, factory=Lake, **options):
    sizes = dict(per_device_train_batch_size=16, num_generations=8, max_completion_length=140)
    sizes |= dict(max_tool_calling_iterations=3, reward_funcs=[steps_reward])
    return make_agent(cls, config, folder, environment_factory=factory, **{**sizes, **options})


def agent(folder, **options):
    return make(SESATrainer, SESAConfig, folder, **{**AGENT, **options})


def moves(trainer):
    """The moves of every row of the last batch."""
    texts = [trainer._tokenizer.decode(ids) for ids in trainer.main_completion_ids]
    return ["".join(re.findall(r"!move:direction=(\w)", text)) for text in texts]


@pytest.mark.parametrize("neutral", [dict(branch_depth=0), dict(max_trajectories=0)], ids=["depth", "trajectories"])
@pytest.mark.parametrize("options", [{}, dict(num_iterations=2, gradient_accumulation_steps=2)], ids=["", "reused"])
def test_without_branches_it_is_grpo_bit_for_bit(tmp_path, voice, neutral, options):
    runs = []
    for cls, config, own in ((GRPOTrainer, GRPOConfig, {}), (SESATrainer, SESAConfig, {**AGENT, **neutral})):
        voice()
        trainer = make(cls, config, tmp_path, **own, **options, max_steps=3)
        trainer.train()
        runs.append((parameters(trainer), trainer.state.log_history))
    assert_same(runs[1][0], runs[0][0])
    for got, expected in zip(runs[1][1], runs[0][1], strict=True):
        same = [key for key in expected if "time" not in key and "second" not in key]
        assert {key: got[key] for key in same} == {key: expected[key] for key in same}


def test_actions_of_a_decision_differ_and_are_shared_out(tmp_path, voice):
    speaker = voice(stops=0)
    trainer = agent(tmp_path, branch_depth=1)
    one_batch(trainer)
    for group in (moves(trainer)[:8], moves(trainer)[8:]):
        assert Counter(row[0] for row in group) == dict.fromkeys(LETTERS, 2)
    board = [text for text, _ in speaker.calls[0]]
    assert sorted(board) == sorted(f"<u>{b}<a>" for b in BOARDS)  # the first action is sampled as in GRPO
    for number, call in enumerate(speaker.calls[1:4], start=1):
        for (text, _), start in zip(call, board, strict=True):
            told = re.findall(r"movedirection=\w", text)
            assert text == start.replace("<a>", f"?{';'.join(told)}<a>") and len(set(told)) == number
    assert [len(call) for call in speaker.calls] == [2, 2, 2, 2, 16, 16, 16]


def test_later_decisions_are_taken_on_what_the_tools_answered(tmp_path, voice):
    speaker = voice(stops=0)
    trainer = agent(tmp_path, branch_depth=2, num_actions=2)
    one_batch(trainer)
    for group in (moves(trainer)[:8], moves(trainer)[8:]):
        counts = Counter(row[:2] for row in group)
        assert len(counts) == 4 and set(counts.values()) == {2}
    # Two actions at each of the two roots, then two at each of four boards; the last two turns are plain.
    assert [len(call) for call in speaker.calls] == [2, 2, 4, 4, 16, 16]
    for (plain, said), (asked, _) in zip(speaker.calls[2], speaker.calls[3], strict=True):
        first = trainer._tokenizer.decode(said).removesuffix("<eos>").replace("!move:", "move")
        assert asked == plain.removesuffix("<a>") + f"?{first}<a>" and plain.count("<u>") == 2


def test_trained_tokens_are_the_sampled_ones_under_the_plain_context(tmp_path, voice):
    speaker = voice()
    trainer = agent(tmp_path, branch_depth=2, num_actions=3)
    output = one_batch(trainer)
    spoken = {tuple(said) for call in speaker.calls for _, said in call}
    prompts = [trainer._tokenizer.decode(ids) for ids in row_tokens(output)[0]]
    assert Counter(prompts) == {f"<u>{board}<a>": 8 for board in BOARDS}
    assert "sampling_per_token_logps" not in output
    for ids, mask in zip(trainer.main_completion_ids, output["tool_mask"].tolist(), strict=True):
        turns, turn = [], []
        for token, own in zip(ids, mask, strict=False):
            if own:
                turn.append(token)
            elif turn:
                turns, turn = [*turns, tuple(turn)], []
        assert {*turns, tuple(turn)} - {()} <= spoken
        assert "?" not in trainer._tokenizer.decode(ids)  # what asked for other actions is not part of a row


def test_only_max_trajectories_of_a_group_branch(tmp_path, voice):
    speaker = voice(stops=0)
    trainer = agent(tmp_path, branch_depth=1, num_actions=4, max_trajectories=4)
    one_batch(trainer)
    for group in (moves(trainer)[:4], moves(trainer)[8:12]):
        assert {row[0] for row in group} == set(LETTERS)
    assert [len(call) for call in speaker.calls] == [2, 2, 2, 2, 8, 16, 16, 16]


def test_groups_with_the_same_prompt_decide_apart(tmp_path, voice):
    speaker = voice(stops=0)
    trainer = agent(tmp_path, branch_depth=1, num_actions=2, boards=[BOARDS[0]] * 2)
    one_batch(trainer)
    assert [len(call) for call in speaker.calls[:2]] == [2, 2]
    for group in (moves(trainer)[:8], moves(trainer)[8:]):
        assert sorted(Counter(row[0] for row in group).values()) == [4, 4]


def test_an_answer_that_ends_the_episode_is_given_once(tmp_path, voice):
    speaker = voice(stops=0)
    speaker.answer = lambda text: "!move:direction=d" if "?done" in text else "done"
    trainer = agent(tmp_path, branch_depth=1, num_actions=2)
    one_batch(trainer)
    assert [bool(row) for row in moves(trainer)] == [False, *[True] * 7] * 2


def test_metrics(tmp_path, voice, monkeypatch):
    # One reading per second, and a clock that does not start at 0.
    ticks = itertools.count(1e6)
    monkeypatch.setattr("trl_explore.sketches.agent.time.perf_counter", lambda: next(ticks))
    speaker = voice(stops=0, stubborn=True)
    trainer = agent(tmp_path, branch_depth=2, num_actions=3, max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    rows = [tuple(ids) for ids in trainer.main_completion_ids]
    assert log["agent/trajectories"] == (len(set(rows[:8])) + len(set(rows[8:]))) / 2
    assert log["agent/environment_errors"] == 0
    asked = [call for call in speaker.calls if len(call) < 8]
    assert log["sketch/sampled_tokens"] == sum(len(said) for call in speaker.calls for _, said in call)
    assert log["sketch/tokens"] <= log["sketch/sampled_tokens"] and len(asked) >= 6
    assert 0 < log["agent/duplicate_actions"] and 1 / 3 <= log["sketch/distinct"] < 1
    assert log["agent/decisions"] >= 1.5 and log["sketch/empty"] == 0
    assert 4 <= log["sketch/drafting_seconds"] < 1e3 and 4 <= log["sketch/solving_seconds"] < 1e3


def test_what_was_proposed_first_is_forgotten_where_the_context_ends(tmp_path, voice):
    speaker = voice(stops=0)
    trainer = agent(tmp_path, branch_depth=1, max_completion_length=44, context_length=13 + 50)
    one_batch(trainer)
    shown = [re.findall(r"movedirection=\w", text) for text, _ in speaker.calls[3]]
    assert [len(told) for told in shown] == [2, 2] and trainer._metrics["train"]["sketch/dropped"] == [2.0]


def test_proposals_are_weighted_by_their_likelihood_without_being_asked_for(tmp_path, voice):
    voice(stops=0)
    trainer = agent(tmp_path, branch_depth=2, num_actions=3, off_policy_correction=True, off_policy_cap=1e9)
    output = one_batch(trainer)
    asked = 0
    for i, (prompt, ids) in enumerate(zip(row_tokens(output)[0], trainer.main_completion_ids, strict=True)):
        expected = torch.ones(len(ids))
        for drawn in trainer.mode.drawn[i]:
            n = len(drawn.token_ids)
            assert ids[drawn.start : drawn.start + n] == drawn.token_ids
            assert "?" in trainer._tokenizer.decode(drawn.context)
            sums = []
            for context in (prompt + ids[: drawn.start], drawn.context):
                with torch.no_grad():
                    logits = trainer.model(torch.tensor([context + drawn.token_ids])).logits[0, len(context) - 1 : -1]
                sums.append(logits.log_softmax(-1).gather(1, torch.tensor(drawn.token_ids)[:, None])[:, 0])
            expected[drawn.start : drawn.start + n] = (sums[0] - sums[1]).exp()
            asked += 1
        got = output["advantages"][i, : len(ids)]
        plain = [k for k in range(len(ids)) if expected[k] == 1.0]
        torch.testing.assert_close(got, expected * got[plain[0]], rtol=1e-3, atol=1e-5)
    assert asked >= 16  # two of three first moves per group, and what follows


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path, voice):
    voice()
    options = dict(steps_per_generation=2, max_steps=5, per_device_train_batch_size=8, boards=BOARDS * 4)
    whole = agent(tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    again = agent(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))


def test_a_model_that_says_anything_is_trained(tmp_path):
    lengths = dict(reward_funcs=[lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids]])
    trainer = agent(tmp_path, max_completion_length=24, **lengths)
    before = parameters(trainer)
    trainer.train()
    assert any(not torch.equal(before[name], after) for name, after in parameters(trainer).items())


def test_a_tool_that_raises_ends_its_trajectory_and_not_the_run(tmp_path, voice, monkeypatch):
    monkeypatch.setattr(Lake, "breaks", ("r",))
    voice(stops=0)
    seen = []

    def noting(environments, completions, log_extra, **columns):
        seen.append(len(environments))
        log_extra("turns", [len(completion) for completion in completions])
        return [float(environment.episode.steps) for environment in environments]

    trainer = agent(tmp_path, branch_depth=1, reward_funcs=[noting])
    with pytest.warns(UserWarning, match="raised RuntimeError: no ice to the r.*ended with reward 0"):
        output = one_batch(trainer)
    broken = ["r" in row[:3] for row in moves(trainer)]  # the fourth move of a row is not executed any more
    assert 4 <= sum(broken) < 16 and trainer._metrics["train"]["agent/environment_errors"] == [sum(broken)]
    rewards = trainer.scorer.totals().tolist()
    assert [reward == 0 for reward in rewards] == broken and seen == [16 - sum(broken)]
    assert len(trainer._logs["extra"]["turns"]) == 16
    for place, row in enumerate(moves(trainer)):
        if broken[place]:
            assert row.endswith("r") and row.count("r") == 1
            # Nothing was put into the model's mouth: the last tokens of such a row are the tool's.
            assert output["tool_mask"][place, len(trainer.main_completion_ids[place]) - 1] == 0
        else:
            assert len(row) == 4
    assert output["advantages"].isfinite().all()


EVALUATED = dict(boards=[BOARDS[0]] * 2, eval_strategy="steps", eval_steps=1)
EVALUATED |= dict(num_generations_eval=2, per_device_eval_batch_size=4)


@pytest.mark.parametrize(("place", "error"), [("reward", ValueError), ("l d r u", NameError)])
def test_the_run_survives_environments_in_which_the_model_always_fails(tmp_path, voice, monkeypatch, place, error):
    monkeypatch.setattr(Lake, "breaks", place.split())
    monkeypatch.setattr(Lake, "error", error)  # a wrong call of the model, or its code, can raise it
    voice(stops=0)
    trainer = agent(tmp_path, **EVALUATED)
    with pytest.warns(UserWarning, match="agent/environment_errors"):
        trainer.train()
    logs = trainer.state.log_history
    train = [log for log in logs if "reward" in log]
    assert [(log["agent/environment_errors"], log["reward"]) for log in train] == [(16, 0)] * 2
    evaluated = [log for log in logs if "eval_reward" in log]
    assert [(log["eval_agent/environment_errors"], log["eval_reward"]) for log in evaluated] == [(4, 0)] * 2


@pytest.mark.parametrize("place", ["reset", "reward", "l d r u"])
def test_environments_that_died_stop_the_run_but_no_evaluation(tmp_path, voice, monkeypatch, place):
    monkeypatch.setattr(Lake, "breaks", place.split())
    voice(stops=0)
    trainer = agent(tmp_path, **EVALUATED)
    with pytest.warns(UserWarning, match="agent/environment_errors"):
        evaluated = trainer.evaluate()
    assert evaluated["eval_reward"] == 0 and evaluated["eval_agent/environment_errors"] == 4
    words = r"every environment of this generation batch raised \(16 of 16\), the last one RuntimeError: .*"
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=words):
        trainer.train()


def test_a_call_that_does_not_fit_is_an_observation(tmp_path, voice):
    speaker = voice(stops=0)
    speaker.answer = lambda text: "!move:speed=l"
    trainer = agent(tmp_path, branch_depth=1)
    one_batch(trainer)
    assert trainer._metrics["train"]["agent/environment_errors"] == [0]
    assert trainer._metrics["train"]["tools/failure_frequency"] == [1.0]


class Bell(Lake):
    """Has one button."""

    move = None

    def ring(self) -> str:
        """
        Rings.

        Returns:
            A sound.
        """
        return "ding"


class Mute(Lake):
    move = None


ERRORS = {
    "`mode='agent'` needs an environment to act in": dict(factory=None),
    "cannot be told apart: .* there is only 'ring', without parameters": dict(factory=Bell),
    r"`environment_factory\['bell'\]` .* cannot be told apart": dict(factory={"lake": Lake, "bell": Bell}),
    "there is none. Give the environment": dict(factory=Mute),
    "`mode='two_stage'` does not support `environment_factory`.*set `mode='agent'`": dict(mode="two_stage"),
    "max_trajectories=9` must be between 0 .*num_generations=8": dict(max_trajectories=9),
    "num_actions=1` must be at least 2": dict(num_actions=1),
    "branch_depth=-1` at least 0": dict(branch_depth=-1),
    "action_template='{problem}'` must contain {actions}": dict(action_template="{problem}"),
    "action_template='{actions}'` must contain {problem}": dict(action_template="{actions}"),
    "action_separator` must not be empty": dict(action_separator=""),
    "leave no room for a prompt in a context of 140": dict(context_length=140),
}


@pytest.mark.parametrize("message, options", ERRORS.items(), ids=ERRORS.keys())
def test_bad_input_is_refused_at_construction(tmp_path, message, options):
    options = dict(options)
    if isinstance(options.get("factory"), dict):
        options["boards"] = BOARDS
    with pytest.raises(ValueError, match=message):
        agent(tmp_path, **options)

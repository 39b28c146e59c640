"""What reward functions and environments are given: every row's own prompt, columns and messages, as in TRL."""

import copy
import threading

import pandas
import pytest
import torch
from datasets import Dataset
from test_branpo import Voice
from trl.chat_template_utils import parse_response
from world import (
    CHAT_TEMPLATE,
    assert_same,
    contains_answer,
    make_agent,
    make_dataset,
    make_tokenizer,
    make_trainer,
    parameters,
    says,
    tiny_methods,
)

from trl_explore.evaluation.evaluate import Sampling, evaluate
from trl_explore.rows.copies import own_copy
from trl_explore.rows.logged import LoggedColumns
from trl_explore.trainers import (
    AgentTreeGRPOConfig,
    AgentTreeGRPOTrainer,
    BranPOConfig,
    BranPOTrainer,
    DeepGRPOConfig,
    DeepGRPOTrainer,
    ExplorationConfig,
    ExplorationTrainer,
)

METHODS = tiny_methods()
DIGITS = [*"0123456789"]
AGENTS = {
    "deep_grpo": (DeepGRPOTrainer, DeepGRPOConfig, dict(segmentation="fixed", segment_length=4, num_branches=2)),
    "branpo": (BranPOTrainer, BranPOConfig, dict(branch_depth_hard=3)),
    "agent_tree_grpo": (AgentTreeGRPOTrainer, AgentTreeGRPOConfig, dict(num_expansions=2, num_rounds=2)),
}
AGENT = dict(
    per_device_train_batch_size=8, num_generations=4, max_completion_length=200, max_tool_calling_iterations=4
)


def train(name, folder, **options):
    """A tiny run of a method."""
    trainer_class, config_class, own = METHODS[name]
    trainer = make_trainer(trainer_class, config_class, folder, **{**own, **options})
    trainer.train()
    return trainer


# ------------------------------------------------------------------------------------------ the prompt of a judged row

# The generation prompt opens a thought with "b", and "c" ends it.
THINKING = CHAT_TEMPLATE.replace(
    "{% if add_generation_prompt %}<a>{% endif %}", "{% if add_generation_prompt %}<a>b{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<a>",
    "fields": {
        "reasoning_content": {"open": "b", "close_pattern": "c", "content": "text"},
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def thinking_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


class Noting:
    """A reward function that notes what it is asked about; right are completions with a text after their thought."""

    __name__ = "noting"

    def __init__(self):
        self.seen = []

    def __call__(self, prompts, completions, completion_ids, **columns):
        self.seen += copy.deepcopy([*zip(prompts, completions, completion_ids, strict=True)])
        return [float(bool(completion[-1]["content"])) for completion in completions]

    def wrong_messages(self, tokenizer):
        wrong = []
        for prompt, completion, ids in self.seen:
            prefix = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            if completion != [parse_response(tokenizer, ids, prefix=prefix)]:
                wrong.append(completion)
        return wrong


def assert_completions_are_parsed_with_their_prompts(name, folder, **options):
    reward, tokenizer = Noting(), thinking_tokenizer()
    options = dict(options, max_steps=1, reward_funcs=reward, processing_class=tokenizer)
    train(name, folder, conversational=True, **options)
    assert any(completion[-1].get("reasoning_content") for _, completion, _ in reward.seen)
    assert len(reward.seen) >= 8 and not reward.wrong_messages(tokenizer)


@pytest.mark.parametrize("name", ["tree_grpo", "tree_rl", "attn_rl", "branpo", "agent_tree_grpo", "deep_grpo", "sesa"])
def test_every_completion_is_parsed_with_its_own_prompt(tmp_path, name):
    assert_completions_are_parsed_with_their_prompts(name, tmp_path)


@pytest.mark.parametrize("into", ["replace", "add"])
def test_completions_that_decide_what_is_explored_are_parsed_with_their_prompt(tmp_path, into):
    options = dict(explore_prompts="unsolved", explore_into=into)
    assert_completions_are_parsed_with_their_prompts("sesa", tmp_path, **options)


def test_evaluation_parses_completions_with_their_prompt(tmp_path):
    reward, tokenizer = Noting(), thinking_tokenizer()
    model = make_trainer(output_dir=tmp_path).model
    rows = make_dataset(conversational=True).select(range(4))
    options = dict(sampling=Sampling(4, max_new_tokens=8), progress=False)
    evaluate(model, rows, processing_class=tokenizer, reward_funcs=reward, **options)
    assert len(reward.seen) == 16 and not reward.wrong_messages(tokenizer)


# ---------------------------------------------------------------------------------------------- columns of its own


class CrossedOff:
    """A reward function that takes what it has found out of a list column; notes how many rows had a used list."""

    __name__ = "crossed_off"

    def __init__(self):
        self.rows = self.used = 0

    def __call__(self, completions, wanted, **columns):
        rewards = []
        for completion, left in zip(completions, wanted, strict=True):
            self.rows += 1
            self.used += left != [DIGITS]
            found = [character for character in completion if character in left[0]]
            left[0][:] = []
            rewards.append(float(len(found) > 1))
        return rewards


def listed():
    """Sums with a column that is a list of lists."""
    return make_dataset().map(lambda row: {"wanted": [DIGITS]})


@pytest.mark.parametrize("name", METHODS)
def test_each_row_owns_its_list_columns(tmp_path, name):
    reward = CrossedOff()
    train(name, tmp_path, max_steps=2, reward_funcs=reward, train_dataset=listed())
    assert reward.rows >= 16 and reward.used == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sesa", dict(dynamic_sampling="refill", max_sampling_rounds=4)),
        ("sesa", dict(dynamic_sampling="refill", max_sampling_rounds=4, explore_threshold=0.9)),
        ("sesa", dict(explore_prompts="unsolved")),
        ("sesa", dict(explore_prompts="unsolved", explore_into="add")),
        ("deep_grpo", dict(deferred_branching=True)),
    ],
)
def test_each_row_of_further_rounds_and_later_batches_owns_its_list_columns(tmp_path, name, options):
    reward = CrossedOff()
    train(name, tmp_path, max_steps=3, reward_funcs=reward, train_dataset=listed(), **options)
    assert reward.rows >= 24 and reward.used == 0


def test_rows_that_fill_up_a_round_own_their_list_columns(tmp_path):
    """A process with fewer missing groups than another fills its round up with rows of the first round."""
    reward = CrossedOff()
    options = dict(dynamic_sampling="refill", max_sampling_rounds=3, max_steps=2, train_dataset=listed())
    trainer = make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=reward, **options)
    trainer.ranks.most = lambda number: number and number + 1  # another process misses one group more
    trainer.train()
    assert reward.rows > 16 and reward.used == 0


def test_prompts_of_branches_are_those_of_the_data(tmp_path):
    seen = []

    def rewrites(prompts, completions, **columns):
        for prompt in prompts:
            seen.append(len(prompt))
            prompt.append({"role": "user", "content": "and why?"})
        return [float("a" in completion[0]["content"]) for completion in completions]

    for name in ("tree_rl", "tree_grpo", "deep_grpo"):
        train(name, tmp_path / name, max_steps=1, reward_funcs=rewrites, conversational=True)
    assert len(seen) > 24 and set(seen) == {1}


def test_branches_continue_the_sampled_tokens_whatever_a_reward_function_does_to_them(tmp_path):
    def cuts(completions, completion_ids, **columns):
        for ids in completion_ids:
            ids[:] = ids[:1]
        return contains_answer(completions, **columns)

    for name in ("tree_rl", "deep_grpo", "g2rl", "branpo"):
        first = train(name, tmp_path / name, max_steps=1, reward_funcs=cuts)
        second = train(name, tmp_path / name, max_steps=1, reward_funcs=contains_answer)
        assert_same(parameters(first), parameters(second))


# ---------------------------------------------------------------------------------------- environments and messages


class Deck:
    """An environment that draws from the list that `reset` gets."""

    begun: list = []

    def reset(self, deck, **columns):
        self.begun.append(len(deck))
        self.deck, self.hand = deck, []

    def move(self, direction: str) -> str:
        """
        Draws a card.

        Args:
            direction: Ignored.

        Returns:
            The card.
        """
        self.hand.append(self.deck.pop(0) if self.deck else "-")
        return self.hand[-1]


class OwnDeck(Deck):
    """The same with states of its own."""

    def snapshot(self):
        return [*self.deck], [*self.hand]

    def restore(self, state):
        self.deck[:], self.hand = state[0], [*state[1]]


def decks():
    prompts = [[{"role": "user", "content": f"{i}"}] for i in range(4)]
    return Dataset.from_dict({"prompt": prompts, "deck": [[*"abcdefgh"] for _ in prompts]})


def deck_agent(name, folder, monkeypatch, *, factory=Deck, **options):
    """An agent that draws a card in each turn, for up to eight turns."""
    trainer_class, config_class, fields = AGENTS[name]
    says(Voice(0.3), monkeypatch.setattr)
    monkeypatch.setattr(Deck, "begun", [])
    options = {**AGENT, **fields, "environment_factory": factory, "train_dataset": decks(), **options}
    return make_agent(trainer_class, config_class, folder, **options)


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    ("factory", "state"), [(Deck, "copy"), (OwnDeck, "snapshot"), (Deck, "replay")], ids=["copy", "snapshot", "replay"]
)
def test_the_environment_of_each_branch_owns_the_list_that_it_draws_from(tmp_path, monkeypatch, name, factory, state):
    seen = []

    def remaining(environments, deck, **columns):
        """Every environment has drawn from its own row, which the reward function sees as the environment left it."""
        for environment, left in zip(environments, deck, strict=True):
            seen.append((len(environment.hand), "".join([*environment.hand, *left])))
            assert environment.deck == left
        return [float(len(environment.hand) % 2) for environment in environments]

    options = dict(factory=factory, environment_state=state, reward_funcs=[remaining])
    deck_agent(name, tmp_path, monkeypatch, **options).train()
    assert set(Deck.begun) == {8} and {cards for _, cards in seen} == {"abcdefgh"}
    assert len(seen) > 16 and max(drawn for drawn, _ in seen) > 1


def takes_off(environments, completions, **columns):
    for completion in completions:
        completion.pop()
    return [float(len(environment.hand) % 2) for environment in environments]


def rewrites(environments, prompts, completions, **columns):
    for messages in [*prompts, *completions]:
        for message in messages:
            message["content"] = "rewritten"
            message.pop("tool_calls", None)
    return [float(len(environment.hand) % 2) for environment in environments]


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("edits", [takes_off, rewrites])
def test_branches_continue_the_messages_that_were_said(tmp_path, monkeypatch, name, edits):
    trainer = deck_agent(name, tmp_path, monkeypatch, environment_state="replay", reward_funcs=[edits])
    judge, judged = trainer.forks.judge, []

    def watched(branches):
        judge(branches)
        for branch in branches:
            said = [message["content"] for message in branch.messages]
            calls = sum(len(message.get("tool_calls") or []) for message in branch.messages)
            judged.append((said, calls, branch.environment.hand, branch.origin.example["prompt"]))

    trainer.forks.judge = watched
    trainer.train()
    assert len(judged) > 8
    for said, calls, hand, prompt in judged:
        assert [text for text in said if text in hand] == hand and "rewritten" not in said
        assert calls >= len(hand) and prompt[0]["content"].isdigit()


# ------------------------------------------------------------------------------------- columns that functions log


@pytest.mark.parametrize(
    ("number", "calls", "column", "unplaced"),
    [
        (2, [(0, "ab"), (1, "cd")], ["c", "d"], {}),  # of two functions, the last one counts
        (2, [(0, "a"), (0, "b")], ["a", "b"], {}),  # a function may log in parts
        (3, [(0, "a"), (1, "bc")], ["a", "b", "c"], {}),  # and two functions a part of the rows each
        (2, [(0, "ab"), (1, "c")], ["a", "b"], {}),  # a whole column outweighs a part
        (2, [(0, "a")], [None, None], {"note": 1}),  # without a value per row
    ],
)
def test_what_functions_log_is_one_value_per_row(number, calls, column, unplaced):
    logged = LoggedColumns([True] * number)
    for function, values in calls:
        logged.log_of(function)("note", [*values])
    assert logged.columns() == ({"note": column}, unplaced)


def test_rows_that_are_not_asked_about_keep_what_was_logged_before():
    logged = LoggedColumns([True, False, True], [{}, {"note": "b", "old": 1}, {}])
    logged.log_of(0)("note", ["a", "c"])
    assert logged.columns() == ({"note": ["a", "b", "c"], "old": [None, 1, None]}, {})


def first_notes(completions, log_extra, **columns):
    log_extra("note", ["first " + said(completion) for completion in completions])
    return [float("a" in said(completion)) for completion in completions]


def last_notes(completions, log_extra, **columns):
    log_extra("note", ["last " + said(completion) for completion in completions])
    return [float("b" in said(completion)) for completion in completions]


def some_notes(completions, log_extra, **columns):
    log_extra("few", [said(completion) for completion in completions if "c" in said(completion)][:1])
    return [0.0] * len(completions)


def said(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def written_tables(folder):
    return [pandas.read_parquet(file) for file in sorted((folder / "completions").glob("*.parquet"))]


@pytest.mark.parametrize("name", METHODS)
def test_two_functions_may_log_one_column_and_every_branch_has_it(tmp_path, name):
    train(name, tmp_path, max_steps=2, reward_funcs=[first_notes, last_notes], log_completions=True)
    for rows in written_tables(tmp_path):
        assert list(rows["note"]) == ["last " + text for text in rows["completion"]]


@pytest.mark.parametrize("name", ["tree_grpo", "tree_rl", "attn_rl", "branpo", "agent_tree_grpo", "deep_grpo", "g2rl"])
def test_a_function_may_log_some_rows_only(tmp_path, name):
    options = dict(max_steps=1, reward_funcs=[first_notes, some_notes])
    train(name, tmp_path, **options)
    with pytest.warns(UserWarning, match=r"`log_extra\('few', ...\)` was given"):
        train(name, tmp_path, log_completions=True, **options)
    for rows in written_tables(tmp_path):
        assert list(rows["note"]) == ["first " + text for text in rows["completion"]] and rows["few"].isna().all()


@pytest.mark.parametrize(
    "options",
    [
        dict(dynamic_sampling="filter"),
        dict(dynamic_sampling="refill", max_sampling_rounds=4),
        dict(explore_prompts="unsolved"),
        dict(explore_prompts="unsolved", explore_into="add"),
    ],
)
def test_rounds_and_explored_rows_keep_logged_columns(tmp_path, options):
    train("sesa", tmp_path, max_steps=3, reward_funcs=[first_notes, last_notes], log_completions=True, **options)
    for rows in written_tables(tmp_path):
        assert list(rows["note"]) == ["last " + text for text in rows["completion"]]


def test_a_column_that_is_logged_in_some_rounds_only_stays_with_its_rows(tmp_path):
    calls = []

    def now_and_then(completions, log_extra, **columns):
        calls.append(len(completions))
        if len(calls) % 2 == 0:
            log_extra("note", completions)
        return contains_answer(completions, **columns)

    options = dict(dynamic_sampling="refill", max_sampling_rounds=4, log_completions=True, max_steps=4)
    make_trainer(ExplorationTrainer, ExplorationConfig, tmp_path, reward_funcs=now_and_then, **options).train()
    found = 0
    for rows in written_tables(tmp_path):
        if "note" in rows:
            noted = rows[rows["note"].notna()]
            found += len(noted)
            assert list(noted["note"]) == list(noted["completion"]) and len(noted) < len(rows)
    assert found > 0


def test_columns_of_branches_of_agents_reach_the_table(tmp_path, monkeypatch):
    def hands(environments, log_extra, **columns):
        log_extra("hand", ["".join(environment.hand) for environment in environments])
        return [float(len(environment.hand) % 2) for environment in environments]

    for name in AGENTS:
        folder = tmp_path / name
        deck_agent(name, folder, monkeypatch, reward_funcs=[hands], log_completions=True, max_steps=1).train()
        for rows in written_tables(folder):
            drawn = [
                "".join(message["content"] for message in completion if message["role"] == "tool")
                for completion in rows["completion"]
            ]
            assert len(rows) > 8 and all(
                hand.startswith(cards) for hand, cards in zip(rows["hand"], drawn, strict=True)
            )


def test_a_copy_shares_images_and_with_one_warning_what_cannot_be_copied():
    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

    image = pytest.importorskip("PIL.Image").new("L", (2, 2))
    row = {"images": [image], "grader": Locked(), "board": torch.zeros(2), "left": [["a"], {"b": ["c"]}]}
    row["pair"] = (["a"], 1)
    with pytest.warns(UserWarning, match="a value of type Locked that cannot be copied") as seen:
        copied = own_copy(row)
        own_copy(row)
    assert len(seen) == 1 and copied["grader"] is row["grader"]
    assert copied["images"] is not row["images"] and copied["images"][0] is image
    copied["board"][0] = 1.0
    copied["left"][1]["b"].clear()
    copied["pair"][0].append("b")
    assert row["board"].tolist() == [0.0, 0.0] and row["left"] == [["a"], {"b": ["c"]}] and row["pair"] == (["a"], 1)

"""The completions table: columns of every method, rows of every stream, evaluation, and who writes it down."""

import json
import math
from functools import partial

import pandas as pd
import pytest
import torch
from test_branpo import Voice, agent
from trl.trainer import grpo_trainer
from world import contains_answer, make_dataset, make_tokenizer, make_trainer, says

from trl_explore.rows.printed import print_rows, printed_visibly
from trl_explore.rows.table import with_written_arguments
from trl_explore.trainers import (
    DeepGRPOConfig,
    DeepGRPOTrainer,
    G2RLConfig,
    G2RLTrainer,
    SESAConfig,
    SESATrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
)

DEEP = dict(num_branches=3, segmentation="fixed", segment_length=2)
TREE = dict(expansion_width=3, node_length=2, skip_uniform_trees=False)


def table(trainer, step=None):
    step = trainer.state.global_step if step is None else step
    return pd.read_parquet(f"{trainer.args.output_dir}/completions/completions_{step:05d}.parquet")


def train(trainer_class, config_class, folder, **options):
    trainer = make_trainer(trainer_class, config_class, folder, log_completions=True, **options)
    trainer.train()
    return trainer


def text(ids):
    return make_tokenizer().decode(ids, skip_special_tokens=True)


def normalised(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def of_stream(rows, name):
    return rows[rows["stream"] == name]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return train(DeepGRPOTrainer, DeepGRPOConfig, tmp_path_factory.mktemp("deep"), **DEEP)


def test_branches_stand_behind_the_rows_that_they_leave(deep):
    rows = table(deep)
    main, aux = of_stream(rows, "main"), of_stream(rows, "aux")
    assert list(rows["stream"]) == ["main"] * 8 + ["aux"] * len(aux)
    failed = list(main.index[main["contains_answer"] == 0])
    assert list(aux["parent"]) == [row for row in failed for _ in range(3)]
    assert main["parent"].isna().all() and main["prefix_tokens"].isna().all()
    answers = {row["prompt"]: row["answer"] for row in make_dataset()}
    for _, branch in aux.iterrows():
        parent = int(branch["parent"])
        assert branch["prompt"] == main.loc[parent, "prompt"]
        assert branch["completion"].startswith(text(deep.main_completion_ids[parent][: int(branch["prefix_tokens"])]))
        assert branch["contains_answer"] == float(answers[branch["prompt"]] in branch["completion"])
    assert (aux["prefix_tokens"] > 0).any()


def test_advantages_are_those_among_siblings(deep):
    for stream, size in (("main", 4), ("aux", 3)):
        parts = [of_stream(table(deep, step), stream) for step in (1, 2, 3)]
        groups = [part.iloc[first : first + size] for part in parts for first in range(0, len(part), size)]
        for group in groups:
            assert list(group["advantage"]) == pytest.approx(list(normalised(group["contains_answer"])), abs=1e-5)
        assert any(group["advantage"].any() for group in groups)


def test_failures_say_where_they_were_left_and_whether_it_helped(deep):
    for step in (1, 2, 3):
        rows = table(deep, step)
        main, aux = of_stream(rows, "main"), of_stream(rows, "aux")
        assert list(main["pivot_depth"].notna()) == list(main["contains_answer"] == 0)
        for row, best in aux.groupby("parent")["contains_answer"].max().items():
            assert main.loc[int(row), "recovered"] == best
        assert main["recovered"].notna().sum() == len(aux) / 3
        assert rows.dtypes[["parent", "prefix_tokens", "pivot_depth", "recovered"]].eq("float64").all()


def test_deferred_branches_have_no_parent_in_the_table(tmp_path):
    rows = table(train(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **DEEP, deferred_branching=True, max_steps=2))
    aux = of_stream(rows, "aux")
    assert len(aux) > 0 and aux["parent"].isna().all()
    assert of_stream(rows, "main")["pivot_depth"].notna().any() and rows["recovered"].isna().all()


def test_rows_of_trees_tell_their_path(tmp_path):
    trainer = train(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **TREE, max_steps=1)
    rows = table(trainer)
    nodes = [(tree, row) for tree in trainer.explorer.trees for row in tree.rows]
    assert len(rows) == 8 and set(rows["stream"]) == {"main"}
    for (tree, row), (_, written) in zip(nodes, rows.iterrows(), strict=True):
        path = tree.path(row)
        assert written["completion"] == text(tree.completion_ids(row))
        assert written["depth"] == len(path) == len(written["node_values"])
        *inner, last = written["node_values"]
        assert last == tree.nodes[row].outcome == 2 * written["contains_answer"] - 1
        assert inner == pytest.approx([math.tanh(tree.nodes[node].value) for node in path[:-1]], abs=1e-3)
        assert written["origin"] == ("direct" if tree.nodes[row].direct else "search")
    assert rows["depth"].max() > 1 and "parent" not in rows
    # What is trained, not what GRPO would train: the mean over the tokens, those of equal nodes alike.
    tree, row = nodes[0]
    baseline = sum(tree.nodes[index].outcome for index in tree.rows) / 4
    lengths = [len(tree.nodes[node].token_ids) for node in tree.path(row)]
    credit = sum(n * (value - baseline) for n, value in zip(lengths, rows.loc[0, "node_values"], strict=True))
    assert rows.loc[0, "advantage"] == pytest.approx(credit / sum(lengths), abs=1e-3)


def test_replayed_rows_are_told_apart(tmp_path):
    replay = dict(replay_buffer=True, replay_threshold=0.9, replay_solutions=2, max_steps=4)
    two = make_dataset().select(range(2))
    trainer = train(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, **TREE, **replay, train_dataset=two)
    replayed = 0
    for step, entry in enumerate(trainer.state.log_history[:4], 1):
        rows = table(trainer, step)
        assert (rows["origin"] == "replayed").sum() == entry["replay/replaced_rows"]
        replayed += entry["replay/replaced_rows"]
        assert (rows["contains_answer"][rows["origin"] == "replayed"] == 1).all()
    assert replayed > 0


SKETCHES = dict(
    max_sketch_length=4,
    sketch_template="{problem}a",
    next_sketch_template="{problem}b{sketches}",
    solve_template="{sketch} {problem}",
    candidate_template="{problem}c",
    candidate_separator="+",
)


@pytest.mark.parametrize("options", [{}, dict(context_length=13)], ids=["with room", "without room"])
def test_sketches_are_those_that_the_sampler_saw(tmp_path, options):
    trainer = train(SESATrainer, SESAConfig, tmp_path, **SKETCHES, **options, max_steps=1)
    rows = table(trainer)
    has_room = not options
    assert (rows["sketch"] != "").any() == has_room == (trainer.state.log_history[0]["sketch/too_long"] == 0)
    for (drawn,), (_, row) in zip(trainer.mode.drawn, rows.iterrows(), strict=True):
        seen = make_tokenizer().decode(drawn.context)
        assert seen == (f"{row['sketch']} {row['prompt']}" if row["sketch"] else row["prompt"])


def test_candidates_are_numbered_as_in_their_list(tmp_path):
    trainer = train(SESATrainer, SESAConfig, tmp_path, **SKETCHES, mode="sequential", max_lists=1, max_steps=1)
    rows = table(trainer)
    for first in (0, 4):
        group = rows.iloc[first : first + 4]
        distinct = group.drop_duplicates("candidate")
        for number, completions in group.groupby("candidate")["completion"]:
            assert completions.nunique() == 1 and number < len(distinct)
    assert rows["candidate"].duplicated().any()


def test_agents_tell_the_proposals_that_they_took(tmp_path, monkeypatch):
    from test_sesa_agent import AGENT, Lake
    from test_sesa_agent import Voice as Proposing
    from world import make_agent

    speaker = Proposing(stops=0.0)
    says(speaker, monkeypatch.setattr)
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=200, max_steps=1)
    sizes |= dict(environment_factory=Lake, max_tool_calling_iterations=3, log_completions=True)
    trainer = make_agent(SESATrainer, SESAConfig, tmp_path, **AGENT, **sizes)
    trainer.train()
    for _, row in table(trainer).iterrows():
        said = [
            message["tool_calls"][0]["function"] for message in row["completion"] if message["role"] == "assistant"
        ]
        taken = row["actions"].split(";")
        assert 1 <= len(taken) <= 2  # at the first `branch_depth` turns
        arguments = [json.loads(call["arguments"]) for call in said[: len(taken)]]
        assert taken == [f"move(direction={given['direction']})" for given in arguments]


def test_tool_calls_with_any_arguments_are_written(tmp_path, monkeypatch):
    class Forgetful(Voice):
        def answer(self):
            return "!move"

    says(Forgetful(stops=0.0), monkeypatch.setattr)
    trainer = agent(tmp_path, log_completions=True, max_steps=1)
    trainer.train()
    calls = [row[0]["tool_calls"][0]["function"] for row in table(trainer)["completion"]]
    assert len(calls) >= 8 and all(call == {"name": "move", "arguments": "{}"} for call in calls)


def test_arguments_of_several_types_are_written_as_text(tmp_path):
    given = [{"n": 2}, {"n": "ä"}, {}, '{"n":[]}']
    calls = [{"type": "function", "function": {"name": "go", "arguments": arguments}} for arguments in given]
    rows = [
        [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": ""}] for call in calls
    ]
    file = tmp_path / "rows.parquet"
    pd.DataFrame({"completion": [with_written_arguments(row) for row in rows]}).to_parquet(file)
    found = [row[0]["tool_calls"][0]["function"]["arguments"] for row in pd.read_parquet(file)["completion"]]
    assert found == ['{"n": 2}', '{"n": "ä"}', "{}", '{"n":[]}']
    assert calls[0]["function"]["arguments"] == {"n": 2}  # what the trainer works with is left alone
    assert with_written_arguments("a text") == "a text"


def test_novelty_explains_the_shaped_reward(tmp_path):
    rows = table(train(G2RLTrainer, G2RLConfig, tmp_path, max_steps=1))
    for first in (0, 4):
        group = rows.iloc[first : first + 4]
        nu = group["novelty"]
        factor = 1 + (nu - nu.min()) / (nu.max() - nu.min())
        assert list(group["shaped_reward"]) == pytest.approx(list((2 * group["contains_answer"] - 1) * factor))
        assert list(group["advantage"]) == pytest.approx(list(normalised(group["shaped_reward"])), abs=1e-4)


@pytest.fixture(scope="module")
def branpo(tmp_path_factory):
    options = dict(log_completions=True, max_steps=1, num_branches=1, branch_depth=1, branch_depth_hard=2)
    with pytest.MonkeyPatch.context() as patch:
        says(Voice(0.3), patch.setattr)
        trainer = agent(tmp_path_factory.mktemp("branpo"), **options)
        trainer.train()
    return trainer


def test_trajectories_say_what_became_of_them_and_their_branches_follow(branpo):
    rows = table(branpo)
    main, branches = of_stream(rows, "main"), of_stream(rows, "branch")
    kept = main[main["branch"].isin(["contrastive", "redundant"])]
    assert 0 < len(kept) < 8 and list(branches["parent"]) == list(kept.index)
    assert list(main["turns"]) == [len(trajectory.turns) for trajectory in branpo.trajectories]
    assert list(main["branch_depth"].notna()) == list(main.index.isin(kept.index))
    for _, branch in branches.iterrows():
        parent = main.loc[int(branch["parent"])]
        assert branch["odd_steps"] == (1 - parent["odd_steps"] if parent["branch"] == "contrastive" else 1)
        trajectory = branpo.trajectories[int(branch["parent"])]
        left_at = trajectory.turns[int(parent["turns"] - parent["branch_depth"])]
        assert branch["prefix_tokens"] == left_at[0]
        before = [message for message in parent["completion"] if message["role"] == "assistant"]
        shared = int(parent["turns"] - parent["branch_depth"])
        after = [message for message in branch["completion"] if message["role"] == "assistant"]
        assert [str(message) for message in before[:shared]] == [str(message) for message in after[:shared]]


def test_a_branch_has_the_advantage_that_it_is_trained_with(branpo):
    # Only suffixes carry it, so it is that of the row's trained tokens.
    rows = table(branpo)
    written = of_stream(rows, "branch")["advantage"]
    _, _, steps = branpo.stream_training.prepared["branch"]
    trained = [value for parts in steps for part in parts for value in part["advantages"].tolist()]
    assert sorted(value for value in written if value) == pytest.approx(sorted(value for value in trained if value))


# --------------------------------------------------------------------------------- reward functions that share a name


def mentions(completions, digit, **columns):
    return [float(digit in completion) for completion in completions]


MENTIONS = [partial(mentions, digit="1"), partial(mentions, digit="2")]
EVALUATED = dict(eval_strategy="steps", per_device_eval_batch_size=4, num_generations_eval=2)


def rewards_in(rows, digit):
    return [float(digit in completion) for completion in rows["completion"]]


@pytest.mark.parametrize(
    "options", [dict(dynamic_sampling="refill"), {}, dict(dynamic_sampling="filter"), dict(budget="vip")], ids=str
)
def test_of_two_functions_of_one_name_the_table_has_the_second(tmp_path, options):
    options = dict(DEEP, branch_from="all", reward_funcs=MENTIONS, **EVALUATED, eval_steps=3, **options)
    options["eval_dataset"] = make_dataset().select(range(3))
    rows = table(train(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options))
    for stream in ("main", "aux", "eval"):
        own = of_stream(rows, stream)
        assert len(own) and own["mentions"].tolist() == rewards_in(own, "2") != rewards_in(own, "1")


def test_evaluation_before_training_has_a_table_with_one_reward_per_name(tmp_path):
    options = dict(SKETCHES, reward_funcs=MENTIONS, eval_dataset=make_dataset().select(range(6)))
    options |= dict(per_device_eval_batch_size=4, num_generations_eval=4, log_completions=True)
    trainer = make_trainer(SESATrainer, SESAConfig, tmp_path, **options)
    trainer.evaluate()
    rows = table(trainer, 0)
    assert len(rows) == 8 and set(rows["stream"]) == {"eval"}
    assert rows["mentions"].tolist() == rewards_in(rows, "2")  # the newest, as in TRL


def test_metrics_of_shaped_rewards_are_the_raw_ones_of_both_functions(tmp_path):
    options = dict(reward_funcs=MENTIONS, max_steps=1, success_threshold=0.5)
    log = train(G2RLTrainer, G2RLConfig, tmp_path, **options).state.log_history[0]
    rows = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    both = [sum(rewards_in(rows, digit)) / len(rows) for digit in "12"]
    assert log["rewards/mentions/mean"] == pytest.approx(sum(both) / 2) and log["shaped_reward"] != log["reward"]


# ------------------------------------------------------------------------------------------------------ evaluation


def test_rows_of_evaluation_stand_by_themselves_beside_those_of_training(tmp_path):
    evaluated = make_dataset().select(range(20, 23))
    options = dict(DEEP, eval_dataset=evaluated, **EVALUATED, eval_steps=2, max_steps=4)
    trainer = train(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **options)
    assert "eval" not in set(table(trainer, 1)["stream"]) | set(table(trainer, 3)["stream"])
    rows = table(trainer, 2)
    main, seen = of_stream(rows, "main"), of_stream(rows, "eval")
    assert len(main) == 8 and main["pivot_depth"].notna().any()
    assert sorted(seen["prompt"]) == sorted([*evaluated["prompt"], *evaluated["prompt"]])
    assert seen[["pivot_depth", "recovered", "parent", "prefix_tokens"]].isna().all(axis=None)
    answers = {row["prompt"]: row["answer"] for row in evaluated}
    for _, row in seen.iterrows():
        assert row["contains_answer"] == float(answers[row["prompt"]] in row["completion"])
    assert list(trainer._logs["prompt"]) == list(of_stream(table(trainer, 4), "main")["prompt"])


# ------------------------------------------------------------------------------------------------------ who is told


def test_nothing_is_kept_without_a_table_and_a_table_changes_no_parameter(deep, tmp_path):
    silent = make_trainer(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **DEEP)
    silent.completion_columns = lambda: pytest.fail("asked for without `log_completions`")
    silent.train()
    assert not silent._logs["extra"] and silent.table.streams == {}
    assert not (tmp_path / "completions").exists()
    for ours, theirs in zip(silent.model.parameters(), deep.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_columns_of_reward_functions_reach_all_rows_and_the_terminal_obeys_none(tmp_path, capsys, monkeypatch):
    def hostile(completions, answer, log_extra, **columns):
        log_extra("length", [len(completion) for completion in completions])
        log_extra("from\x1b[31mfile", ["\x1b]0;title\x07 \u202etxt"] * len(completions))
        return contains_answer(completions, answer)

    monkeypatch.setenv("COLUMNS", "240")
    rows = table(train(DeepGRPOTrainer, DeepGRPOConfig, tmp_path, **DEEP, reward_funcs=hostile, max_steps=1))
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(printed)
    assert r"from\x1b[31mfile" in printed and r"\x1b]0;title\x07 \u202etxt" in printed
    assert len(rows) > 8 and list(rows["length"]) == [len(completion) for completion in rows["completion"]]
    assert rows["from\x1b[31mfile"][0] == "\x1b]0;title\x07 \u202etxt"  # the file keeps what was logged


@pytest.mark.parametrize("arguments", [[1, "a"], "north", "[1]", None])
def test_tool_calls_without_named_arguments_are_printed(capsys, arguments):
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    with printed_visibly():
        vars(grpo_trainer)["print_prompt_completions_sample"](
            ["p"], [[{"role": "assistant", "content": "", "tool_calls": [call]}]], {"r": [1.0]}, [0.5], 3, None
        )
    assert f"find({arguments})" in capsys.readouterr().out


def test_messages_with_tool_calls_are_printed_with_their_escapes_visible(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    call = {
        "type": "function",
        "function": {"name": "find\x9b", "arguments": '{"text": "\\u001b[1m", "\\u001bk": "\x7f"}'},
    }
    completion = [
        {"role": "assistant", "content": "a\x1b[2J", "tool_calls": [call]},
        {"role": "tool", "name": "find", "content": [{"type": "text", "text": "b\rc"}]},
    ]
    with printed_visibly():
        vars(grpo_trainer)["print_prompt_completions_sample"](["p\x08"], [completion], {"r": [1.0]}, [0.5], 3, None)
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\x7f", "\x08", "\r"} & set(printed)
    for seen in (r"p\x08", r"a\x1b[2J", r"b\rc", r"find\x9b(text='\\x1b[1m', \x1bk='\\x7f')", "0.50"):
        assert seen in printed


def test_the_terminal_shows_prompt_and_completion_in_full_below_a_line_of_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prompts, completions = ["How many? " * 20, "q"], ["one two three " * 12, "[bold]b[/bold]"]
    print_rows(prompts, completions, {"right": [1.0, 0.0]}, [0.5, -0.5], 7, extra={"origin": ["search", None]})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "Step 7" in lines[0]
    assert lines[1] == "row 0 · origin search · right 1.00 · advantage 0.50"
    assert "row 1 · right 0.00 · advantage -0.50" in lines
    printed = " ".join(" ".join(lines).split())
    assert prompts[0].strip() in printed and completions[0].strip() in printed and "[bold]b[/bold]" in printed


def test_the_shared_prefix_of_a_branch_is_dim(deep, capsys, monkeypatch):
    rows = table(deep)
    branches = of_stream(rows, "aux")
    for _, branch in branches.iterrows():
        parent = rows.loc[int(branch["parent"]), "completion"]
        cut = int(branch["prefix_characters"])
        assert branch["completion"][:cut] == parent[:cut] and cut >= branch["prefix_tokens"] - 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_rows(["p"], ["shared own"], {"r": [1.0]}, [0.0], 1, extra={"prefix_characters": [7.0]})
    chat = [{"role": "assistant", "content": "shared own"}]
    print_rows(["p"], [chat], {"r": [1.0]}, [0.0], 1, extra={"prefix_characters": [7.0]})
    printed = capsys.readouterr().out
    assert printed.count("\x1b[2;32mshared ") == 2 and "prefix_characters" not in printed

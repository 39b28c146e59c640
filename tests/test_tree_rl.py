"""TreeRL: reductions to GRPO, which tokens are forked, what is sampled and trained, resume, and its errors."""

import json
import math
import re

import pandas as pd
import pytest
import torch
from commands import TINY_RUN, as_flags, run_example
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from world import (
    always,
    assert_same,
    contains_answer,
    differ,
    make_tokenizer,
    make_trainer,
    never,
    one_batch,
    parameters,
    saved_model,
    some_letter,
    trained,
)

from trl_explore.chains.leaves import chain_of, completion
from trl_explore.chains.values import token_advantages
from trl_explore.forks.engine import Forks
from trl_explore.rows.streams import row_tokens
from trl_explore.trainers import TreeRLConfig, TreeRLTrainer

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
SETTINGS = {
    "plain": {},
    "two iterations": dict(num_iterations=2, max_steps=4),
    "generation longer than accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "lora, beta": dict(peft_config=LORA, beta=0.1),
    "conversational": dict(conversational=True),
    "two rewards": dict(reward_funcs=[contains_answer, some_letter], reward_weights=[1.0, 0.5]),
    "truncated ones masked": dict(mask_truncated_completions=True),
}


class Seen(TreeRLTrainer):
    """Keeps what it made of a batch."""

    def extra_streams(self, output, examples, rewards):
        self.streams_of_batch = super().extra_streams(output, examples, rewards)
        return self.streams_of_batch


def batch(folder, **options):
    trainer = make_trainer(Seen, TreeRLConfig, folder, **options)
    return trainer, one_batch(trainer)


def branches(tree):
    return [(i, leaf) for i, leaf in enumerate(tree.leaves) if leaf.parent is not None]


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_without_rounds_it_is_grpo_bit_for_bit(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(TreeRLTrainer, TreeRLConfig, tmp_path, num_rounds=0, **options)
    assert_same(got, expected)
    assert not any(key.startswith("branch") for entry in log for key in entry)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SETTINGS["two iterations"], SETTINGS["lora, beta"]], ids=["iterations", "lora"])
def test_forks_change_what_is_learned(tmp_path, options):
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **options)
    got, log = trained(TreeRLTrainer, TreeRLConfig, tmp_path, **options)
    assert differ(got, expected) and all(value.isfinite().all() for value in got.values())
    assert log[0]["branch/sampled_tokens"] > 0 and log[0]["branch/uncertainty"] > 0


def test_forking_leaves_the_next_batch_of_main_rows_as_it_is(tmp_path):
    batch(tmp_path)
    after = torch.get_rng_state()
    one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("reward", [never, always])
def test_where_all_leaves_are_alike_nothing_is_learned(tmp_path, reward):
    trainer, output = batch(tmp_path, reward_funcs=reward)
    assert not output["advantages"].any()
    assert not trainer.streams_of_batch["branch"][0].rows["advantages"].any()


@pytest.mark.parametrize("options", [{}, dict(num_iterations=2)], ids=["own pass", "old log-probabilities"])
def test_chains_are_forked_at_their_least_likely_tokens(tmp_path, options):
    trainer, output = batch(tmp_path, **options)
    prompts, completions = row_tokens(output)
    for tree in trainer.branch_explorer.trees:
        for chain in range(4):
            row = tree.row + chain
            ids = torch.tensor([prompts[row] + completions[row]])
            logprobs = trainer.model(ids).logits[0, len(prompts[row]) - 1 : -1].log_softmax(dim=-1)
            own = logprobs[range(len(completions[row])), completions[row]]
            found = {leaf.start for _, leaf in branches(tree) if leaf.parent == chain}
            assert found == set(own.argsort()[:2].tolist())


def test_every_fork_is_continued_as_often_as_asked_from_the_tokens_before_it(tmp_path):
    trainer, _ = batch(tmp_path, num_forks=3, branches_per_fork=2)
    for tree in trainer.branch_explorer.trees:
        assert [leaf.parent for leaf in tree.leaves[:4]] == [None] * 4
        forks = [(leaf.parent, leaf.start) for _, leaf in branches(tree)]
        assert all(forks.count(fork) == 2 for fork in forks)
        for chain in range(4):
            assert len({fork for fork in forks if fork[0] == chain}) == min(3, tree.leaves[chain].length)
        assert all(leaf.length <= 8 for leaf in tree.leaves)


def test_a_round_is_one_call_for_all_trees_and_later_rounds_fork_branches_too(tmp_path, monkeypatch):
    calls = []
    sample_branches = Forks.sample_branches
    monkeypatch.setattr(
        Forks, "sample_branches", lambda self, forks: calls.append(len(forks)) or sample_branches(self, forks)
    )
    trainer, _ = batch(tmp_path, num_rounds=3, num_forks=1)
    assert len(calls) == 3 and all(number > 4 for number in calls)
    deep = [leaf for tree in trainer.branch_explorer.trees for _, leaf in branches(tree) if leaf.parent >= 4]
    assert deep and all(leaf.start > trainer.branch_explorer.trees[0].leaves[0].start for leaf in deep)
    for tree in trainer.branch_explorer.trees:
        for _, leaf in branches(tree):
            assert leaf.start != tree.leaves[leaf.parent].start or tree.leaves[leaf.parent].parent is None
        forks = [(leaf.parent, leaf.start) for _, leaf in branches(tree)]
        assert all(forks.count(fork) == 2 for fork in forks)


def test_the_control_forks_anywhere_and_needs_no_probabilities(tmp_path):
    trainer, _ = batch(tmp_path, fork_selection="random", num_rounds=2)
    assert all(leaf.logprobs is None for tree in trainer.branch_explorer.trees for leaf in tree.leaves)
    assert sum(len(tree.leaves) for tree in trainer.branch_explorer.trees) > 8


def test_nothing_is_forked_behind_the_answer(tmp_path):
    texts = [*"0123456789"]
    trainer, _ = batch(tmp_path, fork_until=texts, num_forks=8)
    for tree in trainer.branch_explorer.trees:
        for chain, leaf in enumerate(tree.leaves[:4]):
            said = make_tokenizer().convert_ids_to_tokens(leaf.token_ids)
            first = next((i for i, token in enumerate(said) if token in texts), 8)
            forks = {other.start for _, other in branches(tree) if other.parent == chain}
            assert forks == set(range(min(first + 1, leaf.length)))


def test_completions_that_are_cut_off_are_not_forked_where_they_are_not_trained(tmp_path):
    trainer, output = batch(tmp_path, mask_truncated_completions=True)
    for tree in trainer.branch_explorer.trees:
        for chain in range(4):
            left = any(leaf.parent == chain for _, leaf in branches(tree))
            assert left == bool(output["completion_mask"][tree.row + chain].any())


def test_every_completion_is_asked_about_once(tmp_path):
    asked = []

    def noting(completion_ids, completions, answer, **columns):
        asked.extend(completion_ids)
        return contains_answer(completions, answer)

    trainer, output = batch(tmp_path, reward_funcs=noting)
    leaves = [completion(tree.leaves, i) for tree in trainer.branch_explorer.trees for i in range(len(tree.leaves))]
    assert sorted(asked) == sorted(leaves) and len(leaves) > len(output["advantages"])


@pytest.mark.parametrize("options", [{}, dict(num_rounds=2), dict(trained_leaves=6)], ids=str)
def test_main_rows_and_branches_have_the_advantages_of_their_tree(tmp_path, options):
    trainer, output = batch(tmp_path, **options)
    scored, weight = trainer.streams_of_batch["branch"]
    rows = [(tree, i) for tree in trainer.branch_explorer.trees for i in tree.trained if i >= 4]
    assert weight is None and len(scored.rewards) == len(rows)
    found = {"main": output, "branch": scored.rows}
    places = {"main": [(tree, i) for tree in trainer.branch_explorer.trees for i in range(4)], "branch": rows}
    for name in found:
        ids = row_tokens(found[name])[1]
        for place, (tree, i) in enumerate(places[name]):
            assert ids[place] == completion(tree.leaves, i)
            expected = token_advantages(tree.leaves, tree.trained)[i]
            assert found[name]["advantages"][place, : len(expected)].tolist() == pytest.approx(expected)
            assert not found[name]["advantages"][place, len(expected) :].any()
    assert scored.rows["completion_mask"].sum() == sum(tree.leaves[i].length for tree, i in rows)  # prefixes too
    assert output["advantages"].std(dim=1).max() > 0
    # Branches and main rows are one mean.
    _, totals, _ = trainer.stream_training.prepared["branch"]
    assert totals.num_rows == len(output["advantages"]) + len(rows) == trainer.stream_training.main_totals.num_rows
    # So many leaves are trained, all chains among them.
    assert all(tree.trained[:4] == [0, 1, 2, 3] for tree in trainer.branch_explorer.trees)
    numbers = [options.get("trained_leaves", len(tree.leaves)) for tree in trainer.branch_explorer.trees]
    assert [len(tree.trained) for tree in trainer.branch_explorer.trees] == numbers
    assert (trainer._metrics["train"]["branch/trained_fraction"][0] < 1) == ("trained_leaves" in options)


@pytest.mark.parametrize("options", [{}, dict(trained_leaves=5)], ids=str)
def test_leaves_that_are_masked_count_nowhere(tmp_path, options):
    trainer, output = batch(tmp_path, mask_truncated_completions=True, fork_until=[], **options)
    scored, _ = trainer.streams_of_batch["branch"]
    assert scored.rows["completion_mask"].any(dim=1).all()
    num_branches = 0
    for tree in trainer.branch_explorer.trees:
        chains = [i for i in range(4) if output["completion_mask"][tree.row + i].any()]
        assert [i for i in tree.trained if i < 4] == chains
        num_branches += len(tree.trained) - len(chains)
    assert 0 < num_branches == len(scored.rewards) < sum(len(branches(tree)) for tree in trainer.branch_explorer.trees)


def test_only_chains_may_be_trained(tmp_path):
    trainer, output = batch(tmp_path, trained_leaves=4)
    assert trainer.streams_of_batch == {} and output["advantages"].dim() == 2
    for tree in trainer.branch_explorer.trees:
        expected = token_advantages(tree.leaves, range(4))[0]
        assert output["advantages"][tree.row, : len(expected)].tolist() == pytest.approx(expected)


def test_unscorable_rows_have_no_advantage_and_count_nowhere(tmp_path):
    def some(completion_ids, **columns):
        return [None if len(ids) % 2 else float(ids[0] % 2) for ids in completion_ids]

    trainer, output = batch(tmp_path, reward_funcs=some, max_completion_length=5)
    unscored = [leaf for tree in trainer.branch_explorer.trees for leaf in tree.leaves if math.isnan(leaf.reward)]
    assert unscored and output["advantages"].isfinite().all()
    for tree in trainer.branch_explorer.trees:
        for chain in range(4):
            assert not (math.isnan(tree.leaves[chain].reward) and output["advantages"][tree.row + chain].any())


def test_solved_prompts_are_grpos_where_only_the_unsolved_are_explored(tmp_path):
    def odd_solved(completions, answer, **columns):
        return [float(int(a) % 2 and len(c) % 3 > 0) for a, c in zip(answer, completions, strict=True)]

    options = dict(reward_funcs=odd_solved, per_device_train_batch_size=16)
    trainer, output = batch(tmp_path, explore_prompts="unsolved", **options)
    expected = one_batch(make_trainer(GRPOTrainer, GRPOConfig, tmp_path, **options))
    solved = trainer.scorer.totals().view(-1, 4).amax(dim=1).repeat_interleave(4) > 0
    assert 0 < solved.sum() < 16
    assert [tree.row for tree in trainer.branch_explorer.trees] == (~solved).nonzero().squeeze(1)[::4].tolist()
    assert torch.equal(output["advantages"][solved][:, 0], expected["advantages"][solved])


def test_it_generates_and_trains_what_the_formula_of_the_readme_says(tmp_path):
    trainer, output = batch(tmp_path, num_rounds=2)
    found = {name: values[0] for name, values in trainer._metrics["train"].items()}
    trees = trainer.branch_explorer.trees
    forks = [{(leaf.parent, leaf.start) for _, leaf in branches(tree)} for tree in trees]
    assert found["branch/forks"] == sum(map(len, forks))
    generated = found["branch/forks"] * 2 * found["branch/mean_suffix_length"]
    assert generated == pytest.approx(sum(len(leaf.token_ids) for tree in trees for _, leaf in branches(tree)))
    assert found["branch/sampled_tokens"] == pytest.approx(generated)
    rows = sum(len(branches(tree)) for tree in trees)
    trained_tokens = output["completion_mask"].sum() + rows * found["branch/completions/mean_length"]
    assert trainer.stream_training.main_totals.num_tokens == pytest.approx(float(trained_tokens))


def test_the_table_says_where_branches_left_and_what_their_trees_are_worth(tmp_path):
    trainer = make_trainer(TreeRLTrainer, TreeRLConfig, tmp_path, log_completions=True, max_steps=1, num_rounds=2)
    trainer.train()
    rows = pd.read_parquet(next((tmp_path / "completions").iterdir()))
    main, found = rows[rows["stream"] == "main"], rows[rows["stream"] == "branch"]
    leaves = [(tree, i) for tree in trainer.branch_explorer.trees for i, _ in branches(tree)]
    assert list(found["parent"]) == [tree.row + chain_of(tree.leaves, i) for tree, i in leaves]
    for (_, row), (tree, i) in zip(found.iterrows(), leaves, strict=True):
        chain, own = tree.leaves[chain_of(tree.leaves, i)].token_ids, completion(tree.leaves, i)
        shared = int(row["prefix_tokens"])
        assert own[:shared] == chain[:shared] and shared <= tree.leaves[i].start
    assert list(main["branches"]) == [list(found["parent"]).count(row) for row in range(8)]
    for tree in trainer.branch_explorer.trees:
        mean = sum(leaf.reward for leaf in tree.leaves) / len(tree.leaves)
        assert list(main["tree_value"][tree.row : tree.row + 4]) == pytest.approx([mean] * 4)


@pytest.mark.parametrize("options", [dict(fork_selection="random"), dict(trained_leaves=6, num_rounds=2)], ids=str)
def test_it_resumes_bit_for_bit_in_the_middle_of_a_generation(tmp_path, options):
    options = dict(options, num_iterations=2, steps_per_generation=2, max_steps=5)
    whole = make_trainer(TreeRLTrainer, TreeRLConfig, tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    again = make_trainer(TreeRLTrainer, TreeRLConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(parameters(again), parameters(whole))


def test_evaluation_is_plain(tmp_path):
    data = make_trainer(GRPOTrainer, GRPOConfig, tmp_path).train_dataset.select(range(4))
    trainer = make_trainer(TreeRLTrainer, TreeRLConfig, tmp_path, eval_dataset=data, num_generations_eval=4)
    state = trainer.exploration_generator.get_state()
    metrics = trainer.evaluate()
    assert not any("branch" in name for name in metrics) and trainer.branch_explorer.trees == []
    assert torch.equal(trainer.exploration_generator.get_state(), state)


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path, monkeypatch):
    rows = [{"question": f"{i}+{i}=", "answer": f"so\n#### {2 * i % 10}"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {**TINY_RUN, "dataset_name": "data.jsonl", "model_name_or_path": saved_model(), "num_generations": None}
    fields |= {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_completion_length": 8}
    run_example("tree_rl.py", *as_flags({**fields, "max_steps": 1}), folder=tmp_path, monkeypatch=monkeypatch)
    logged = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"]
    assert logged[0]["branch/forks"] == 2 * 12 and logged[0]["branch/trained_fraction"] == 10 / 24


REFUSED = {
    "`num_rounds=-1` must be at least 0; 0 is GRPO": dict(num_rounds=-1),
    "`num_forks=0` must be at least 1": dict(num_forks=0),
    "`branches_per_fork=0` must be at least 1": dict(branches_per_fork=0),
    "`fork_selection`: unknown value 'uncertan'; did you mean 'uncertain'?": dict(fork_selection="uncertan"),
    "`fork_until=['']` must hold no empty text": dict(fork_until=[""]),
    "`trained_leaves=3` is less than the `num_generations=4` chains": dict(trained_leaves=3),
    "`success_threshold=nan` must be a finite number": dict(success_threshold=math.nan),
    "`branches_per_fork=100000` can sample": dict(branches_per_fork=100_000),
    "`advantage='maxrl'` has no effect, because the values of a tree are the advantages": dict(advantage="maxrl"),
    "`count_bonus=0.5` has no effect": dict(count_bonus=0.5),
    "`multi_objective_aggregation='normalize_then_sum'` has no meaning for a tree": dict(
        multi_objective_aggregation="normalize_then_sum"
    ),
    "`budget='vip'` gives prompts unequally many rows": dict(budget="vip"),
}


def test_a_group_whose_branches_differ_is_not_removed(tmp_path):
    calls = []

    def branches_differ(completions, **columns):
        """The chains fail. They are scored before their branches, in calls of their own."""
        calls.append(len(completions))
        return [float(place % 2) if len(calls) % 2 == 0 else 0.0 for place in range(len(completions))]

    options = dict(reward_funcs=branches_differ, max_steps=1)
    expected, _ = trained(TreeRLTrainer, TreeRLConfig, tmp_path, **options)
    calls.clear()
    found, log = trained(TreeRLTrainer, TreeRLConfig, tmp_path, dynamic_sampling="filter", **options)
    assert log[0]["selection/kept_groups"] == 1.0
    assert_same(found, expected)


@pytest.mark.parametrize("message, options", REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_at_construction(tmp_path, message, options):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_trainer(TreeRLTrainer, TreeRLConfig, tmp_path, **options)
    assert "\n" not in str(error.value)

"""`explore_prompts`: only prompts that GRPO's own samples do not solve are searched, sketched or branched."""

import math
import re

import pandas as pd
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from world import (
    TINY,
    always,
    assert_same,
    contains_answer,
    differ,
    make_trainer,
    never,
    one_batch,
    parameters,
    trained,
)

from trl_explore.methods import METHODS
from trl_explore.selection.choice import share_at
from trl_explore.trainers import SESAConfig


def method(name, **options):
    return METHODS[name].trainer_class, METHODS[name].config_class, options


TREES = dict(expansion_width=3, node_length=2, epsilon_high=None)
OWN_ROWS = {
    "tree": method("tree_grpo", **TREES),
    "tree with shared prefixes": method("tree_grpo", **TREES, share_prefix_once=True),
    "sketches": method("sesa", max_sketch_length=4),
    "weighted sketches": method("sesa", max_sketch_length=4, off_policy_correction=True),
    "lists": method("sesa", mode="sequential"),
}
BRANCHES = {
    "deep": method("deep_grpo", num_branches=3, segmentation="fixed", segment_length=2),
    "branpo": method("branpo"),
    "agents": method("agent_tree_grpo"),
    "forks": method("tree_rl"),
    "steps": method("attn_rl", **TINY["attn_rl"].options),
}
ALL = {**OWN_ROWS, **BRANCHES}
UNSOLVED = dict(explore_prompts="unsolved")


def odd_solved(completions, answer, **kwargs):
    """Sums with an odd answer are solved, more or less often, whatever is said; the others never."""
    return [float(int(a) % 2 and len(c) % 3 > 0) for a, c in zip(answer, completions, strict=True)]


def odd_groups(trainer):
    """Whether each main row's group was solved, by `odd_solved`'s rewards."""
    return trainer.scorer.totals().view(-1, 4).amax(dim=1).repeat_interleave(4) > 0


def batch(case, folder, **options):
    trainer_class, config_class, own = ALL[case]
    trainer = make_trainer(trainer_class, config_class, folder, **{**own, **options})
    return trainer, one_batch(trainer)


@pytest.mark.parametrize("case", ALL)
def test_where_everything_is_solved_it_is_grpo(tmp_path, case):
    trainer_class, config_class, own = ALL[case]
    options = dict(reward_funcs=[contains_answer, always], success_reward="always", **UNSOLVED)
    if "tree" in case:
        options["success_threshold"] = 1.0
    found, log = trained(trainer_class, config_class, tmp_path, **own, **options)
    plain = {name: value for name, value in options.items() if name == "reward_funcs"}
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, **plain)
    assert_same(found, expected)
    assert all(entry["explore_share"] == 0 for entry in log if "reward" in entry)


@pytest.mark.parametrize("case", ALL)
def test_where_nothing_is_solved_all_are_explored(tmp_path, case):
    trainer_class, config_class, own = ALL[case]
    _, log = trained(trainer_class, config_class, tmp_path, reward_funcs=never, max_steps=1, **own, **UNSOLVED)
    assert log[0]["explore_share"] == 1


@pytest.fixture(scope="module")
def of_grpo(tmp_path_factory):
    """A batch of GRPO, and the random state behind it."""
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo"), reward_funcs=odd_solved)
    return one_batch(trainer), torch.get_rng_state()


@pytest.mark.parametrize("case", OWN_ROWS)
def test_solved_groups_have_the_rows_and_advantages_of_grpo(tmp_path, case, of_grpo):
    trainer, output = batch(case, tmp_path, reward_funcs=odd_solved, **UNSOLVED)
    expected, state = of_grpo
    assert torch.equal(state, torch.get_rng_state())  # the next batch of the plain stream is as it was
    solved = odd_groups(trainer)
    assert 0 < solved.sum() < len(solved)
    width = expected["completion_ids"].shape[1]
    assert torch.equal(output["completion_ids"][solved][:, :width], expected["completion_ids"][solved])
    own = output["advantages"] if output["advantages"].dim() == 2 else output["advantages"][:, None]
    assert torch.equal(own[solved][:, 0], expected["advantages"][solved])
    assert not torch.equal(output["completion_ids"][~solved][:, :width], expected["completion_ids"][~solved])


def test_unsolved_groups_have_the_credit_of_their_tree(tmp_path):
    trainer, output = batch("tree", tmp_path, skip_uniform_trees=False, incomplete_score=-0.5, **UNSOLVED)
    solved = ~torch.zeros(len(output["advantages"]), dtype=torch.bool).index_fill(
        0, torch.tensor(trainer.exploration.batch.rows), 1
    )
    rows = [row for tree in trainer.explorer.trees for row in tree.rows]
    assert len(rows) == len(trainer.exploration.batch.rows) == int((~solved).sum()) > 0
    assert output["advantages"][~solved].std(dim=1).max() > 0  # tokens of one row differ in a tree


@pytest.mark.parametrize("case", OWN_ROWS)
def test_every_row_is_asked_about_once(tmp_path, case):
    asked = []

    def noting(completions, answer, log_extra=None, **kwargs):
        asked.extend(answer)
        log_extra("said", [len(c) for c in completions])
        return odd_solved(completions, answer)

    trainer, output = batch(case, tmp_path, reward_funcs=noting, log_completions=True, **UNSOLVED)
    explored = len(trainer.exploration.batch.rows)
    extra = sum(len(tree.nodes) for tree in trainer.explorer.trees) if "tree" in case else explored
    assert len(output["advantages"]) < len(asked) <= len(output["advantages"]) + extra
    assert len(trainer._logs["extra"]["said"]) == len(output["advantages"])


@pytest.mark.parametrize("case", OWN_ROWS)
def test_rows_may_join_the_failed_group(tmp_path, case, of_grpo):
    trainer, output = batch(case, tmp_path, reward_funcs=odd_solved, explore_into="add", **UNSOLVED)
    assert torch.equal(output["completion_ids"], of_grpo[0]["completion_ids"])
    weight, totals, steps = trainer.stream_training.prepared["explored"]
    assert weight == 1.0 and totals.num_rows == len(output["advantages"]) + int((~odd_groups(trainer)).sum())


@pytest.mark.parametrize("into", ["replace", "add"])
@pytest.mark.parametrize("case", ALL)
def test_it_trains_and_resumes_where_it_was(tmp_path, case, into):
    trainer_class, config_class, own = ALL[case]
    options = dict(max_steps=4, log_completions=True, num_completions_to_print=0, explore_into=into, **UNSOLVED)
    saving = dict(save_strategy="steps", save_steps=2)
    whole = make_trainer(trainer_class, config_class, tmp_path / "whole", **own, **options, **saving)
    whole.train()
    start = parameters(make_trainer(trainer_class, config_class, tmp_path / "start", **own))
    assert differ(parameters(whole), start)
    again = make_trainer(trainer_class, config_class, tmp_path / "whole", **own, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(parameters(again), parameters(whole))
    for path in (tmp_path / "whole" / "completions").iterdir():
        table = pd.read_parquet(path)
        assert table["prompt"].notna().all()


class Noting:
    """Rewards of `odd_solved`, and how many tokens each call was asked about."""

    __name__ = "noting"

    def __init__(self):
        self.tokens = []

    def __call__(self, completion_ids, answer, **columns):
        self.tokens.append(sum(map(len, completion_ids)))
        return odd_solved(completion_ids, answer)


@pytest.mark.parametrize("into", ["replace", "add"])
@pytest.mark.parametrize("case", ["tree", "sketches", "lists"])
def test_a_comparison_pays_for_what_was_sampled_first(tmp_path, case, into):
    trainer_class, config_class, own = OWN_ROWS[case]
    noting = Noting()
    options = dict(reward_funcs=noting, max_steps=1, explore_into=into, **UNSOLVED)
    _, log = trained(trainer_class, config_class, tmp_path, **own, **options)
    assert log[0]["explore/plain_tokens"] == noting.tokens[0]
    method_tokens = log[0].get("tree/sampled_tokens", log[0].get("sketch/sampled_tokens"))
    assert log[0]["generation/sampled_tokens"] == noting.tokens[0] + method_tokens


def test_the_table_tells_which_rows_were_explored(tmp_path):
    options = dict(reward_funcs=odd_solved, log_completions=True, num_completions_to_print=0, max_steps=1, **UNSOLVED)
    trainer_class, config_class, own = OWN_ROWS["tree"]
    trainer = make_trainer(trainer_class, config_class, tmp_path, **own, **options)
    trainer.train()
    (path,) = (tmp_path / "completions").iterdir()
    table = pd.read_parquet(path)
    solved = table.groupby(table.index // 4)["odd_solved"].transform("max") > 0
    assert set(table["origin"][solved]) == {"plain"} and "plain" not in set(table["origin"][~solved])


@pytest.mark.parametrize("progress, end, share", [(0.0, 0.2, 1.0), (0.5, 0.2, 0.6), (1.0, 0.2, 0.2), (2.0, 0.0, 0.0)])
def test_the_share_falls_linearly(progress, end, share):
    assert math.isclose(share_at(progress, end), share)


@pytest.mark.parametrize("case", ["tree", "lists", "deep", "agents"])
def test_a_falling_share_explores_fewer_prompts(tmp_path, case):
    trainer_class, config_class, own = ALL[case]
    _, log = trained(
        trainer_class, config_class, tmp_path, reward_funcs=never, max_steps=6, explore_share_end=0.0, **own
    )
    shares = [entry["explore_share"] for entry in log if "reward" in entry]
    assert shares[0] == 1.0 and sum(shares[3:]) < sum(shares[:3])


@pytest.mark.parametrize("case", ["tree", "sketches", "lists"])
def test_prompts_that_are_drawn_cost_no_plain_samples(tmp_path, case):
    trainer_class, config_class, own = OWN_ROWS[case]
    noting = Noting()
    options = dict(reward_funcs=noting, max_steps=4, explore_share_end=0.0, per_device_train_batch_size=16)
    _, log = trained(trainer_class, config_class, tmp_path, **own, **options)
    steps = [entry for entry in log if "reward" in entry]
    first, some = steps[0], [entry for entry in steps if 0 < entry["explore_share"] < 1]
    assert first["explore_share"] == 1 and first["explore/plain_tokens"] == 0
    assert some
    totals = {entry["step"]: entry["generation/sampled_tokens"] for entry in steps}
    for entry in some:
        kept = (1 - entry["explore_share"]) * 16
        assert entry["explore/plain_tokens"] in noting.tokens and 0 < entry["explore/plain_tokens"] <= 8 * kept
        method_tokens = entry.get("tree/sampled_tokens", entry.get("sketch/sampled_tokens"))
        sampled = totals[entry["step"]] - totals[entry["step"] - 1]
        assert sampled == entry["explore/plain_tokens"] + method_tokens


@pytest.mark.parametrize("name", ["exploration", "g2rl"])
@pytest.mark.parametrize("field, value", [("explore_prompts", "unsolved"), ("explore_share_end", 0.5)])
def test_what_explores_nothing_says_so(tmp_path, name, field, value):
    trainer_class, config_class, _ = method(name)
    with pytest.raises(ValueError, match=rf"`{field}={value!r}` chooses prompts to search, sketch or branch"):
        make_trainer(trainer_class, config_class, tmp_path, **{field: value})


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(explore_prompts="failed"), "`explore_prompts`"),
        (dict(explore_into="both"), "`explore_into`"),
        (dict(explore_share_end=1.5), "`explore_share_end=1.5` must be in [0, 1]"),
        (dict(mode="agent", **UNSOLVED), "`explore_prompts='unsolved'` chooses prompts after their trajectories"),
    ],
)
def test_bad_values_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SESAConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_every_method_that_explores_takes_it():
    # The others sample as GRPO does, and refuse it.
    own = {row.name for row in METHODS.values() if not row.plain and row.trainer_class.requires.samples}
    assert own == {case[0].method for case in ALL.values()}

"""The trainer that chooses: estimates, the choice, hints, replay, and what it refuses."""

import pytest
from trl import GRPOConfig, GRPOTrainer
from world import always, assert_same, make_trainer, never, one_batch, trained

from trl_explore.trainers import AutoExploreConfig, AutoExploreTrainer


@pytest.mark.parametrize("name", ["tree", "pivots", "sketches", "resample"])
def test_each_explorer_adds_rows_for_unsolved_prompts(name, tmp_path):
    options = {"tree": dict(node_length=2), "pivots": dict(segmentation="fixed", segment_length=2)}
    trainer = make_trainer(
        AutoExploreTrainer,
        AutoExploreConfig,
        tmp_path,
        reward_funcs=never,
        explorers=[name],
        explore_min_share=1.0,
        explorer_options={name: options.get(name, {})},
    )
    one_batch(trainer)
    (found,) = trainer.branching.found
    assert found.explorer is trainer.branch_explorer.explorers[name]
    assert len(found.branches.rows) >= 4 and found.num_tokens > 0
    assert trainer.branch_explorer.estimates.sums[name].tokens >= found.num_tokens


def test_solved_prompts_are_not_explored(tmp_path):
    found, _ = trained(AutoExploreTrainer, AutoExploreConfig, tmp_path, reward_funcs=always, explore_min_share=1.0)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=always)
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"tree": {"expansion_width": 2}', "must be a dictionary by explorer"),
        ("[1]", "must be a dictionary by explorer"),
        ([1], "must be a dictionary by explorer"),
        ('{"tree": 2}', r"`explorer_options\['tree'\]` is 2: give a dictionary"),
    ],
)
def test_options_that_are_no_dictionaries_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AutoExploreConfig("out", use_cpu=True, bf16=False, explorer_options=options)


def test_options_of_explorers_may_be_json_as_on_the_command_line():
    text = '{"tree": {"expansion_width": 2}}'
    config = AutoExploreConfig("out", use_cpu=True, bf16=False, explorer_options=text)
    assert config.explorer_options == {"tree": {"expansion_width": 2}}

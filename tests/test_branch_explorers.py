"""Branch explorers: one of a user's own, its credit, and what the trainer checks of its result."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import EXAMPLES
from test_branpo import Voice, says
from test_branpo import make as make_agent_of
from trl import GRPOConfig, GRPOTrainer
from world import always, assert_same, make_trainer, never, one_batch, parameters, tiny_methods, trained

from trl_explore.explorers.branch_checks import checked_branches
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer
from trl_explore.explorers.branching import Branching
from trl_explore.explorers.explorer import Explorer
from trl_explore.explorers.resample import ResampleExplorer
from trl_explore.forks.trajectories import Fork, Trajectory
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import loss_mask
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer
from trl_explore.trainers.requires import Requires

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(EXAMPLES))
    RetryTrainer = importlib.import_module("own_branches").RetryTrainer


class OneBranchEach(BranchExplorer):
    """Adds one branch from the root of each completion. `changes` are further arguments of `Branches`."""

    name = "one each"
    changes: dict = {}

    def explore(self, groups):
        forks = []
        for group in groups:
            for trajectory in group.trajectories:
                forks.append(Fork(trajectory, turn=0, number=1))
        self.sampled = self.forks.sample_branches(forks)
        rows = self.forks.rows(self.sampled, group_size=1, trains_prefixes=False)
        return Branches(rows, **self.changes)


class OneEach(ExplorationTrainer):
    def make_branch_explorer(self):
        return OneBranchEach(self, self.make_forks(), self.scorer)


def of(changes):
    """A trainer class whose explorer returns these further arguments of `Branches`."""

    class Changed(OneEach):
        def make_branch_explorer(self):
            explorer = super().make_branch_explorer()
            explorer.changes = changes
            return explorer

    return Changed


def test_if_no_completion_fails_it_is_grpo_bit_for_bit(tmp_path):
    found, _ = trained(RetryTrainer, ExplorationConfig, tmp_path, reward_funcs=always)
    expected, _ = trained(GRPOTrainer, GRPOConfig, tmp_path, reward_funcs=always)
    assert_same(found, expected)


def test_branches_keep_a_half_of_a_failed_completion_and_train_the_rest(tmp_path):
    trainer = make_trainer(RetryTrainer, ExplorationConfig, tmp_path, reward_funcs=never)
    one_batch(trainer)
    scored, forks = trainer.branching.results[0].scored, trainer.branch_explorer.forks
    assert len(scored.rewards) == 4 * len(forks.trajectories) == 32
    masks = loss_mask(scored.rows)
    for row, ids in enumerate(scored.rows["completion_ids"].tolist()):
        origin = forks.trajectories[row // 4].completion_ids
        half = len(origin) // 2
        assert ids[:half] == origin[:half]
        assert not masks[row, :half].any() and masks[row, half]
    assert trainer.changed_hooks == ["search", "extra_streams"] and trainer.trains_further_rows


def test_only_chosen_prompts_are_explored_and_the_choice_may_change(tmp_path):
    def odd(completions, **columns):
        return [float(len(completion) % 2) for completion in completions]

    options = dict(explore_prompts="unsolved", reward_funcs=odd)
    trainer = make_trainer(OneEach, ExplorationConfig, tmp_path, **options)
    one_batch(trainer)
    solved = (trainer.scorer.success().view(-1, 4) >= 1).any(dim=1)
    expected = [row for row in range(8) if not solved[row // 4]]
    assert [branch.row for branch in trainer.branch_explorer.sampled] == expected
    trainer.args.explore_prompts = "all"
    trainer.args.max_steps = 1
    trainer.train()
    assert len(trainer.branch_explorer.sampled) == 8


@pytest.mark.parametrize("method", ["deep_grpo", "branpo", "tree_rl", "attn_rl", "agent_tree_grpo"])
def test_prompts_that_only_fill_up_a_round_get_no_branches(tmp_path, method):
    trainer_class, config_class, options = tiny_methods()[method]
    trainer = make_trainer(trainer_class, config_class, tmp_path, **options, reward_funcs=never)
    begin, explored = trainer.branching.begin, []
    trainer.branching.begin = lambda num_fillers=0: begin(1)  # the second of two prompts
    own = trainer.branch_explorer.explore
    trainer.branch_explorer.explore = lambda groups: explored.extend(groups) or own(groups)
    one_batch(trainer)
    assert [group.first_row for group in explored] == [0]
    (result,) = trainer.branching.results
    assert result.num_tokens > 0 and {parent // 4 for parent in result.branches.rows.parents} <= {0}


def test_numbers_and_lists_are_the_credit_of_rows_and_of_main_rows(tmp_path):
    numbers, mine = [0.5 * row for row in range(8)], {3: -2.0}
    trainer = make_trainer(of(dict(advantages=numbers, main_advantages=mine)), ExplorationConfig, tmp_path)
    explorer = trainer.branch_explorer
    output = one_batch(trainer)
    assert trainer.branching.results[0].scored.rows["advantages"].tolist() == numbers
    assert output["advantages"].dim() == 1 and output["advantages"][3] == -2.0

    # Tensors and NumPy values are numbers. A subclass sees the credit, and may change it.
    explorer.changes = dict(advantages=torch.arange(8.0), main_advantages={np.int64(2): np.float32(1.5)})
    own = trainer.assign_advantages
    trainer.assign_advantages = lambda output: 2 * own(output)
    output = one_batch(trainer)
    trainer.assign_advantages = own
    assert trainer.branching.results[0].scored.rows["advantages"].tolist() == list(range(8))
    assert output["advantages"][2] == 3.0

    def per_token(groups):
        branches = OneBranchEach.explore(explorer, groups)
        branches.advantages = [[float(i) for i in range(len(b.completion_ids))] for b in explorer.sampled]
        branches.main_advantages = {5: [1.0] * len(explorer.forks.trajectories[5].completion_ids)}
        return branches

    explorer.explore, explorer.changes = per_token, {}
    output = one_batch(trainer)
    length = len(explorer.forks.trajectories[5].completion_ids)
    assert output["advantages"].shape == output["completion_ids"].shape
    assert output["advantages"][5, :length].tolist() == [1.0] * length
    wide = trainer.branching.results[0].scored.rows["advantages"]
    for row, branch in enumerate(explorer.sampled):
        assert wide[row, : len(branch.completion_ids)].tolist() == list(range(len(branch.completion_ids)))


def test_a_group_with_credit_of_the_explorer_is_not_removed(tmp_path):
    """The first group has credit, the second has only zeros."""
    changes = dict(main_advantages={0: 0.0, 1: -2.0, 4: 0.0})
    fields = dict(reward_funcs=never, dynamic_sampling="filter", log_completions=True)
    trainer = make_trainer(of(changes), ExplorationConfig, tmp_path, **fields)
    output = one_batch(trainer)
    assert loss_mask(output).any(dim=1).tolist() == [True] * 4 + [False] * 4
    assert trainer.rounds.columns()["contrast"] == [True] * 4 + [False] * 4


def test_credit_on_another_process_keeps_the_part_of_a_group_here(tmp_path):
    trainer = make_trainer(OneEach, ExplorationConfig, tmp_path, reward_funcs=never, dynamic_sampling="filter")
    one_batch(trainer)
    rounds, ranks = trainer.rounds, trainer.ranks
    assert not rounds.contrast().any()
    # Six rows on each of two processes, in three groups of four. The other process has credited its first row.
    ranks.number, ranks.index = 2, 0
    other = torch.tensor([True] + [False] * 5)
    ranks.gather = lambda rows: torch.cat([rows, other])
    trainer.scorer.rewards_per_func = torch.zeros(12, 1)
    rounds.credited = torch.zeros(6, dtype=torch.bool)
    assert rounds.contrast().tolist() == [False] * 4 + [True] * 2


def test_rounding_and_masked_rows_are_no_credit():
    found = SimpleNamespace(branches=Branches(rows=None, main_advantages={0: 1.2e-3, 1: [0.0, -0.5], 2: 1.0}))
    trained = torch.tensor([True, True, False, True])
    credited = Branching.credited(SimpleNamespace(results=[found]), trained)
    assert credited.tolist() == [False, True, False, False]


def test_its_rows_are_trained_and_its_state_is_saved(tmp_path):
    class Counting(OneBranchEach):
        count = 0

        def explore(self, groups):
            self.count += 1
            return super().explore(groups)

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Counted(OneEach):
        def make_branch_explorer(self):
            return Counting(self, self.make_forks(), self.scorer)

    options = dict(reward_funcs=never, max_steps=2, save_steps=1, save_strategy="steps")
    whole = make_trainer(Counted, ExplorationConfig, tmp_path, **options)
    before = parameters(whole)
    whole.train()
    assert "branch/reward" in whole.state.log_history[0]
    assert_same(parameters(whole), before)  # rewards are equal, so nothing is learned
    again = make_trainer(Counted, ExplorationConfig, tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.branch_explorer.count == whole.branch_explorer.count > 0
    assert_same(parameters(again), parameters(whole))


class LastTurnAgain(BranchExplorer):
    name = "last turn again"

    def explore(self, groups):
        forks = []
        for group in groups:
            for trajectory in group.trajectories:
                if not self.forks.has_failed(trajectory.main_row):
                    forks.append(Fork(trajectory, turn=len(trajectory.turns) - 1, number=2))
        self.sampled = self.forks.sample_branches(forks)
        self.forks.judge(self.sampled)
        return Branches(self.forks.rows(self.sampled, group_size=2, trains_prefixes=False))


class LastTurns(ExplorationTrainer):
    requires = Requires(tools=True, turns=True, watched_tools=True)

    def make_branch_explorer(self):
        return LastTurnAgain(self, self.make_forks(), self.scorer)


def test_it_continues_an_agent_with_its_tools_as_the_page_says(tmp_path, monkeypatch):
    says(Voice(0.3), monkeypatch.setattr)
    trainer = make_agent_of(LastTurns, ExplorationConfig, tmp_path)
    one_batch(trainer)
    branches = trainer.branch_explorer.sampled
    assert len(branches) == 2 * 8 and trainer.branching.results[0].scored is not None
    for branch in branches:
        first, _ = branch.origin.turns[-1]
        assert branch.completion_ids[:first] == branch.origin.completion_ids[:first] and branch.start == first
        assert branch.environment is not trainer.environments[branch.row] and len(branch.rewards) > 0


def wrong_for_an_agent(folder, explore):
    """A trainer whose explorer calls `explore(explorer, groups)` after it has judged the branches of last turns."""

    class Wrong(LastTurnAgain):
        def explore(self, groups):
            branches = super().explore(groups)
            return explore(self, groups) or branches

    class Trainer(LastTurns):
        def make_branch_explorer(self):
            return Wrong(self, self.make_forks(), self.scorer)

    return make_agent_of(Trainer, ExplorationConfig, folder)


def test_branches_of_an_agent_need_rewards_before_they_are_rows_and_states_before_they_are_continued(
    tmp_path, monkeypatch
):
    says(Voice(0.3), monkeypatch.setattr)

    def not_judged(explorer, groups):
        trajectory = groups[0].trajectories[0]
        branches = explorer.forks.sample_branches([Fork(trajectory, turn=0, number=1)])
        return Branches(explorer.forks.rows(branches, group_size=1, trains_prefixes=False))

    def again(explorer, groups):
        explorer.forks.sample_branches([Fork(explorer.sampled[0].as_trajectory(), turn=0, number=1)])

    with pytest.raises(ValueError, match="Branches of an agent have no rewards: call `self.forks.judge"):
        one_batch(wrong_for_an_agent(tmp_path, not_judged))
    with pytest.raises(ValueError, match=r"make_agent_forks\(keep_states=True\)"):
        one_batch(wrong_for_an_agent(tmp_path, again))


def test_an_agent_has_one_engine(tmp_path):
    class Two(LastTurns):
        def make_branch_explorer(self):
            self.make_forks()
            return super().make_branch_explorer()

    with pytest.raises(TypeError, match="Two makes two engines that sample an agent's branches"):
        make_agent_of(Two, ExplorationConfig, tmp_path)


def test_what_is_no_fork_is_refused(tmp_path):
    forks = make_trainer(OneEach, ExplorationConfig, tmp_path).branch_explorer.forks
    for wrong in ((0, 1), None):
        with pytest.raises(TypeError, match="`sample_branches` got .*: give a list of `Fork`"):
            forks.sample_branches([wrong])


def test_an_agents_explorer_needs_the_turns(tmp_path):
    class NoTurns(LastTurns):
        pass

    NoTurns.requires = Requires(tools=True)  # in its body, it would be added to that of `LastTurns`
    with pytest.raises(ValueError, match="NoTurns samples branches of an agent.*`requires = Requires"):
        make_agent_of(NoTurns, ExplorationConfig, tmp_path)


def test_a_fork_that_is_no_place_of_the_policy_is_refused(tmp_path):
    completion = Trajectory(0, {"prompt": "p"}, [3], [5, 6, 7, 8, 9], loss_mask=[1, 1, 0, 1, 1])
    forks = make_trainer(OneEach, ExplorationConfig, tmp_path).branch_explorer.forks
    forks.trajectories = [completion]
    for options, message in (
        (dict(turn=2), r"`Fork\(turn=2\)`: the completion has the turns 0 to 1"),
        (dict(turn=-1), "the turns 0 to 1"),
        (dict(turn=0, start=2), r"`Fork\(turn=0, start=2\)`: this turn has the tokens 0 to 1"),
        (dict(turn=1, start=2), "this turn has the tokens 3 to 4"),
        (dict(turn=1, start=5), "this turn has the tokens 3 to 4"),
        (dict(turn=1, number=0), r"`Fork\(number=0\)`: sample at least one branch"),
    ):
        with pytest.raises(ValueError, match=message):
            forks.sample_branches([Fork(completion, **{"number": 1, **options})])


class Both(OneEach):
    def make_explorer(self):
        return ResampleExplorer(self, self.sample, self.scorer)


def test_a_branch_explorer_continues_the_rows_of_an_explorer(tmp_path):
    trainer = make_trainer(Both, ExplorationConfig, tmp_path)
    one_batch(trainer)
    assert len(trainer.branch_explorer.sampled) == 8 and trainer.exploration.batch.replaces_main_rows
    assert [branch.origin.completion_ids for branch in trainer.branch_explorer.sampled] == trainer.main_completion_ids


def test_a_subclass_decides_when_to_search_and_what_is_trained(tmp_path):
    class Silent(OneEach):
        def search(self, output):
            if self.state.global_step > 0:
                super().search(output)

        def extra_streams(self, *arguments):
            streams = super().extra_streams(*arguments)
            return {name: (rows, 0.5 * weight) for name, (rows, weight) in streams.items()}

    trainer = make_trainer(Silent, ExplorationConfig, tmp_path)
    one_batch(trainer)
    assert trainer.branching.results == [] and not trainer.stream_training.prepared
    trainer.state.global_step = 1
    one_batch(trainer)
    assert trainer.branching.results[0].scored is not None and trainer.stream_training.prepared["branch"][0] == 0.5


def test_rows_without_own_credit_keep_grpos_if_another_process_credits_tokens(tmp_path, monkeypatch):
    trainer = make_trainer(OneEach, ExplorationConfig, tmp_path)
    monkeypatch.setattr(trainer.branching, "_per_token", lambda advantages: True)
    rows = {"advantages": torch.tensor([1.0, -1.0]), "completion_ids": torch.zeros(2, 3)}
    trainer.branching._credit_branches(rows, [])
    assert rows["advantages"].tolist() == [[1.0] * 3, [-1.0] * 3]


WRONG = {
    "no branches": (None, "None: return `Branches"),
    "a number too few": (dict(advantages=[0.0]), r"`advantages` = \[0.0\] for 2 rows"),
    "a dictionary": (dict(advantages={0: 1.0, 1: 0.0}), "`advantages` = {.*for 2 rows"),
    "a number": (dict(advantages=1.0), "`advantages` = 1.0 for 2 rows"),
    "a list for the main rows": (dict(main_advantages=[1.0]), "a dictionary by `trajectory.main_row`"),
    "True": (dict(advantages=[True, 0.0]), r"`advantages\[0\]` = True"),
    "a NaN": (dict(advantages=[0.0, math.nan]), r"`advantages\[1\]` = nan: an advantage is a finite number"),
    "a text": (dict(advantages=["a", 0.0]), r"`advantages\[0\]` = 'a'"),
    "a short list": (dict(advantages=[[0.0], 1.0]), "with 1 numbers for a completion of 2 tokens"),
    "another row": (dict(main_advantages={9: 1.0}), "`main_advantages` of row 9: .* 0 to 1"),
    "an infinite main row": (dict(main_advantages={1: [math.inf]}), r"`main_advantages\[1\]`"),
    "rewards of a row": (
        dict(known_rewards=[1.0, 1.0]),
        "row 0 with the rewards 1.0: give a list with one number for",
    ),
    "a padded tensor": (dict(advantages=torch.zeros(2, 3)), "with 3 numbers for a completion of 2 tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_is_one_clear_error(case):
    changes, message = WRONG[case]
    rows = Rows(
        examples=[{}, {}],
        prompt_ids=[[3], [3]],
        completion_ids=[[5, 6], [7, 8, 9]],
        loss_mask=[[1, 1], [1, 1, 1]],
        group_size=1,
    )
    if changes is not None and "known_rewards" in changes:
        rows.known_rewards, changes = changes["known_rewards"], {}
    branches = None if changes is None else Branches(rows, **changes)
    with pytest.raises(ValueError, match=f"Branch explorer 'mine' returned.*{message}"):
        checked_branches("mine", branches, main_lengths=[4, 1], num_rewards=1)


def test_an_explorer_of_the_other_kind_is_refused(tmp_path):
    class Wrong(ExplorationTrainer):
        def make_branch_explorer(self):
            return Explorer(self, self.sample, self.scorer)

    with pytest.raises(TypeError, match="make_branch_explorer returned .*return a `BranchExplorer`"):
        make_trainer(Wrong, ExplorationConfig, tmp_path)


def test_a_method_that_branches_refuses_another_way_of_exploring(tmp_path):
    with pytest.raises(ValueError, match="`explore='resample'` is a way of exploring, and RetryTrainer has its own"):
        make_trainer(RetryTrainer, ExplorationConfig, tmp_path, explore="resample", explore_prompts="unsolved")

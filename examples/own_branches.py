"""A branch explorer of your own: continue each failed completion from its middle, four times.

    trl-explore compare --task doors --methods grpo own_branches.RetryTrainer --tokens 3e4

The page is docs/own-method.md.
"""

from trl_explore.explorers.branch_explorer import Branches, BranchExplorer
from trl_explore.forks.trajectories import Fork
from trl_explore.trainers import ExplorationTrainer


class RetryExplorer(BranchExplorer):
    """Continues each failed completion from its middle, four times."""

    name = "retry"

    def explore(self, groups):
        forks = []
        for group in groups:
            for completion, failed in zip(group.trajectories, group.failed, strict=True):
                if failed:
                    middle = len(completion.completion_ids) // 2
                    forks.append(Fork(completion, turn=0, number=4, start=middle))
        branches = self.forks.sample_branches(forks)
        return Branches(self.forks.rows(branches, group_size=4, trains_prefixes=False))


class RetryTrainer(ExplorationTrainer):
    """GRPO that also learns from continuations of failed completions."""

    def make_branch_explorer(self):
        return RetryExplorer(self, self.make_forks(), self.scorer)

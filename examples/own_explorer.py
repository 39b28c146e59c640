"""An explorer of your own: keep the first half of each failed completion, and sample the second half again.

trl-explore train --trainer own_explorer.HalfwayTrainer --explore_prompts unsolved ...
"""

from trl_explore.explorers.explorer import Explored, Explorer
from trl_explore.trainers import ExplorationTrainer


class HalfwayExplorer(Explorer):
    """Samples the second half of GRPO's completions again."""

    name = "halfway"
    needs_samples = True

    def explore(self, groups, plain):
        halves, prefixes = [], []
        for group in groups:
            for sample in group.samples:
                half = sample.token_ids[: len(sample.token_ids) // 2]
                halves.append(half)
                prefixes.append(group.prompt_ids + half)
        budgets = [self.args.max_completion_length - len(half) for half in halves]
        endings = iter(self.sample(prefixes, 1, budgets, begun=[len(half) for half in halves]))

        starts, explored = iter(halves), []
        for group in groups:
            result = Explored(completion_ids=[], loss_mask=[])
            for _ in group.samples:
                half, (ending,) = next(starts), next(endings)
                result.completion_ids.append(half + ending.token_ids)
                result.loss_mask.append([0] * len(half) + [1] * len(ending.token_ids))
            explored.append(result)
        return explored


class HalfwayTrainer(ExplorationTrainer):
    """GRPO that samples the second half of failed completions again."""

    def make_explorer(self):
        return HalfwayExplorer(self, self.sample, self.scorer)

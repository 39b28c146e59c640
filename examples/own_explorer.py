"""An explorer of your own: keep the first half of GRPO's completions, and sample the second half again.

    trl-explore train --trainer own_explorer.HalfwayTrainer ...

The page is docs/own-method.md.
"""

from dataclasses import dataclass

from trl_explore.explorers.explorer import Explored, Explorer
from trl_explore.trainers import ExplorationConfig, ExplorationTrainer


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
        lengths = [len(half) for half in halves]
        budgets = [self.args.max_completion_length - length for length in lengths]
        endings = self.sample(prefixes, 1, budgets, begun=lengths)

        completions, masks = [], []
        for half, (ending,) in zip(halves, endings, strict=True):
            completions.append(half + ending.token_ids)
            masks.append([0] * len(half) + [1] * len(ending.token_ids))
        size = self.args.num_generations
        starts = range(0, len(completions), size)
        return [Explored(completions[i : i + size], loss_mask=masks[i : i + size]) for i in starts]


@dataclass
class HalfwayConfig(ExplorationConfig):
    explore_prompts: str = "unsolved"


class HalfwayTrainer(ExplorationTrainer):
    """GRPO that samples the second half again for prompts that no completion solves."""

    config_class = HalfwayConfig

    def make_explorer(self):
        return HalfwayExplorer(self, self.sample, self.scorer)

"""
An advantage of one's own in twenty lines: what is better than its group counts less than what is worse, as in
W-REINFORCE ([The Surprising Effectiveness of Negative Reinforcement in LLM
Reasoning](https://huggingface.co/papers/2506.01347)), here with GRPO's advantages. From the folder of this file:

    trl-explore train --trainer own_advantage.WReinforceTrainer --help
    trl-explore compare --task doors --methods grpo own_advantage.WReinforceTrainer

The page is docs/own-method.md.
"""

from dataclasses import dataclass, field

import torch

from trl_explore.trainers import ExplorationConfig, ExplorationTrainer


@dataclass
class WReinforceConfig(ExplorationConfig):
    positive_weight: float = field(default=0.1, metadata={"help": "Weight of advantages above 0; 1 is GRPO."})


class WReinforceTrainer(ExplorationTrainer):
    """GRPO where completions that are better than their group count `positive_weight` times."""

    config_class = WReinforceConfig

    def assign_advantages(self, output):
        advantages = super().assign_advantages(output)
        better = advantages > 0
        self.log_metric("advantage/better_fraction", self.ranks.gather(better).float().mean())
        return torch.where(better, self.args.positive_weight * advantages, advantages)

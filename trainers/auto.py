"""The trainer that chooses an explorer, or none, for each unsolved prompt."""

from .auto_config import AutoExploreConfig
from .base import ExplorationTrainer


class AutoExploreTrainer(ExplorationTrainer):
    """
    GRPO that explores an unsolved prompt if it expects more contrast per token from this than from fresh prompts.

    It is [`ExplorationTrainer`] with `explore="auto"`. It differs from GRPO in each generation batch:

    1. If no completion of a prompt succeeds and its rewards are all equal, the prompt may be explored.
    2. For each of these prompts, the trainer chooses an explorer, or none. It compares how many groups with contrast
       (groups whose rewards differ) each explorer and fresh prompts have yielded per generated token. The more groups
       of fresh prompts have contrast, the more an explorer must yield. `explore_max_cost` limits tries without
       success.
    3. The rows of the explorers are trained in addition to GRPO's rows. The loss is GRPO's mean loss plus a mean loss
       for each explorer, whose weight is 4 times the share of the batch's prompts that it explored, but at most 1.
       Rows of `hints`, `replay`, `tail_branches` and `turn_trees` join GRPO's mean instead.

    With `explorers=[]`, the parameters equal GRPO's bit for bit.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is an [`AutoExploreConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` work as in TRL. The trainer refuses vision-language models
    and `rollout_func`.
    """

    method = "auto"
    config_class = AutoExploreConfig
    args: AutoExploreConfig

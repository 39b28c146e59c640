"""The trainer that chooses by itself how to explore."""

from .auto_config import AutoExploreConfig
from .base import ExplorationTrainer


class AutoExploreTrainer(ExplorationTrainer):
    """
    GRPO that explores unsolved prompts where this pays, and chooses the way of exploring while it trains.

    It is [`ExplorationTrainer`] with `explore="auto"`. What changes with respect to GRPO, per generation batch:

    1. If no completion of a prompt succeeds and its rewards are all equal, the prompt may be explored.
    2. For each of these prompts, the trainer chooses an explorer or no exploration. The choice depends on how many
       groups with contrast each of them yielded per generated token, compared with fresh prompts.
    3. The rows of the explorers are trained in addition to GRPO's rows. The loss is one mean over all rows.

    With `explorers=[]`, the parameters equal GRPO's bit for bit.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is an [`AutoExploreConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` work as in TRL. The trainer refuses vision-language models
    and `rollout_func`.
    """

    method = "auto"
    config_class = AutoExploreConfig

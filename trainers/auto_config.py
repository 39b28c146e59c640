"""Configuration of the trainer that chooses an explorer, or none, for each unsolved prompt."""

from dataclasses import dataclass

from trl_explore.names import explain_fields

from .config import ExplorationConfig


@explain_fields
@dataclass
class AutoExploreConfig(ExplorationConfig):
    r"""
    Configuration of [`AutoExploreTrainer`]: every field of [`ExplorationConfig`], with `explore="auto"`.

    Args:
        explore (`str`, *optional*, defaults to `"auto"`):
            Explorer of unsolved prompts. `"auto"` chooses an explorer, or none, for each unsolved prompt while
            training.
    """

    explore: str | None = "auto"

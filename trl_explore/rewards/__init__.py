"""Reward functions for one final answer (`answers.py`) and for questions with short answers (`questions.py`)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_explore.rewards.answers import (
        accuracy_reward,
        answered_reward,
        extract_answer,
        format_reward,
        multiple_choice_reward,
        think_format_reward,
    )
    from trl_explore.rewards.questions import exact_match_reward, f1_reward, make_search_reward, search_reward

__all__ = [
    "accuracy_reward",
    "answered_reward",
    "exact_match_reward",
    "extract_answer",
    "f1_reward",
    "format_reward",
    "make_search_reward",
    "multiple_choice_reward",
    "search_reward",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    # Import reward functions on demand, because they import TRL. The command line imports `rewards.checks` at its
    # start and must stay fast.
    if name in __all__:
        for module_name in ("answers", "questions"):
            module = importlib.import_module(f"trl_explore.rewards.{module_name}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'trl_explore.rewards' has no attribute {name!r}")

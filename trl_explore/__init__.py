"""Exploration trainers for TRL: drop-in subclasses of `GRPOTrainer` that sample, score or credit rollouts better."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from trl_explore.trainers import (
        AgentTreeGRPOConfig,
        AgentTreeGRPOTrainer,
        AttnRLConfig,
        AttnRLTrainer,
        AutoExploreConfig,
        AutoExploreTrainer,
        BranPOConfig,
        BranPOTrainer,
        DeepGRPOConfig,
        DeepGRPOTrainer,
        EvolRLConfig,
        EvolRLTrainer,
        ExplorationConfig,
        ExplorationTrainer,
        G2RLConfig,
        G2RLTrainer,
        GiGPOConfig,
        GiGPOTrainer,
        GradientGuided,
        SESAConfig,
        SESATrainer,
        TreeGRPOConfig,
        TreeGRPOTrainer,
        TreeRLConfig,
        TreeRLTrainer,
    )

__all__ = [
    "AgentTreeGRPOConfig",
    "AgentTreeGRPOTrainer",
    "AttnRLConfig",
    "AttnRLTrainer",
    "AutoExploreConfig",
    "AutoExploreTrainer",
    "BranPOConfig",
    "BranPOTrainer",
    "DeepGRPOConfig",
    "DeepGRPOTrainer",
    "EvolRLConfig",
    "EvolRLTrainer",
    "ExplorationConfig",
    "ExplorationTrainer",
    "G2RLConfig",
    "G2RLTrainer",
    "GiGPOConfig",
    "GiGPOTrainer",
    "GradientGuided",
    "SESAConfig",
    "SESATrainer",
    "TreeGRPOConfig",
    "TreeGRPOTrainer",
    "TreeRLConfig",
    "TreeRLTrainer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # TRL and torch load only when a trainer is asked for: `import trl_explore` and the command line stay quick.
    if name in __all__:
        return getattr(importlib.import_module("trl_explore.trainers"), name)
    raise AttributeError(f"module 'trl_explore' has no attribute {name!r}")

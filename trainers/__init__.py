# From the repository root this folder is also importable as `trainers`, which would make a second copy of every class.
if __name__ != "trl_explore.trainers":
    raise ImportError("this folder is the package trl_explore.trainers; import it under that name")

import trl

from trl_explore.compat import check_trl_version

check_trl_version(trl.__version__)

from .attn_rl import AttnRLTrainer
from .attn_rl_config import AttnRLConfig
from .base import ExplorationTrainer
from .branpo import BranPOTrainer
from .branpo_config import BranPOConfig
from .config import ExplorationConfig
from .deep_grpo import DeepGRPOTrainer
from .deep_grpo_config import DeepGRPOConfig
from .g2rl import G2RLTrainer, GradientGuided
from .g2rl_config import G2RLConfig
from .sesa import SESATrainer
from .sesa_config import SESAConfig
from .tree_grpo import TreeGRPOTrainer
from .tree_grpo_config import TreeGRPOConfig
from .tree_rl import TreeRLTrainer
from .tree_rl_config import TreeRLConfig

__all__ = [
    "AttnRLConfig",
    "AttnRLTrainer",
    "BranPOConfig",
    "BranPOTrainer",
    "DeepGRPOConfig",
    "DeepGRPOTrainer",
    "ExplorationConfig",
    "ExplorationTrainer",
    "G2RLConfig",
    "G2RLTrainer",
    "GradientGuided",
    "SESAConfig",
    "SESATrainer",
    "TreeGRPOConfig",
    "TreeGRPOTrainer",
    "TreeRLConfig",
    "TreeRLTrainer",
]

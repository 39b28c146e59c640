# From the repository root this folder is also importable as `trainers`, which would make a second copy of every class.
if __name__ != "trl_explore.trainers":
    raise ImportError("this folder is the package trl_explore.trainers; import it under that name")

import trl

from trl_explore.compat import check_trl_version

check_trl_version(trl.__version__)

from .agent_tree_grpo import AgentTreeGRPOTrainer
from .agent_tree_grpo_config import AgentTreeGRPOConfig
from .attn_rl import AttnRLTrainer
from .attn_rl_config import AttnRLConfig
from .auto import AutoExploreTrainer
from .auto_config import AutoExploreConfig
from .base import ExplorationTrainer
from .branpo import BranPOTrainer
from .branpo_config import BranPOConfig
from .config import ExplorationConfig
from .deep_grpo import DeepGRPOTrainer
from .deep_grpo_config import DeepGRPOConfig
from .evol_rl import EvolRLTrainer
from .evol_rl_config import EvolRLConfig
from .g2rl import G2RLTrainer, GradientGuided
from .g2rl_config import G2RLConfig
from .gigpo import GiGPOTrainer
from .gigpo_config import GiGPOConfig
from .sesa import SESATrainer
from .sesa_config import SESAConfig
from .tree_grpo import TreeGRPOTrainer
from .tree_grpo_config import TreeGRPOConfig
from .tree_rl import TreeRLTrainer
from .tree_rl_config import TreeRLConfig

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
]

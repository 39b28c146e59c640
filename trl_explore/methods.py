"""The methods, one row each: whatever lists methods reads it here. Importing it loads neither torch nor TRL."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

OURS = ("trl", "grpo", "trl-explore")


def _no_options(task: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Method:
    """One method."""

    name: str  # on the command line, and the stem of its files
    title: str  # in tables, pictures and checkpoints
    trainer: str  # a class of `trl_explore.trainers`, or an import path `module:Class`
    config: str  # likewise
    tags: tuple[str, ...] = OURS  # of its models on the Hub
    # `title` and `id` (arXiv), GRPO's if it has none; and `citation` (BibTeX), unless that is a block of its card.
    paper: Mapping[str, str] = field(default_factory=dict)
    card: str = "base"  # stem of its template in `model_cards/`
    metrics: Mapping[str, str] = field(default_factory=dict)  # beside GRPO's, and what each means, for the card
    # Fields that fit an embedded task and the tiny model that was taught it; `None` where it does not suit the task.
    options: Callable[[Any], dict[str, Any] | None] = _no_options
    needs_tools: bool = False  # whether it has nothing to do where no tools are
    plain: bool = False  # whether it is GRPO: comparisons have it once, unless they are asked for more
    style: tuple[str, str] | None = None  # colour and marker in pictures; without, one that is left

    @property
    def trainer_class(self) -> Any:
        """The trainer. Its import takes seconds, which `--help` and a mistyped name need not wait for."""
        return _load(self.trainer)

    @property
    def config_class(self) -> Any:
        """The configuration."""
        return _load(self.config)


class FromRow:
    """An attribute of trainer classes: what the row that their `method` names says."""

    def __init__(self, read: Callable[[Method], Any]) -> None:
        self.read = read

    def __get__(self, trainer: Any, owner: Any) -> Any:
        return self.read(METHODS[owner.method])


def _load(path: str) -> Any:
    return resolve_name(path if ":" in path else f"trl_explore.trainers:{path}")


def _pivots(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS, ChainTask, FactTask

    few = {"max_pivots_per_batch": 16, "sampling_batch_size": 64}
    if task.name in AGENTS:  # beside turns, the last one may be left inside
        return {**few, "segmentation": "fixed", "segment_length": 8}
    if isinstance(task, ChainTask):
        return {**few, "segment_delimiters": [";"]}
    length = task.step_length if isinstance(task, FactTask) else max(1, task.max_completion_length // 6)
    return {**few, "segmentation": "fixed", "segment_length": length}


def _nodes(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS, ChainTask, FactTask

    if task.name in AGENTS:
        return None
    return {"node_length": task.step_length} if isinstance(task, ChainTask | FactTask) else {}


def _sketches(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import SketchedTask
    from trl_explore.tasks.lake_agent import LakeAgentTask

    if isinstance(task, LakeAgentTask):
        return {**task.sesa_options, "num_actions": 3, "branch_depth": 2}
    return task.sesa_options if isinstance(task, SketchedTask) else None


def _branches(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS

    # As in the paper: half the rollouts of GRPO, and branches.
    return {"num_generations": 4, "per_device_train_batch_size": 32} if task.name in AGENTS else None


def _agents(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS

    return {} if task.name in AGENTS else None


def _without_a_model(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS

    # Answers of the embedded tasks are plans and formulas, of which no majority says which are right.
    return None if task.name in AGENTS else {"embedding_model": "ngrams", "correctness": "reward"}


def _single_turns(task: Any) -> dict[str, Any] | None:
    from trl_explore.tasks import AGENTS

    return None if task.name in AGENTS else {}


def _steps(task: Any) -> dict[str, Any] | None:
    cuts = None if _single_turns(task) is None else _pivots(task)
    if cuts is None:
        return None
    near = {"influence_distance": 1, "min_fork_distance": 0}  # steps are few, and short
    by_text = "segment_delimiters" in cuts
    return {**near, **({"step_delimiters": [";"]} if by_text else {"step_length": cuts["segment_length"]})}


# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows; and
# markers, which a printer can.
ROWS = (
    Method(
        "deep_grpo",
        "DEEP-GRPO",
        "DeepGRPOTrainer",
        "DeepGRPOConfig",
        tags=(*OURS, "deep-grpo"),
        paper={
            "title": "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling",
            "id": "2602.14169",
        },
        card="deep_grpo",
        metrics={
            "pivots/failure_fraction": "completions that failed",
            "pivots/recovered_fraction": "pivots with a successful branch",
            "pivots/mean_depth": "where pivots lie, from 0 (the prompt) to 1 (the end)",
            "pivots/token_ratio": "branch tokens per token of the completions",
            "aux/reward": "mean reward of the branches",
        },
        options=_pivots,
        style=("#0072B2", "s"),
    ),
    Method(
        "tree_grpo",
        "TreeGRPO",
        "TreeGRPOTrainer",
        "TreeGRPOConfig",
        tags=(*OURS, "tree-grpo"),
        paper={
            "title": "DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte "
            "Carlo Tree Search",
            "id": "2509.25454",
        },
        card="tree_grpo",
        metrics={
            "tree/solved_fraction": "trees with a correct completion",
            "tree/uniform_fraction": "trees that are all right or all wrong",
            "tree/iterations": "iterations of a search",
            "tree/token_ratio": "sampled tokens per trained token",
            "replay/stored_prompts": "prompts with kept solutions",
        },
        options=_nodes,
        style=("#D55E00", "D"),
    ),
    Method(
        "sesa",
        "SESA",
        "SESATrainer",
        "SESAConfig",
        tags=(*OURS, "sesa"),
        paper={
            "title": "The Road Less Traveled: Enhancing Exploration in LLMs via Sequential Sampling",
            "id": "2510.15502",
        },
        card="sesa",
        metrics={
            "sketch/distinct": "sketches or candidates of a prompt that are distinct",
            "sketch/similarity": "mean similarity of two sketches of a prompt",
            "sketch/pass_ratio": "Pass@G / Pass@1 of the groups; near 1, samples succeed or fail together",
            "sketch/token_ratio": "tokens of sketches per sampled token",
            "agent/duplicate_actions": "proposed actions that repeat an earlier one",
        },
        options=_sketches,
        style=("#009E73", "^"),
    ),
    Method(
        "g2rl",
        "G2RL",
        "G2RLTrainer",
        "G2RLConfig",
        tags=(*OURS, "g2rl"),
        paper={
            "title": "Can LLMs Guide Their Own Exploration? Gradient-Guided Reinforcement Learning for LLM Reasoning",
            "id": "2512.15687",
        },
        card="g2rl",
        metrics={
            "frac_reward_zero_std": "groups whose completions all got the same shaped reward",
            "shaped_reward": "mean reward after shaping",
            "geometry/mean_cosine": "mean cosine of two completions' features",
            "geometry/negative_pairs": "pairs of completions with a cosine below 0",
            "geometry/mean_novelty": "mean novelty of a completion",
        },
        style=("#CC79A7", "v"),
    ),
    Method(
        "branpo",
        "BranPO",
        "BranPOTrainer",
        "BranPOConfig",
        tags=(*OURS, "branpo"),
        paper={
            "title": "Training Multi-Turn Search Agent via Contrastive Dynamic Branch Sampling",
            "id": "2602.03719",
        },
        card="branpo",
        metrics={
            "branch/branched_fraction": "trajectories that were left",
            "branch/contrastive_fraction": "trajectories with a branch of the other outcome",
            "branch/redundant_fraction": "trajectories with a shorter successful branch",
            "branch/token_ratio": "branch tokens per sampled token",
            "agent/turns": "responses per trajectory",
        },
        options=_branches,
        needs_tools=True,
        style=("#56B4E9", "P"),
    ),
    Method(
        "gigpo",
        "GiGPO",
        "GiGPOTrainer",
        "GiGPOConfig",
        tags=(*OURS, "gigpo"),
        paper={"title": "Group-in-Group Policy Optimization for LLM Agent Training", "id": "2505.10978"},
        card="gigpo",
        metrics={
            "steps/shared_fraction": "steps whose state another step of the prompt has, too",
            "steps/group_size": "steps per state",
            "steps/mean_advantage": "mean size of a step's advantage",
            "agent/turns": "responses per trajectory",
        },
        options=_agents,
        needs_tools=True,
    ),
    Method(
        "agent_tree_grpo",
        "Tree-GRPO (agents)",
        "AgentTreeGRPOTrainer",
        "AgentTreeGRPOConfig",
        tags=(*OURS, "agent-tree-grpo"),
        paper={"title": "Tree Search for LLM Agent Reinforcement Learning", "id": "2509.21240"},
        card="agent_tree_grpo",
        metrics={
            "branch/contrast_fraction": "trees whose leaves have different rewards",
            "branch/mean_depth": "where trajectories were left, from 0 (the prompt) to 1 (their end)",
            "branch/token_ratio": "tokens of branches per sampled token",
            "branch/reward": "mean reward of the branches",
            "agent/turns": "responses per trajectory",
        },
        options=_branches,
        needs_tools=True,
    ),
    Method(
        "evol_rl",
        "EVOL-RL",
        "EvolRLTrainer",
        "EvolRLConfig",
        tags=(*OURS, "evol-rl"),
        paper={
            "title": "Evolving Language Models without Labels: Majority Drives Selection, Novelty Promotes Variation",
            "id": "2509.15194",
        },
        card="evol_rl",
        metrics={
            "votes/answered_fraction": "completions with an answer, or a reward where rewards say what is right",
            "votes/right_fraction": "completions that count as right",
            "votes/right_reward": "mean reward of these",
            "novelty/mean_similarity": "mean similarity of two completions of a prompt",
        },
        options=_without_a_model,
    ),
    Method(
        "tree_rl",
        "TreeRL",
        "TreeRLTrainer",
        "TreeRLConfig",
        tags=(*OURS, "tree-rl"),
        paper={"title": "TreeRL: LLM Reinforcement Learning with On-Policy Tree Search", "id": "2506.11902"},
        card="tree_rl",
        metrics={
            "branch/contrast_fraction": "prompts whose completions and branches did not all get the same reward",
            "branch/other_fraction": "branches with another reward than the completion that they left",
            "branch/uncertainty": "mean `-log p` of the tokens that were sampled anew",
            "branch/depth": "where forks lie, from 0 (the prompt) to 1 (the end)",
            "branch/token_ratio": "branch tokens per sampled token",
        },
        options=_single_turns,
        style=("#8A6D00", "X"),
    ),
    Method(
        "attn_rl",
        "AttnRL",
        "AttnRLTrainer",
        "AttnRLConfig",
        tags=(*OURS, "attn-rl"),
        paper={
            "title": "Attention as a Compass: Efficient Exploration for Process-Supervised RL in Reasoning Models",
            "id": "2509.26628",
        },
        card="attn_rl",
        metrics={
            "steps/per_completion": "steps that a completion is cut into",
            "steps/forked_fraction": "completions that were forked",
            "steps/influence": "mean influence of the steps that were forked",
            "branch/contrast_fraction": "prompts whose completions and branches did not all get the same reward",
            "branch/token_ratio": "branch tokens per sampled token",
        },
        options=_steps,
        style=("#7F3C8D", "<"),
    ),
    Method("exploration", "Exploration", "ExplorationTrainer", "ExplorationConfig", plain=True),
    Method(
        *("grpo", "GRPO", "trl:GRPOTrainer", "trl:GRPOConfig"),
        tags=("trl", "grpo"),
        plain=True,
        style=("#000000", "o"),
    ),
)
METHODS: dict[str, Method] = {row.name: row for row in ROWS}

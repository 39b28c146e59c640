"""The methods, one row each: whatever lists methods reads it here. Importing it loads neither torch nor TRL."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, NamedTuple

SHARED_OPTIONS = ("sampling_batch_size",)  # options of an explorer that are fields of every trainer
OURS = ("trl", "grpo", "trl-explore")
# Explorers of `explore="auto"`. They are defined in `trl_explore.auto.ways`, which loads torch.
EXPLORERS = ("tree", "pivots", "sketches", "resample", "hints", "replay", "tail_branches", "turn_trees")


def _no_options(task: Any) -> dict[str, Any]:
    return {}


class Remark(NamedTuple):
    """A sentence on what a run logged, with its numbers, and the page that explains it."""

    text: str
    link: str


def _no_remarks(ends: Mapping[str, float]) -> list[Remark]:
    return []


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
    # What it logs beside GRPO's metrics and those of `exploration`, and what each means. `aux/...` stands for every
    # other name that begins with `aux/`.
    metrics: Mapping[str, str] = field(default_factory=dict)
    card_metrics: tuple[str, ...] | None = None  # those that its card shows; `None`: all
    # Fields that fit a task, and the tiny model of an embedded one; `None` where the method does not suit the task.
    options: Callable[[Any], dict[str, Any] | None] = _no_options
    needs_tools: bool = False  # whether it has nothing to do where no tools are
    plain: bool = False  # whether it is GRPO: comparisons have it once, unless they are asked for more
    style: tuple[str, str] | None = None  # colour and marker in pictures; without, one that is left
    # Remarks of `trl-explore advise` on the values that a run logged, by name, at its end.
    remarks: Callable[[Mapping[str, float]], list[Remark]] = _no_remarks

    def logs_alone(self, name: str) -> bool:
        """Whether this method logs a metric that GRPO and the other fields of this package do not log."""
        if self.plain or "/" not in name:
            return False
        streams = [known.removesuffix("...") for known in self.metrics if known.endswith("/...")]
        return name in self.metrics or any(name.startswith(stream) for stream in streams)

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


def _for_language_models(task: Any) -> bool:
    """Return whether a language model is trained on a task. The defaults of a method's fields are for language
    models."""
    from trl_explore.tasks import is_teachable

    return not is_teachable(task)


def _is_agent(task: Any) -> bool:
    from trl_explore.tasks import is_agent

    return is_agent(task)


def _pivots(task: Any) -> dict[str, Any] | None:
    if _for_language_models(task):
        return {}  # the default `segment_delimiters` contain the line breaks that end a task's steps
    few = {"max_pivots_per_batch": 16, "sampling_batch_size": 64}
    if _is_agent(task):  # beside turns, the last one may be left inside
        return {**few, "segmentation": "fixed", "segment_length": 8}
    delimiters = getattr(task, "step_delimiters", None)
    if delimiters is not None:
        return {**few, "segment_delimiters": delimiters}
    length = getattr(task, "step_length", max(1, task.max_completion_length // 6))
    return {**few, "segmentation": "fixed", "segment_length": length}


def _nodes(task: Any) -> dict[str, Any] | None:
    if _is_agent(task):
        return None
    length = getattr(task, "step_length", None)
    return {} if length is None else {"node_length": length}


def _sketches(task: Any) -> dict[str, Any] | None:
    if _for_language_models(task):
        return _single_turns(task)
    return getattr(task, "sesa_options", None)


def _branches(task: Any) -> dict[str, Any] | None:
    if _for_language_models(task) or not _is_agent(task):
        return _agents(task)
    # As in the paper: half the rollouts of GRPO, and branches.
    return {"num_generations": 4, "per_device_train_batch_size": 32}


def _agents(task: Any) -> dict[str, Any] | None:
    return {} if _is_agent(task) else None


def _without_a_model(task: Any) -> dict[str, Any] | None:
    # Answers of tasks are plans and formulas, of which no majority says which are right.
    return None if _is_agent(task) else {"embedding_model": "ngrams", "correctness": "reward"}


def _single_turns(task: Any) -> dict[str, Any] | None:
    return None if _is_agent(task) else {}


def _explorers(task: Any) -> dict[str, Any]:
    """Return the options of the explorers that fit a task."""
    options = {"pivots": _pivots(task) or {}}
    if not _is_agent(task):
        options["tree"] = _nodes(task) or {}
        sketches = dict(_sketches(task) or {})
        if sketches.pop("mode", "two_stage") == "two_stage":
            options["sketches"] = sketches
    shared: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for name, of_explorer in options.items():
        own[name] = {}
        for option, value in of_explorer.items():
            target = shared if option in SHARED_OPTIONS else own[name]
            target[option] = value
    return {**shared, "explorer_options": own}


def _steps(task: Any) -> dict[str, Any] | None:
    if _is_agent(task):
        return None
    few_short_steps = {"influence_distance": 1, "min_fork_distance": 0}
    if _for_language_models(task):
        # Short answers have no blank line, at which AttnRL cuts by default, so they would have no fork.
        delimiters = getattr(task, "step_delimiters", None)
        return {} if delimiters is None else {**few_short_steps, "step_delimiters": delimiters}
    segments = _pivots(task)
    if segments is None:
        return None
    if "segment_delimiters" in segments:
        return {**few_short_steps, "step_delimiters": segments["segment_delimiters"]}
    return {**few_short_steps, "step_length": segments["segment_length"]}


def _of_trees(ends: Mapping[str, float]) -> list[Remark]:
    uniform = ends.get("tree/uniform_fraction")
    if uniform is None or uniform <= 0.9:
        return []
    text = (
        f"{uniform:.0%} of the search trees end all right or all wrong: lower `depth_weight`, raise `node_length`, or "
        "search only what plain samples do not solve, `explore_prompts='unsolved'`."
    )
    return [Remark(text, "docs/evidence.md#a-search-that-unlearns")]


def _of_sketches(ends: Mapping[str, float]) -> list[Remark]:
    plain, sketched = ends.get("sketch/plain_success"), ends.get("sketch/success")
    if plain is None or sketched is None or sketched >= plain / 2:
        return []
    text = (
        f"Completions with a sketch are right in {sketched:.0%}, plain ones of the same groups in {plain:.0%}: give "
        "fewer rows a sketch, `max_trajectories`."
    )
    return [Remark(text, "docs/methods/sesa.md")]


def _of_branches(ends: Mapping[str, float]) -> list[Remark]:
    kept = ends.get("branch/contrastive_fraction")
    if kept is None or kept >= 0.1:
        return []
    return [Remark(f"{kept:.0%} of the branched rows found a branch of another outcome.", "docs/methods/branpo.md")]


# What TreeRL and AttnRL log of their branches.
_CHAIN_METRICS = {
    "branch/forks": "places that were forked, over all processes",
    "branch/uncertainty": "mean `-log p` of the tokens that were sampled anew, where it is known",
    "branch/depth": "where forks lie, from 0 (the prompt) to 1 (the end)",
    "branch/contrast_fraction": "share of prompts whose completions and branches did not all get the same reward; the "
    "others teach nothing",
    "branch/other_fraction": "share of branches with another reward than the completion that they left",
    "branch/success_fraction": "share of branches that succeeded",
    "branch/trained_fraction": "share of branches that are trained",
    "branch/mean_suffix_length": "new tokens per branch",
    "branch/sampled_tokens": "tokens sampled for branches",
    "branch/token_ratio": "branch tokens per sampled token",
    "branch/seconds": "seconds for log-probabilities, branches and their scoring",
    "branch/reward": "mean reward of the branches that are trained",
    "branch/...": "everything else that TRL logs, for the branches that are trained",
}

# Metrics of `explore="auto"`, `"hints"` and `"replay"`. Several names end with the name of an explorer.
_AUTO_METRICS = {
    "explore/contrast_per_token/plain": "groups with contrast per generated token, for GRPO's own rows. A group "
    "counts with the share of its rows that failed. The sums are discounted by `explore_discount`",
    "explore/contrast_per_token/...": "the same for each explorer that was used: rows with an advantage, in units of "
    "`num_generations`, per generated token, or per trained token if more tokens are trained",
    "explore/share/...": "share of the batch's prompts that each explorer got",
    "explore/sampled_tokens/...": "tokens that an explorer sampled in a batch, including discarded completions",
    "explore/solved/...": "share of an explorer's prompts for which it found a success",
    "hints/solved_fraction": "`hints`: share of the prompts that a hint solved",
    "hints/mean_level": "`hints`: mean number of the hint that solved a prompt; 0 is the weakest",
    "replay/stored": "`replay`: number of stored completions",
    "tree/...": "`tree`: what TreeGRPO logs of its searches",
    "pivots/...": "`pivots`: what DEEP-GRPO logs of its pivots",
    "sketch/...": "`sketches`: what SESA logs of its sketches",
    "branch/...": "`tail_branches`, `turn_trees`: what BranPO and Tree-GRPO log of their branches",
    "agent/turns": "`tail_branches`, `turn_trees`: responses per trajectory of an explored prompt",
    "agent/environment_errors": "agents: trajectories that ended because their environment raised",
    **{f"explored_{name}/...": f"what TRL logs of rows, for the rows of `{name}`" for name in EXPLORERS},
}

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
            "pivots/failure_fraction": "share of completions that failed: their reward is below `success_threshold`",
            "pivots/tried": "pivots of the batch, over all processes",
            "pivots/recovered_fraction": "share of pivots with a successful branch, of those with a branch that could "
            "be scored (the paper's Fig. 11 shows the rest)",
            "pivots/informative_fraction": "share of pivots whose branches did not all get the same reward; the "
            "others teach nothing",
            "pivots/mean_depth": "where pivots lie, from 0 (the prompt) to 1 (the end): the mean of the paper's `r_t`",
            "pivots/success_weight": "slope w of the success estimator; below 0, failures are harder to recover the "
            "later the pivot",
            "pivots/success_bias": "intercept b of the success estimator",
            "pivots/mean_suffix_length": "new tokens per branch",
            "pivots/token_ratio": "branch tokens per token of the main completions",
            "pivots/sampled_tokens": "tokens sampled for branches",
            "pivots/own_seconds": "seconds of the method's own work: segments, estimator, drawing pivots, joining "
            "prefixes and branches",
            "aux/loss": "loss of the branches, before `aux_loss_weight`",
            "aux/reward": "mean reward of the branches",
            "aux/computed_fraction": "share of branches that make a forward pass in training; with `beta = 0` those "
            "with an advantage, and `aux/entropy` is over them",
            "aux/...": "everything else that TRL logs, for the branches",
        },
        card_metrics=(
            "pivots/failure_fraction",
            "pivots/recovered_fraction",
            "pivots/mean_depth",
            "pivots/token_ratio",
            "aux/reward",
        ),
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
            "tree/iterations": "iterations of a search (trees that were replayed do not count)",
            "tree/nodes": "nodes of a searched tree",
            "tree/max_depth": "depth of the deepest node of a searched tree",
            "tree/frontier_size": "nodes that could still be expanded when the search ended",
            "tree/success_fraction": "share of training rows that are correct",
            "tree/solved_fraction": "share of trees with a correct completion",
            "tree/uniform_fraction": "share of trees whose rows are all right or all wrong",
            "tree/direct_fraction": "share of training rows that are direct rollouts from the prompt, because a "
            "search ended early",
            "tree/trajectory_depth": "nodes per training row",
            "tree/trajectory_entropy": "mean token entropy of a training row, without direct rollouts",
            "tree/sampled_tokens": "tokens sampled for the batch",
            "tree/trained_tokens": "tokens of the training rows",
            "tree/token_ratio": "sampled tokens per trained token",
            "tree/distinct_fraction": "share of trained tokens that are in no other row of their tree",
            "tree/encoded_fraction": "share of prefix tokens that were encoded, of those that all samples together "
            "have",
            "tree/sampling_seconds": "seconds of generation per batch",
            "tree/scoring_seconds": "seconds of the reward functions per batch",
            "tree/own_seconds": "seconds of the search itself per batch, with its files",
            "replay/prompts": "prompts that were not searched, because they have kept solutions",
            "replay/replaced_rows": "rows that a kept solution took",
            "replay/stored_prompts": "prompts with kept solutions",
            "replay/left_prompts": "prompts that are not hard any more, whose solutions were dropped",
        },
        card_metrics=(
            "tree/solved_fraction",
            "tree/uniform_fraction",
            "tree/iterations",
            "tree/token_ratio",
            "replay/stored_prompts",
        ),
        options=_nodes,
        remarks=_of_trees,
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
            "sketch/distinct": "share of a prompt's sketches (or candidates, or proposed actions) that are distinct",
            "sketch/similarity": "mean similarity of two sketches of a prompt (difflib)",
            "sketch/empty": "share of sketches that are empty",
            "sketch/tokens": "tokens of sketches, or of lists",
            "sketch/sampled_tokens": "all sampled tokens, sketches and completions",
            "sketch/token_ratio": "tokens of sketches per sampled token",
            "sketch/drafting_seconds": "seconds of sampling sketches, lists or proposals",
            "sketch/solving_seconds": "seconds of sampling completions",
            "sketch/dropped": "sketches or actions that were dropped, because the prompt had no room for them",
            "sketch/too_long": "completions sampled without their sketch, because it did not fit the context",
            "sketch/repeats": "`sequential`: rows that repeat a candidate, because the list stayed short",
            "sketch/fillers": "`sequential`: rows sampled from the plain prompt, because the list stayed empty",
            "sketch/success": "`two_stage`: share of right rows among those with a sketch. Where only one sketch of a "
            "problem is right, this is at most about 1 divided by the number of different sketches, however good they "
            "are",
            "sketch/plain_success": "`two_stage`: share of right rows among those without a sketch, if there are any",
            "sketch/group_success": "`two_stage`: share of groups where a row with a sketch is right, of those that "
            "have such rows",
            "sketch/pass_ratio": "Pass@G / Pass@1 of the groups; near 1, samples succeed or fail together",
            "sketch/collapse_alarm": "1 where `sketch/pass_ratio` is below 1.05 although not everything is correct",
            "sketch/coverage": "share of the right answers in `coverage_column` that a group found",
            "sketch/ratio_mean": "mean weight of `off_policy_correction`",
            "sketch/ratio_capped_fraction": "share of weights of `off_policy_correction` that were cut at "
            "`off_policy_cap`",
            "agent/trajectories": "`agent`: different trajectories per group",
            "agent/decisions": "`agent`: decisions per group that several trajectories share",
            "agent/duplicate_actions": "`agent`: proposed actions that repeat an earlier one of their decision",
            "agent/environment_errors": "`agent`: trajectories that ended because their environment raised",
        },
        card_metrics=(
            "sketch/distinct",
            "sketch/similarity",
            "sketch/pass_ratio",
            "sketch/token_ratio",
            "agent/duplicate_actions",
        ),
        options=_sketches,
        remarks=_of_sketches,
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
            "frac_reward_zero_std": "share of groups whose completions all got the same shaped reward. Groups that "
            "are all right or all wrong count only where novelty is equal too",
            "shaped_reward": "mean reward after shaping, from which advantages are computed; `reward` and "
            "`reward_std` stay raw",
            "geometry/mean_cosine": "mean cosine of two completions' features (the paper's Fig. 3)",
            "geometry/negative_pairs": "share of pairs of completions with a cosine below 0 (the paper's Fig. 3)",
            "geometry/mean_novelty": "mean novelty `nu` of a completion",
            "geometry/unshaped_rows": "rows that kept their mapped reward",
            "geometry/feature_seconds": "seconds for the features, with the backbone's forward pass where they need "
            "one of their own",
        },
        card_metrics=(
            "frac_reward_zero_std",
            "shaped_reward",
            "geometry/mean_cosine",
            "geometry/negative_pairs",
            "geometry/mean_novelty",
        ),
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
            "branch/branched_fraction": "share of trajectories from which a branch was sampled",
            "branch/contrastive_fraction": "share of trajectories whose kept branch has the other outcome (the "
            "paper's Fig. 4)",
            "branch/redundant_fraction": "share of trajectories whose kept branch is a shorter success (the paper's "
            "Fig. 4)",
            "branch/depth": "responses of a trajectory after the point where its kept branch starts",
            "branch/sampled_tokens": "tokens sampled for branches",
            "branch/token_ratio": "branch tokens per sampled token",
            "branch/incomplete": "branches that were dropped, because they were cut off, reached the limit of rounds "
            "or raised",
            "branch/seconds": "seconds for all branches and their scoring",
            "branch/reward": "mean reward of the kept branches",
            "branch/...": "everything else that TRL logs, for the kept branches",
            "agent/turns": "responses per main trajectory",
            "agent/environment_errors": "trajectories that ended because their environment raised",
        },
        card_metrics=(
            "branch/branched_fraction",
            "branch/contrastive_fraction",
            "branch/redundant_fraction",
            "branch/token_ratio",
            "agent/turns",
        ),
        options=_branches,
        remarks=_of_branches,
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
            "steps/shared_fraction": "share of steps whose state another step of the prompt has too; near 0 the "
            "method is GRPO",
            "steps/group_size": "steps per state",
            "steps/mean_advantage": "mean size of a step's advantage, before `step_weight`",
            "agent/turns": "responses per trajectory",
            "agent/environment_errors": "trajectories that ended with reward 0 because their environment raised",
        },
        card_metrics=(
            "steps/shared_fraction",
            "steps/group_size",
            "steps/mean_advantage",
            "agent/turns",
        ),
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
            "branch/trees": "trees that were expanded",
            "branch/contrast_fraction": "share of trees whose trained leaves have different rewards: only there the "
            "advantage inside the tree acts",
            "branch/mean_depth": "where branches start: turns before the fork over turns of the trajectory, from 0 "
            "(the root) to below 1",
            "branch/sampled_tokens": "tokens sampled for branches",
            "branch/token_ratio": "branch tokens per sampled token",
            "branch/dropped": "branches that were dropped because their environment raised",
            "branch/seconds": "seconds for all branches and their scoring",
            "branch/reward": "mean reward of the branches",
            "branch/...": "everything else that TRL logs, for the branches",
            "agent/turns": "responses per main trajectory",
            "agent/environment_errors": "trajectories that ended because their environment raised",
        },
        card_metrics=(
            "branch/contrast_fraction",
            "branch/mean_depth",
            "branch/token_ratio",
            "branch/reward",
            "agent/turns",
        ),
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
            "votes/answered_fraction": 'completions with an answer (with `correctness="reward"`: with a reward)',
            "votes/right_fraction": "share of completions that count as right",
            "votes/right_reward": "mean reward of these by the reward functions: how often the majority is right, "
            "where the functions know",
            "novelty/mean_similarity": "mean similarity of two completions of a prompt; near 1 they are near copies",
            "shaped_reward": "mean reward from votes and novelty, from which advantages are computed; `reward` stays "
            "raw",
            "novelty/seconds": "seconds for the embeddings and everything computed from them",
        },
        card_metrics=(
            "votes/answered_fraction",
            "votes/right_fraction",
            "votes/right_reward",
            "novelty/mean_similarity",
        ),
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
        metrics=_CHAIN_METRICS,
        card_metrics=(
            "branch/contrast_fraction",
            "branch/other_fraction",
            "branch/uncertainty",
            "branch/depth",
            "branch/token_ratio",
        ),
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
            "steps/forked_fraction": "share of completions that were chosen to be forked, whether they have a step to "
            "fork at or not",
            "steps/influence": "mean influence of the steps that were forked",
            "steps/seconds": "seconds for the attention pass and the choice of steps",
            **_CHAIN_METRICS,
        },
        card_metrics=(
            "steps/per_completion",
            "steps/forked_fraction",
            "steps/influence",
            "branch/contrast_fraction",
            "branch/token_ratio",
        ),
        options=_steps,
        style=("#7F3C8D", "<"),
    ),
    Method(
        "auto",
        "Auto",
        "AutoExploreTrainer",
        "AutoExploreConfig",
        tags=(*OURS, "auto-explore"),
        paper={  # GRPO's, because the choice between explorers has no paper
            "title": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
            "id": "2402.03300",
        },
        card="auto",
        metrics=_AUTO_METRICS,
        card_metrics=("explore/contrast_per_token/...", "explore/share/..."),
        options=_explorers,
    ),
    Method(
        "exploration",
        "Exploration",
        "ExplorationTrainer",
        "ExplorationConfig",
        metrics={  # which all trainers log, where the field is on that makes them
            "generation/main_seconds": "seconds of sampling the main rows, all calls of a generation batch together",
            "generation/extra_seconds": "seconds of sampling what a method samples beside them",
            "generation/cache_megabytes": "most memory that kept keys and values took during a rollout",
            "success/fraction": "share of the completions whose reward reaches the success threshold; logged if "
            "training asks about success",
            "success/min_reward": "smallest reward of a generation batch; the reward is the one that decides about "
            "success",
            "success/max_reward": "largest reward of a generation batch; the reward is the one that decides about "
            "success",
            "generation/sampled_tokens": "tokens sampled so far, over the run and all processes: completions, turns, "
            "branches, trees and sketches, whether they are trained or discarded. Prompts, answers of tools and "
            "completions of evaluations do not count",
            "method/changed_hooks": "number of GRPO's steps that the trainer's class replaces (`rollout`, "
            "`shape_rewards`, `search`, `assign_advantages`, `extra_streams`). Plain GRPO does not log it, and "
            "`trl-explore advise` tells runs of a method by it",
            "explore_share": "share of the prompts that were explored",
            "explore/plain_tokens": "tokens of the completions that were sampled as in GRPO, beside the "
            "method's own (TreeGRPO, SESA)",
            "explore/solved_after": "share of the explored prompts that exploration solved (TreeGRPO, SESA)",
            "explored/...": 'with `explore_into="add"`: what TRL logs of rows, for those of explored prompts',
            "selection/rounds": "rounds of sampling of a generation batch",
            "selection/kept_groups": "share of the sampled groups that are trained",
            "selection/missing_groups": "groups that are still without contrast and train nothing",
            "selection/sampled_tokens": "tokens of the main rows' completions, of all rounds of a batch",
            "selection/trained_tokens": "with `trained_generations`: tokens of a batch's main rows that are trained",
            "selection/untrained_tokens": "with `trained_generations`: tokens of a batch's main rows that are only "
            "sampled",
            "selection/discarded_tokens": "tokens of completions that trained nothing, over the run",
            "selection/prompts_seen": "prompts taken from the order of the data, over the run",
            "selection/skipped_prompts": "prompts passed over, over the run",
            "selection/passes": "passes over the data",
            "selection/moved_rows": "share of the rows that a budget gave to another prompt",
            "credit/advantage_size/...": "mean absolute advantage of each entry of `advantage`, without its weight; "
            "logged if `advantage` is a function or a list",
            "credit/bonus_mean": "mean bonus of rows with an answer, before the group's mean is subtracted; with "
            '`count_bonus_scope="history"` 1 is new, 0 seen very often',
            "credit/distinct_answers": "different answers per group",
            "credit/answered_fraction": "share of the rows with a reward whose answer can be read",
            "credit/covariance_mean": "mean covariance of advantage and log-probability over the tokens in the loss",
            "credit/clip_cov_fraction": "share of the tokens in the loss that were clipped; less than `clip_cov` "
            "where too few lie between the bounds",
            "credit/kl_cov_fraction": "share of the tokens in the loss that got the penalty",
            "packing/token_ratio": "tokens of the rows per token that is computed (main process)",
            "packing/packed": "share of the micro-batches that were packed (main process)",
            "packing/sequences": "sequences that the rows of a micro-batch become; 1 without a `packed_token_budget` "
            "(main process)",
            "packing/compilations": "graphs that torch has compiled so far, on a GPU; it soon stops growing (main "
            "process)",
            "sampling/masked_fraction": 'with vLLM: rows that `vllm_importance_sampling_mode="sequence_mask"` takes '
            "out of the loss",
        },
        card_metrics=(),
        plain=True,
    ),
    Method(
        *("grpo", "GRPO", "trl:GRPOTrainer", "trl:GRPOConfig"),
        tags=("trl", "grpo"),
        plain=True,
        style=("#000000", "o"),
    ),
)
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


def logged_by_a_method(name: str) -> bool:
    """Return whether only a method of this package logs a metric of this name."""
    return any(row.logs_alone(name) for row in METHODS.values())

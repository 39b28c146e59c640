"""Table of all methods, one row each. Lists of methods are made from it. Its import loads neither torch nor TRL."""

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
    """Remark on the logged metrics of a run, with their values, and the page that explains it."""

    text: str
    link: str


def _no_remarks(ends: Mapping[str, float]) -> list[Remark]:
    return []


@dataclass(frozen=True)
class Method:
    """Description of one method."""

    name: str  # on the command line, and at the beginning of its file names
    title: str  # in tables, pictures and checkpoints
    trainer: str  # a class of `trl_explore.trainers`, or an import path `module:Class`
    config: str  # a class of `trl_explore.trainers`, or an import path
    tags: tuple[str, ...] = OURS  # of its models on the Hub
    # `title` and `id` (arXiv). A method without a paper has GRPO's. `citation` (BibTeX) is only needed if the template
    # of its card has no such block.
    paper: Mapping[str, str] = field(default_factory=dict)
    card: str = "base"  # stem of its template in `model_cards/`
    # Names and meanings of the metrics that only this method logs. GRPO's metrics and the metrics of `exploration` are
    # not repeated. `aux/...` means all other names that begin with `aux/`.
    metrics: Mapping[str, str] = field(default_factory=dict)
    card_metrics: tuple[str, ...] | None = None  # metrics that its model card shows; None: all
    # Returns values of fields that fit a task, and the tiny model of an embedded task. Gives None if the method cannot
    # be used with the task.
    options: Callable[[Any], dict[str, Any] | None] = _no_options
    needs_tools: bool = False  # True if it has no effect without tools
    plain: bool = False  # True for GRPO, which a comparison contains once by default
    style: tuple[str, str] | None = None  # colour and marker in pictures; None: the next unused pair
    # Returns the remarks of `trl-explore advise` on the last logged values of a run, by name.
    remarks: Callable[[Mapping[str, float]], list[Remark]] = _no_remarks

    def logs_alone(self, name: str) -> bool:
        """Return whether only this method logs the metric: neither GRPO nor a field of all trainers logs it."""
        if self.plain or "/" not in name:
            return False
        streams = [known.removesuffix("...") for known in self.metrics if known.endswith("/...")]
        return name in self.metrics or any(name.startswith(stream) for stream in streams)

    @property
    def trainer_class(self) -> Any:
        """Trainer class. Its import takes seconds, so `--help` and the check of names avoid it."""
        return _load(self.trainer)

    @property
    def config_class(self) -> Any:
        """Configuration class."""
        return _load(self.config)


class FromRow:
    """Attribute of a trainer class that is read from the row of its `method`."""

    def __init__(self, read: Callable[[Method], Any]) -> None:
        self.read = read

    def __get__(self, trainer: Any, owner: Any) -> Any:
        return self.read(METHODS[owner.method])


def _load(path: str) -> Any:
    if ":" not in path:
        path = f"trl_explore.trainers:{path}"
    return resolve_name(path)


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
    if _is_agent(task):  # pivots are at the starts of turns and inside the last turn
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
    if _is_agent(task):
        return None
    # Answers of the tasks are plans and formulas, so completions rarely agree and no majority forms.
    return {"embedding_model": "ngrams", "correctness": "reward"}


def _single_turns(task: Any) -> dict[str, Any] | None:
    return None if _is_agent(task) else {}


def _explorers(task: Any) -> dict[str, Any]:
    """Return options of explorers that fit a task."""
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
        if delimiters is None:
            return {}
        return {**few_short_steps, "step_delimiters": delimiters}
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
        f"{uniform:.0%} of the search trees end with all completions right or all wrong: lower `depth_weight`, raise "
        "`node_length`, or search only prompts that plain samples do not solve, `explore_prompts='unsolved'`."
    )
    return [Remark(text, "docs/evidence.md#a-search-that-unlearns")]


def _of_sketches(ends: Mapping[str, float]) -> list[Remark]:
    plain, sketched = ends.get("sketch/plain_success"), ends.get("sketch/success")
    if plain is None or sketched is None or sketched >= plain / 2:
        return []
    text = (
        f"{sketched:.0%} of the completions with a sketch are right, but {plain:.0%} of the plain completions of the "
        "same groups: give fewer rows a sketch, with `max_trajectories`."
    )
    return [Remark(text, "docs/methods/sesa.md")]


def _of_branches(ends: Mapping[str, float]) -> list[Remark]:
    kept = ends.get("branch/contrastive_fraction")
    if kept is None or kept >= 0.1:
        return []
    return [Remark(f"{kept:.0%} of the branched rows have a branch with another outcome.", "docs/methods/branpo.md")]


# Metrics of the branches of TreeRL and AttnRL.
_CHAIN_METRICS = {
    "branch/forks": "number of forks, over all processes",
    "branch/uncertainty": "mean `-log p` of the forked tokens, which were sampled again, if it is known",
    "branch/depth": "mean position of forks, from 0 (the prompt) to 1 (the end)",
    "branch/contrast_fraction": "share of prompts whose completions and branches did not all get the same reward. All "
    "other prompts train nothing",
    "branch/other_fraction": "share of branches whose reward differs from the reward of the forked completion",
    "branch/success_fraction": "share of branches that succeeded",
    "branch/trained_fraction": "share of branches that are trained",
    "branch/mean_suffix_length": "new tokens per branch",
    "branch/sampled_tokens": "tokens sampled for branches",
    "branch/token_ratio": "share of branches in all sampled tokens",
    "branch/seconds": "seconds for log-probabilities, branches and their scoring",
    "branch/reward": "mean reward of the branches that are trained",
    "branch/...": "all other metrics that TRL logs for rows, for the branches that are trained",
}

# Metrics of `explore="auto"`, `"hints"` and `"replay"`. Several names end with the name of an explorer.
_AUTO_METRICS = {
    "explore/contrast_per_token/plain": "groups with contrast per generated token, for GRPO's own rows. Each group "
    "counts with the share of its rows that failed. Both sums are discounted by `explore_discount`",
    "explore/contrast_per_token/...": "the same for each explorer that was used: rows with an advantage, in units of "
    "`num_generations`, per generated token, or per trained token if more tokens are trained",
    "explore/share/...": "share of the batch's prompts that each explorer got",
    "explore/sampled_tokens/...": "tokens that an explorer sampled in a batch, including discarded completions",
    "explore/solved/...": "share of an explorer's prompts for which it found a success",
    "hints/solved_fraction": "`hints`: share of the prompts that a hint solved",
    "hints/mean_level": "`hints`: mean number of the hint that solved a prompt; 0 is the weakest",
    "replay/stored": "`replay`: number of stored completions",
    "tree/...": "`tree`: metrics of TreeGRPO",
    "pivots/...": "`pivots`: metrics of DEEP-GRPO",
    "sketch/...": "`sketches`: metrics of SESA",
    "branch/...": "`tail_branches`, `turn_trees`: metrics of BranPO and of Tree-GRPO for agents",
    "agent/turns": "`tail_branches`, `turn_trees`: responses per trajectory of an explored prompt",
    "agent/environment_errors": "agents: trajectories that ended because their environment raised",
    **{f"explored_{name}/...": f"metrics that TRL logs for rows, for the rows of `{name}`" for name in EXPLORERS},
}

# Colours of Okabe and Ito, which colour-blind readers can distinguish, without yellow, which is hard to see on white.
# Markers distinguish the methods in black and white.
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
            "pivots/tried": "number of pivots of the batch, over all processes",
            "pivots/recovered_fraction": "share of pivots with a successful branch. Pivots whose branches have no "
            "reward do not count (the paper's Fig. 11 shows the share without a success)",
            "pivots/informative_fraction": "share of pivots whose branches did not all get the same reward. All other "
            "pivots train nothing",
            "pivots/mean_depth": "mean position of pivots, from 0 (the prompt) to 1 (the end). It is the mean of the "
            "paper's `r_t`",
            "pivots/success_weight": "slope w of the success estimator. If it is below 0, failures are harder to "
            "recover from later pivots",
            "pivots/success_bias": "intercept b of the success estimator",
            "pivots/mean_suffix_length": "new tokens per branch",
            "pivots/token_ratio": "branch tokens per token of the main completions",
            "pivots/sampled_tokens": "tokens sampled for branches",
            "pivots/own_seconds": "seconds of the method's own work: cutting segments, fitting the estimator, "
            "drawing pivots, joining prefixes and branches",
            "aux/loss": "loss of the branches, before `aux_loss_weight`",
            "aux/reward": "mean reward of the branches",
            "aux/computed_fraction": "share of branches that get a forward pass in training. With `beta = 0`, these "
            "are the branches with an advantage, and `aux/entropy` is their mean",
            "aux/...": "all other metrics that TRL logs for rows, for the branches",
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
            "tree/iterations": "iterations per search; replayed trees do not count",
            "tree/nodes": "nodes per searched tree",
            "tree/max_depth": "depth of the deepest node of a searched tree",
            "tree/frontier_size": "nodes that could still be expanded when the search ended",
            "tree/success_fraction": "share of correct training rows",
            "tree/solved_fraction": "share of trees with a correct completion",
            "tree/uniform_fraction": "share of trees whose rows are all right or all wrong",
            "tree/direct_fraction": "share of training rows that are direct rollouts from the prompt. They fill "
            "groups whose search ended early",
            "tree/trajectory_depth": "nodes per training row",
            "tree/trajectory_entropy": "mean token entropy of a training row, without direct rollouts",
            "tree/sampled_tokens": "tokens sampled for the batch",
            "tree/trained_tokens": "tokens of the training rows",
            "tree/token_ratio": "sampled tokens per trained token",
            "tree/distinct_fraction": "share of trained tokens that no other row of their tree contains",
            "tree/encoded_fraction": "number of encoded prefix tokens, divided by the number of prefix tokens of all "
            "samples together",
            "tree/sampling_seconds": "seconds of generation per batch",
            "tree/scoring_seconds": "seconds of the reward functions per batch",
            "tree/own_seconds": "seconds of the search itself per batch, including its files",
            "replay/prompts": "prompts that were not searched, because they have stored completions",
            "replay/replaced_rows": "rows that were replaced by a stored completion",
            "replay/stored_prompts": "prompts with stored completions",
            "replay/left_prompts": "prompts that are not hard any more, so their stored completions were dropped",
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
            "sketch/sampled_tokens": "tokens of sketches and completions together",
            "sketch/token_ratio": "share of sketches in all sampled tokens",
            "sketch/drafting_seconds": "seconds of sampling sketches, lists or proposals",
            "sketch/solving_seconds": "seconds of sampling completions",
            "sketch/dropped": "sketches or actions that were dropped, because they did not fit into the prompt",
            "sketch/too_long": "completions that were sampled without their sketch, because it did not fit into the "
            "context",
            "sketch/repeats": "`sequential`: rows that repeat a candidate, because the list has too few",
            "sketch/fillers": "`sequential`: rows that were sampled from the plain prompt, because the list is empty",
            "sketch/success": "`two_stage`: share of right rows among the rows with a sketch. If only one sketch of a "
            "problem is right, this is at most about 1 divided by the number of different sketches, even for good "
            "sketches",
            "sketch/plain_success": "`two_stage`: share of right rows among the rows without a sketch, if there are "
            "any",
            "sketch/group_success": "`two_stage`: share of groups with a right row that has a sketch, among groups "
            "with sketches",
            "sketch/pass_ratio": "Pass@G / Pass@1 of the groups. Near 1, all rows of a group succeed or fail together",
            "sketch/collapse_alarm": "1 if `sketch/pass_ratio` is below 1.05 although not every row is correct, "
            "else 0",
            "sketch/coverage": "share of the right answers in `coverage_column` that a group contains",
            "sketch/ratio_mean": "mean ratio of `off_policy_correction`",
            "sketch/ratio_capped_fraction": "share of ratios of `off_policy_correction` that were cut at "
            "`off_policy_cap`",
            "agent/trajectories": "`agent`: different trajectories per group",
            "agent/decisions": "`agent`: decisions per group at which several trajectories are",
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
            "are all right or all wrong count only if their novelty is equal, too",
            "shaped_reward": "mean reward after shaping, from which advantages are computed. `reward` and "
            "`reward_std` are without shaping",
            "geometry/mean_cosine": "mean cosine of two completions' features (the paper's Fig. 3)",
            "geometry/negative_pairs": "share of pairs of completions with a cosine below 0 (the paper's Fig. 3)",
            "geometry/mean_novelty": "mean novelty `nu` of a completion",
            "geometry/unshaped_rows": "rows whose mapped reward was not shaped",
            "geometry/feature_seconds": "seconds for the features, including the backbone's forward pass if they need "
            "an additional one",
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
            "branch/depth": "responses of a trajectory after the start of its kept branch",
            "branch/sampled_tokens": "tokens sampled for branches",
            "branch/token_ratio": "share of branches in all sampled tokens",
            "branch/incomplete": "branches that were dropped, because they were cut off, reached the limit of rounds, "
            "or their environment raised",
            "branch/seconds": "seconds for all branches and their scoring",
            "branch/reward": "mean reward of the kept branches",
            "branch/...": "all other metrics that TRL logs for rows, for the kept branches",
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
            "steps/shared_fraction": "share of steps whose state is also the state of another step of the prompt. "
            "Near 0, the method is GRPO",
            "steps/group_size": "steps per state",
            "steps/mean_advantage": "mean absolute advantage of a step, before `step_weight`",
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
            "branch/contrast_fraction": "share of trees whose trained leaves have different rewards. Only these trees "
            "have an advantage inside the tree",
            "branch/mean_depth": "mean position of forks: turns before the fork, divided by the turns of the "
            "trajectory. 0 is the root, and it is below 1",
            "branch/sampled_tokens": "tokens sampled for branches",
            "branch/token_ratio": "share of branches in all sampled tokens",
            "branch/dropped": "branches that were dropped because their environment raised",
            "branch/seconds": "seconds for all branches and their scoring",
            "branch/reward": "mean reward of the branches",
            "branch/...": "all other metrics that TRL logs for rows, for the branches",
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
            "votes/answered_fraction": 'share of completions with an answer, or, with `correctness="reward"`, with a '
            "reward",
            "votes/right_fraction": "share of completions that count as right",
            "votes/right_reward": "mean reward of these completions from the reward functions. If the functions know "
            "the right answer, it shows how often the majority is right",
            "novelty/mean_similarity": "mean similarity of two completions of a prompt. Near 1, they are almost equal",
            "shaped_reward": "mean reward from votes and novelty, from which advantages are computed. `reward` is "
            "from the reward functions",
            "novelty/seconds": "seconds for the embeddings and the rewards that are computed from them",
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
            "steps/per_completion": "number of steps per completion",
            "steps/forked_fraction": "share of completions that were chosen to be forked, including completions "
            "without a step that can be forked",
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
        paper={  # GRPO's: the choice between explorers has no paper
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
        metrics={  # of all trainers; most are logged only if the field that they describe is set
            "generation/main_seconds": "seconds of sampling the main rows of a generation batch, in all calls",
            "generation/extra_seconds": "seconds of sampling the additional rows of a method",
            "generation/cache_megabytes": "largest size of the kept keys and values during a rollout",
            "success/fraction": "share of the completions whose reward reaches the success threshold. Logged if "
            "training compares rewards with a success threshold",
            "success/min_reward": "smallest reward of a generation batch. The reward is the one that decides about "
            "success",
            "success/max_reward": "largest reward of a generation batch. The reward is the one that decides about "
            "success",
            "generation/sampled_tokens": "tokens sampled since the start of the run, over all processes: completions, "
            "turns, branches, trees and sketches, both trained and discarded. Prompts, answers of tools and "
            "completions of evaluations do not count",
            "method/changed_hooks": "number of GRPO's steps that the trainer's class replaces (`rollout`, "
            "`shape_rewards`, `search`, `assign_advantages`, `extra_streams`). Plain GRPO does not log it. "
            "`trl-explore advise` uses it to recognise runs of a method",
            "explore_share": "share of the prompts that were explored",
            "explore/plain_tokens": "tokens of the completions that were sampled as in GRPO, without the "
            "method's own completions (TreeGRPO, SESA)",
            "explore/solved_after": "share of the explored prompts that exploration solved (TreeGRPO, SESA)",
            "explored/...": 'with `explore_into="add"`: metrics that TRL logs for rows, for the explored rows',
            "selection/rounds": "number of rounds of sampling of a generation batch",
            "selection/kept_groups": "share of the sampled groups that are trained",
            "selection/missing_groups": "groups without contrast after the last round, which train nothing",
            "selection/sampled_tokens": "tokens of the main rows' completions in all rounds of a batch",
            "selection/trained_tokens": "with `trained_generations`: tokens of a batch's main rows that are trained",
            "selection/untrained_tokens": "with `trained_generations`: tokens of a batch's main rows that are only "
            "sampled",
            "selection/discarded_tokens": "tokens of completions that were not trained, since the start of the run",
            "selection/prompts_seen": "number of prompts taken from the data, since the start of the run",
            "selection/skipped_prompts": "number of skipped prompts, since the start of the run",
            "selection/passes": "number of passes over the data",
            "selection/moved_rows": "share of the rows that a `budget` gave to another prompt",
            "credit/advantage_size/...": "mean absolute advantage of each entry of `advantage`, without its weight. "
            "Logged if `advantage` is a function or a list",
            "credit/bonus_mean": "mean bonus of rows with an answer, before the group's mean is subtracted. With "
            '`count_bonus_scope="history"`, it is 1 for new answers and near 0 for very frequent ones',
            "credit/distinct_answers": "number of different answers per group",
            "credit/answered_fraction": "share of rows with a readable answer, among rows with a reward",
            "credit/covariance_mean": "mean covariance of advantage and log-probability over the tokens in the loss",
            "credit/clip_cov_fraction": "share of the tokens in the loss that were clipped. It is less than "
            "`clip_cov` if too few tokens are between the bounds",
            "credit/kl_cov_fraction": "share of the tokens in the loss that got the penalty",
            "packing/token_ratio": "tokens of the rows, divided by the number of computed tokens (main process)",
            "packing/packed": "share of the micro-batches that were packed (main process)",
            "packing/sequences": "number of sequences per micro-batch. It is 1 without a `packed_token_budget` "
            "(main process)",
            "packing/compilations": "number of graphs that torch has compiled so far, on a GPU. It soon stops "
            "increasing (main process)",
            "sampling/masked_fraction": "with vLLM: share of rows that are removed from the loss by "
            '`vllm_importance_sampling_mode="sequence_mask"`',
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

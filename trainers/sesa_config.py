"""Configuration of SESA."""

from dataclasses import dataclass

from trl_explore.names import explain_fields
from trl_explore.sketches.drafts import check_template

from .config import ExplorationConfig, at_least, one_of, run_checks, within

SKETCH_TEMPLATE = (
    "{problem}\n\nDo not solve the problem yet. Describe in one or two sentences a strategy for solving it."
)
NEXT_SKETCH_TEMPLATE = (
    "{problem}\n\nStrategies that were proposed already:\n- {sketches}\n\nDo not solve the problem yet. Describe in "
    "one or two sentences a strategy that is clearly different from all of these."
)
SOLVE_TEMPLATE = "{problem}\n\nUse this strategy: {sketch}"
CANDIDATE_TEMPLATE = (
    "{problem}\n\nGive {num_candidates} answers that are all different from each other, each on a line of its own, "
    "and nothing else."
)
ACTION_TEMPLATE = (
    "{problem}\n\nActions that were proposed at this point already: {actions}\nPropose a clearly different one."
)
CHECKS = (
    one_of("mode", ("two_stage", "sequential", "agent")),
    one_of("sketch_assignment", ("own", "shuffled")),
    one_of("candidate_context", ("list", "alone")),
    one_of("off_policy_scope", ("all", "negative")),
    at_least(1, "max_sketch_length", "parallel_sketches"),
    at_least(1, "max_lists", "max_list_length", "context_length", optional=True, words=", or None"),
    within("off_policy_cap", above=0, words="be positive and finite"),
    within("success_threshold"),
)
# Slots that each template must contain.
SLOTS = {
    "sketch_template": ["problem"],
    "next_sketch_template": ["problem", "sketches"],
    "solve_template": ["problem"],
    "candidate_template": ["problem"],
    "action_template": ["problem", "actions"],
}


@explain_fields
@dataclass
class SESAConfig(ExplorationConfig):
    r"""
    Configuration of [`SESATrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of SESA.

    Fields of GRPO keep TRL's defaults.

    Args:
        mode (`str`, *optional*, defaults to `"two_stage"`):
            Kind of drafts: `"two_stage"`, `"sequential"` or `"agent"`. `"two_stage"` drafts plans (sketches) one after
            another, and samples a completion for each. `"sequential"` samples one response that lists
            `num_generations` short answers, the candidates. `"agent"` proposes the actions of an agent in an
            environment one after another.
        num_sketches (`int`, *optional*):
            `two_stage`: number of sketches per prompt, from 0 to `max_trajectories`. Each is a sampling call. The rows
            of a prompt use them in rotation. None: `max_trajectories`, so every row has its own sketch. 0 is GRPO.
        parallel_sketches (`int`, *optional*, defaults to `1`):
            `two_stage`: number of chains of sketches per prompt, up to `num_sketches`. The chains are drafted at the
            same time. The paper has 1. A sketch sees only the earlier sketches of its own chain. With more chains,
            there are fewer and larger sampling calls, and a sketch sees fewer of the others.
        sketch_assignment (`str`, *optional*, defaults to `"own"`):
            `two_stage`: sketches that completions see: `"own"` or `"shuffled"`. `"shuffled"` is the control for a
            comparison: a completion sees the sketch of another prompt with the same index. Every batch exchanges the
            prompts at random. Drafting, rewards and training do not change: a completion is rewarded and
            trained under its own prompt. Prompts are exchanged within a process, so each process needs at least two
            per generation batch. Equal prompts get sketches of different prompts.
        max_sketch_length (`int`, *optional*, defaults to `64`):
            Largest number of tokens per sketch, at least 1. Longer sketches are more complete plans. The cost is
            proportional to it.
        sketch_template (`str`, *optional*, defaults to `SKETCH_TEMPLATE`):
            Prompt of the first sketch, with `{problem}`.
        next_sketch_template (`str`, *optional*, defaults to `NEXT_SKETCH_TEMPLATE`):
            Prompt of the other sketches, with `{problem}` and `{sketches}` (the earlier sketches). Its text decides
            how strongly the model is asked for a different sketch.
        sketch_separator (`str`, *optional*, defaults to `"\n- "`):
            Text between the earlier sketches.
        solve_template (`str`, *optional*, defaults to `SOLVE_TEMPLATE`):
            Prompt of a completion, with `{problem}` and, usually, `{sketch}`. Its text decides how strongly the
            completion follows its sketch.
        candidate_template (`str`, *optional*, defaults to `CANDIDATE_TEMPLATE`):
            `sequential`: prompt of a list, with `{problem}` and, optionally, `{num_candidates}`.
        candidate_separator (`str`, *optional*, defaults to `"\n"`):
            `sequential`: text between the candidates of a list.
        candidate_context (`str`, *optional*, defaults to `"list"`):
            `sequential`: context from which a candidate is sampled: `"list"` or `"alone"`. `"list"` is the list with
            the earlier candidates. `"alone"` is the control for a comparison: every row is the first candidate of its
            own list. This list has at most `max_completion_length` tokens and a separator, or `max_list_length`
            tokens. Equal candidates are kept.
        max_lists (`int`, *optional*):
            `sequential`: largest number of calls that sample or continue a list, at least 1. More calls give more
            complete lists. They end earlier if a call adds no candidates, or if there are `num_generations` different
            candidates. None: `num_generations`.
        max_list_length (`int`, *optional*):
            `sequential`: largest number of tokens of a list, and of each continuation, at least 1. Thoughts before the
            list count. None: `num_generations * max_completion_length`, or less if the context is shorter.
        context_length (`int`, *optional*):
            Largest number of tokens of prompt and completion together. With a larger number, more sketches fit into a
            prompt. None: the model's `max_position_embeddings`.
        num_actions (`int`, *optional*, defaults to `4`):
            `agent`: largest number of actions that are proposed per decision, at least 2. Each is a sampling call. A
            decision never gets more proposals than it has trajectories.
        branch_depth (`int`, *optional*, defaults to `2`):
            `agent`: number of turns at which actions are proposed, at least 0. 0 is GRPO. Later turns are sampled as
            in GRPO.
        max_trajectories (`int`, *optional*):
            `two_stage`, `agent`: number of rows per prompt that explore, from 0 to `num_generations`. These rows get a
            sketch or take proposed actions. The other rows of a group are sampled from the plain prompt. None:
            `num_generations`. 0 is GRPO.
        action_template (`str`, *optional*, defaults to `ACTION_TEMPLATE`):
            `agent`: message that asks for another action, with `{problem}` and `{actions}`. It replaces the last
            message. `{problem}` is the replaced message: the task at first, later the answer of the tools. `{actions}`
            are texts such as `move(direction=left)`.
        action_separator (`str`, *optional*, defaults to `"; "`):
            `agent`: text between the earlier actions.
        off_policy_correction (`bool`, *optional*, defaults to `False`):
            Multiply tokens by a likelihood ratio. It is the likelihood under the plain prompt, divided by the
            likelihood at sampling. It differs from 1 for tokens that were sampled with a sketch, after earlier
            candidates, or in reply to a request for another action. A row can have other tokens than its list: after
            `2.`, the list has the token ` Rome`, but the row begins with `Rome`. So only the longest part with the
            same tokens is weighted. Ratios are cut at `off_policy_cap`. The paper has no correction.
        off_policy_cap (`float`, *optional*, defaults to `2.0`):
            Largest ratio of `off_policy_correction`, above 0. A higher cap gives less bias and more variance.
        off_policy_scope (`str`, *optional*, defaults to `"all"`):
            Rows that `off_policy_correction` weights: `"all"` or `"negative"`. `"negative"` means only rows with
            negative advantages. The policy then learns at full strength from unlikely answers that turn out right, and
            unlikely wrong answers do not make it diverge.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion, for the metrics. The reward is the total reward, or the reward of
            `success_reward` if that is set.
        coverage_column (`str`, *optional*):
            Column of the data set with a list of all right answers to a prompt, as texts. The metric `sketch/coverage`
            is then the share of these answers that a group found. Prompts with None or an empty list are ignored.
            None: no column is read, and no coverage is logged.
    """

    mode: str = "two_stage"
    num_sketches: int | None = None
    parallel_sketches: int = 1
    sketch_assignment: str = "own"
    max_sketch_length: int = 64
    sketch_template: str = SKETCH_TEMPLATE
    next_sketch_template: str = NEXT_SKETCH_TEMPLATE
    sketch_separator: str = "\n- "
    solve_template: str = SOLVE_TEMPLATE
    candidate_template: str = CANDIDATE_TEMPLATE
    candidate_separator: str = "\n"
    candidate_context: str = "list"
    max_lists: int | None = None
    max_list_length: int | None = None
    context_length: int | None = None
    num_actions: int = 4
    branch_depth: int = 2
    max_trajectories: int | None = None
    action_template: str = ACTION_TEMPLATE
    action_separator: str = "; "
    off_policy_correction: bool = False
    off_policy_cap: float = 2.0
    off_policy_scope: str = "all"
    success_threshold: float = 1.0
    coverage_column: str | None = None

    @property
    def explored_rows(self) -> int:
        """Number of rows per prompt that explore."""
        if self.max_trajectories is not None:
            return self.max_trajectories
        return self.num_generations or 1

    @property
    def sketches_per_prompt(self) -> int:
        """Number of sketches that `mode="two_stage"` drafts for a prompt."""
        if self.num_sketches is not None:
            return self.num_sketches
        return self.explored_rows

    @property
    def explores(self) -> bool:
        if self.mode == "two_stage":
            return self.sketches_per_prompt > 0
        if self.mode == "agent":
            return min(self.explored_rows, self.branch_depth) > 0
        return True

    @property
    def asks_about_success(self) -> bool:
        return True

    def validate(self) -> None:
        super().validate()
        run_checks(self, CHECKS)
        self._check_mode()
        self._check_counts()
        for name, slots in SLOTS.items():
            check_template(name, getattr(self, name), required=slots)
        for name in ("sketch_separator", "candidate_separator", "action_separator"):
            if not getattr(self, name):
                raise ValueError(f"`{name}` must not be empty: texts would run into each other.")

    def _check_mode(self) -> None:
        for name, neutral, mode, drafts in (
            ("sketch_assignment", "own", "two_stage", "sketches"),
            ("parallel_sketches", 1, "two_stage", "sketches"),
            ("candidate_context", "list", "sequential", "lists"),
        ):
            value = getattr(self, name)
            if value != neutral and self.mode != mode:
                raise ValueError(
                    f"`{name}={value!r}` has no meaning with `mode={self.mode!r}`, which writes no {drafts}: "
                    f"set `mode={mode!r}`, or leave it out."
                )
        if self.explores_some and self.mode == "agent":
            field = "explore_prompts"
            if self.explore_prompts == "all":
                field = "explore_share_end"
            raise ValueError(
                f"`{field}={getattr(self, field)!r}` chooses prompts after their trajectories were sampled, but "
                "`mode='agent'` proposes actions during sampling: set another `mode`, or leave it out."
            )
        if self.max_trajectories is not None and self.mode == "sequential":
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` has no meaning with `mode='sequential'`, where all "
                "rows of a group come from one list: set another `mode`, or leave it out."
            )

    def _check_counts(self) -> None:
        group = self.num_generations or 1
        if self.max_trajectories is not None and not 0 <= self.max_trajectories <= group:
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` must be between 0 (plain GRPO) and "
                f"`num_generations={group}`, the number of trajectories of a prompt: raise `num_generations` for more."
            )
        bound, most = "num_generations", group
        if self.max_trajectories is not None and self.mode == "two_stage":
            bound, most = "max_trajectories", self.max_trajectories
        if self.num_sketches is not None and not 0 <= self.num_sketches <= most:
            raise ValueError(
                f"`num_sketches={self.num_sketches}` must be between 0 (plain GRPO) and `{bound}={most}`, "
                "the number of rows that get a sketch."
            )
        num_sketches = self.num_sketches
        if num_sketches is None:
            num_sketches = most
        if self.parallel_sketches > max(1, num_sketches):
            raise ValueError(
                f"`parallel_sketches={self.parallel_sketches}` chains need a sketch each: raise `num_sketches` (now "
                f"{num_sketches}), or lower it."
            )
        if self.num_actions < 2 or self.branch_depth < 0:
            raise ValueError(
                f"`num_actions={self.num_actions}` must be at least 2 and `branch_depth={self.branch_depth}` at least "
                "0; for plain GRPO set `branch_depth=0`."
            )

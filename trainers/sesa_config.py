"""The knobs of SESA, their defaults and what is wrong with a bad one."""

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
            What is drafted: `"two_stage"`, `"sequential"` or `"agent"`. `"two_stage"` drafts plans (sketches) one
            after another, and samples a completion for each; `"sequential"` takes the candidates of one response that
            lists `num_generations` short answers; `"agent"` proposes the actions of an agent in an environment one
            after another.
        num_sketches (`int`, *optional*):
            `two_stage`: sketches per prompt, 0 to `max_trajectories`; each is a sampling call. The rows of a prompt
            share them in turn. `None` is `max_trajectories`, a sketch of its own for every row; 0 is GRPO.
        parallel_sketches (`int`, *optional*, defaults to `1`):
            `two_stage`: chains of sketches per prompt that are drafted side by side. Up to `num_sketches`; 1 is the
            paper's. A sketch is shown those before it in its own chain only, so that more chains make fewer and larger
            sampling calls, and sketches that know less of each other.
        sketch_assignment (`str`, *optional*, defaults to `"own"`):
            `two_stage`: which sketches are shown to completions: `"own"` or `"shuffled"`. The second is the control
            for a comparison: every completion sees a sketch of another prompt, drawn anew in every batch, at the same
            place in the list. Drafting, rewards and training are the same with both: a completion is rewarded and
            trained under its own prompt. Prompts are exchanged within a process, each of which therefore needs at
            least two per generation batch; equal ones are exchanged with different ones.
        max_sketch_length (`int`, *optional*, defaults to `64`):
            Most tokens per sketch, at least 1. Longer sketches are fuller plans; the cost grows in proportion.
        sketch_template (`str`, *optional*, defaults to `SKETCH_TEMPLATE`):
            Prompt of the first sketch, with `{problem}`.
        next_sketch_template (`str`, *optional*, defaults to `NEXT_SKETCH_TEMPLATE`):
            Prompt of the other sketches, with `{problem}` and `{sketches}`, those before. It decides how strongly
            sketches are told to differ.
        sketch_separator (`str`, *optional*, defaults to `"\n- "`):
            Text between the earlier sketches.
        solve_template (`str`, *optional*, defaults to `SOLVE_TEMPLATE`):
            Prompt of a completion, with `{problem}` and, usually, `{sketch}`. It decides how strongly the completion
            follows its sketch.
        candidate_template (`str`, *optional*, defaults to `CANDIDATE_TEMPLATE`):
            `sequential`: prompt of a list, with `{problem}` and, optionally, `{num_candidates}`.
        candidate_separator (`str`, *optional*, defaults to `"\n"`):
            `sequential`: text between the candidates of a list.
        candidate_context (`str`, *optional*, defaults to `"list"`):
            `sequential`: behind what a candidate is drawn: `"list"`, those before it, or `"alone"`. The second is the
            control for a comparison: every row is the first candidate of a list of its own, of which no more is
            sampled than `max_completion_length` tokens and a separator, or `max_list_length`. Equal ones are kept.
        max_lists (`int`, *optional*):
            `sequential`: how often a list is asked for or continued, at least 1. More rounds give fuller lists, by
            more calls; they end earlier where one adds no candidates, or there are `num_generations` different ones.
            `None` is `num_generations`.
        max_list_length (`int`, *optional*):
            `sequential`: most tokens of a list, and of each continuation, at least 1. Thoughts before the list count.
            `None` is `num_generations * max_completion_length`, or what the context allows.
        context_length (`int`, *optional*):
            Tokens of prompt and completion together. With more of them, more sketches fit a prompt. `None` is the
            model's `max_position_embeddings`.
        num_actions (`int`, *optional*, defaults to `4`):
            `agent`: most actions proposed per decision, at least 2. Each is a call, and there are never more than
            trajectories that stand before the decision.
        branch_depth (`int`, *optional*, defaults to `2`):
            `agent`: turns at which actions are proposed, at least 0; 0 is GRPO. Later turns are sampled as in GRPO.
        max_trajectories (`int`, *optional*):
            `two_stage`, `agent`: rows per prompt that explore, 0 to `num_generations`. They get a sketch or take
            proposed actions; the others of a group are sampled from the plain prompt. `None` is `num_generations`, 0
            is GRPO.
        action_template (`str`, *optional*, defaults to `ACTION_TEMPLATE`):
            `agent`: last message that asks for another action, with `{problem}` and `{actions}`. It takes the place of
            the last message, which is `{problem}` (the task at first, then what the tools answered); `{actions}` are
            such as `move(direction=left)`.
        action_separator (`str`, *optional*, defaults to `"; "`):
            `agent`: text between the earlier actions.
        off_policy_correction (`bool`, *optional*, defaults to `False`):
            Weight tokens by their likelihood under the plain prompt over that at sampling. They were sampled with a
            sketch, after earlier candidates, or when asked for another action. Weights are cut at `off_policy_cap`.
            Beyond the paper.
        off_policy_cap (`float`, *optional*, defaults to `2.0`):
            Largest weight of `off_policy_correction`, above 0. A higher cap gives less bias and more variance.
        off_policy_scope (`str`, *optional*, defaults to `"all"`):
            Rows that `off_policy_correction` weights: `"all"` or `"negative"`. The second means negative advantages
            only: the policy learns at full strength from unlikely answers that turn out right, and unlikely wrong ones
            do not pull it apart.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward of a correct completion, for the metrics. The reward is the total, or that of
            `success_reward`.
        coverage_column (`str`, *optional*):
            Column of the data set with a list of all right answers to a prompt, as texts. The metric `sketch/coverage`
            is then the share of them that a group found. Prompts with `None` or an empty list are left out. `None`
            reads no column and logs no coverage.
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
        return (self.num_generations or 1) if self.max_trajectories is None else self.max_trajectories

    @property
    def sketches_per_prompt(self) -> int:
        """Number of sketches that `mode="two_stage"` drafts for a prompt."""
        return self.explored_rows if self.num_sketches is None else self.num_sketches

    @property
    def explores(self) -> bool:
        """True if anything differs from plain GRPO."""
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
            check_template(name, vars(self)[name], required=slots)
        for name in ("sketch_separator", "candidate_separator", "action_separator"):
            if not vars(self)[name]:
                raise ValueError(f"`{name}` must not be empty: texts would run into each other.")

    def _check_mode(self) -> None:
        for name, neutral, mode, what in (
            ("sketch_assignment", "own", "two_stage", "sketches"),
            ("parallel_sketches", 1, "two_stage", "sketches"),
            ("candidate_context", "list", "sequential", "lists"),
        ):
            if vars(self)[name] != neutral and self.mode != mode:
                raise ValueError(
                    f"`{name}={vars(self)[name]!r}` has no meaning with `mode={self.mode!r}`, which writes no {what}: "
                    f"set `mode={mode!r}`, or leave it out."
                )
        if self.explores_some and self.mode == "agent":
            field = "explore_share_end" if self.explore_prompts == "all" else "explore_prompts"
            raise ValueError(
                f"`{field}={vars(self)[field]!r}` chooses prompts whose trajectories were sampled first, but with "
                "`mode='agent'` actions are proposed while they grow: set another `mode`, or leave it out."
            )
        if self.max_trajectories is not None and self.mode == "sequential":
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` has no meaning with `mode='sequential'`, where a list "
                "makes the whole group: set another `mode`, or leave it out."
            )

    def _check_counts(self) -> None:
        group = self.num_generations or 1
        if self.max_trajectories is not None and not 0 <= self.max_trajectories <= group:
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` must be between 0 (plain GRPO) and "
                f"`num_generations={group}`, the trajectories of a prompt: raise `num_generations` for more."
            )
        bound, most = "num_generations", group
        if self.max_trajectories is not None and self.mode == "two_stage":
            bound, most = "max_trajectories", self.max_trajectories
        if self.num_sketches is not None and not 0 <= self.num_sketches <= most:
            raise ValueError(
                f"`num_sketches={self.num_sketches}` must be between 0 (plain GRPO) and `{bound}={most}`, "
                "which solve one sketch each."
            )
        if self.parallel_sketches > max(1, most if self.num_sketches is None else self.num_sketches):
            raise ValueError(
                f"`parallel_sketches={self.parallel_sketches}` chains need a sketch each: raise `num_sketches` (now "
                f"{most if self.num_sketches is None else self.num_sketches}), or lower it."
            )
        if self.num_actions < 2 or self.branch_depth < 0:
            raise ValueError(
                f"`num_actions={self.num_actions}` must be at least 2 and `branch_depth={self.branch_depth}` at least "
                "0; for plain GRPO set `branch_depth=0`."
            )

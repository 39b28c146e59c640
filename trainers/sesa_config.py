"""The knobs of SESA, their defaults and what is wrong with a bad one."""

import math
from dataclasses import dataclass, field

from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.sketches.drafts import check_template

from .config import ExplorationConfig

MODES = ("two_stage", "sequential", "agent")
OFF_POLICY_SCOPES = ("all", "negative")
SKETCH_ASSIGNMENTS = ("own", "shuffled")
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


@explain_unknown_fields
@dataclass
class SESAConfig(ExplorationConfig):
    r"""
    Configuration of [`SESATrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of SESA.

    Fields of GRPO keep TRL's defaults.

    Args:
        mode (`str`, *optional*, defaults to `"two_stage"`):
            `"two_stage"` drafts sketches one after another and solves each in a completion of its own;
            `"sequential"` takes the candidates of one response that lists `num_generations` of them (short answers);
            `"agent"` proposes the actions of an agent in an environment one after another.
        num_sketches (`int`, *optional*):
            Sketches per prompt with `mode="two_stage"`, at most `max_trajectories`, which share them in turn. `None`
            means `max_trajectories`; 0 is plain GRPO.
        sketch_assignment (`str`, *optional*, defaults to `"own"`):
            Sketches that the solutions of a prompt are conditioned on, with `mode="two_stage"`: its `"own"`, or
            `"shuffled"`, the control that a comparison needs: those of another prompt, drawn anew in every batch, each
            at its place in the list. Sketches are sampled alike, and never trained or rewarded with either: a solution
            is rewarded and trained under its own prompt. Prompts are exchanged within a process, of which each
            therefore needs at least two per generation batch; equal ones are exchanged with different ones.
        max_sketch_length (`int`, *optional*, defaults to `64`):
            Most tokens per sketch.
        sketch_template (`str`, *optional*):
            Prompt of the first sketch, with `{problem}`.
        next_sketch_template (`str`, *optional*):
            Prompt of the others, with `{problem}` and `{sketches}`, those before.
        sketch_separator (`str`, *optional*, defaults to `"\n- "`):
            What stands between earlier sketches.
        solve_template (`str`, *optional*):
            Prompt of a solution, with `{problem}` and, usually, `{sketch}`.
        candidate_template (`str`, *optional*):
            Prompt of a list with `mode="sequential"`, with `{problem}` and, optionally, `{num_candidates}`.
        candidate_separator (`str`, *optional*, defaults to `"\n"`):
            What stands between the candidates of a list.
        max_lists (`int`, *optional*):
            Times that a list is asked for or continued, as long as that adds candidates, until it has
            `num_generations` different ones. `None` means `num_generations`.
        max_list_length (`int`, *optional*):
            Most tokens of a list, thoughts included, and of each continuation. `None` means
            `num_generations * max_completion_length`, or what the context allows.
        context_length (`int`, *optional*):
            Tokens that prompt and completion may have together. `None` means the model's `max_position_embeddings`.
        num_actions (`int`, *optional*, defaults to `4`):
            Most actions proposed per decision with `mode="agent"`, at least 2. Never more than trajectories stand
            before it.
        branch_depth (`int`, *optional*, defaults to `2`):
            Turns of a trajectory at which actions are proposed; later turns are sampled as in GRPO. 0 is plain GRPO.
        max_trajectories (`int`, *optional*):
            Most trajectories per prompt that branch (`mode="agent"`) or are solved behind a sketch
            (`mode="two_stage"`), at most `num_generations`; the others of a group are plain ones. `None` means
            `num_generations`, 0 is plain GRPO.
        action_template (`str`, *optional*):
            What stands in place of the last message when another action is asked for, with `{problem}`, that message
            (the task at first, then what the tools answered), and `{actions}`, such as `move(direction=left)`.
        action_separator (`str`, *optional*, defaults to `"; "`):
            What stands between earlier actions.
        off_policy_correction (`bool`, *optional*, defaults to `False`):
            Weight every token by its likelihood under the plain prompt over that behind the context it was drawn from
            (with its sketch, behind earlier candidates, asked for another action), cut at `off_policy_cap`. Beyond
            the paper.
        off_policy_cap (`float`, *optional*, defaults to `2.0`):
            Largest such weight.
        off_policy_scope (`str`, *optional*, defaults to `"all"`):
            Rows that are weighted: `"all"`, or `"negative"` for those with a negative advantage only. The latter
            learns at full strength from unlikely answers that turn out right, and is not pulled apart by unlikely
            ones that do not.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest reward (the total, or that of `success_reward`) of a correct completion, for the metrics.
    """

    mode: str = field(default="two_stage", metadata={"help": "'two_stage', 'sequential' or 'agent'."})
    num_sketches: int | None = field(
        default=None, metadata={"help": "Sketches per prompt; None: num_generations, 0: plain GRPO."}
    )
    sketch_assignment: str = field(
        default="own", metadata={"help": "Sketches shown: the prompt's 'own', or the control 'shuffled' (another's)."}
    )
    max_sketch_length: int = field(default=64, metadata={"help": "Most tokens per sketch."})
    sketch_template: str = field(default=SKETCH_TEMPLATE, metadata={"help": "Prompt of the first sketch."})
    next_sketch_template: str = field(default=NEXT_SKETCH_TEMPLATE, metadata={"help": "Prompt of the other sketches."})
    sketch_separator: str = field(default="\n- ", metadata={"help": "Text between earlier sketches."})
    solve_template: str = field(default=SOLVE_TEMPLATE, metadata={"help": "Prompt of a solution."})
    candidate_template: str = field(default=CANDIDATE_TEMPLATE, metadata={"help": "Prompt of a list of candidates."})
    candidate_separator: str = field(default="\n", metadata={"help": "Text between candidates of a list."})
    max_lists: int | None = field(
        default=None, metadata={"help": "Times that a list is asked for or continued; None: num_generations."}
    )
    max_list_length: int | None = field(default=None, metadata={"help": "Most tokens of a list of candidates."})
    context_length: int | None = field(default=None, metadata={"help": "Tokens of prompt and completion together."})
    num_actions: int = field(default=4, metadata={"help": "Most actions proposed per decision."})
    branch_depth: int = field(default=2, metadata={"help": "Turns at which actions are proposed; 0: plain GRPO."})
    max_trajectories: int | None = field(
        default=None, metadata={"help": "Rows per prompt that branch or follow sketches; None: num_generations."}
    )
    action_template: str = field(
        default=ACTION_TEMPLATE, metadata={"help": "Last message that asks for another action."}
    )
    action_separator: str = field(default="; ", metadata={"help": "Text between earlier actions."})
    off_policy_correction: bool = field(
        default=False, metadata={"help": "Weight tokens by their likelihood without over with the sketch."}
    )
    off_policy_cap: float = field(default=2.0, metadata={"help": "Largest such weight."})
    off_policy_scope: str = field(
        default="all", metadata={"help": "'all', or 'negative' for rows with a negative advantage."}
    )
    success_threshold: float = field(default=1.0, metadata={"help": "Smallest reward of a correct completion."})

    def validate(self) -> None:
        super().validate()
        if self.mode not in MODES:
            raise ValueError(f"`mode`: {unknown_name('value', str(self.mode), MODES)}")
        if self.sketch_assignment not in SKETCH_ASSIGNMENTS:
            problem = unknown_name("value", str(self.sketch_assignment), SKETCH_ASSIGNMENTS)
            raise ValueError(f"`sketch_assignment`: {problem}")
        if self.sketch_assignment != "own" and self.mode != "two_stage":
            raise ValueError(
                f"`sketch_assignment={self.sketch_assignment!r}` has no meaning with `mode={self.mode!r}`, which "
                "writes no sketches: set `mode='two_stage'`, or leave it out."
            )
        group = self.num_generations or 1
        if self.max_trajectories is not None and not 0 <= self.max_trajectories <= group:
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` must be between 0 (plain GRPO) and "
                f"`num_generations={group}`, the trajectories of a prompt: raise `num_generations` for more."
            )
        if self.max_trajectories is not None and self.mode == "sequential":
            raise ValueError(
                f"`max_trajectories={self.max_trajectories}` has no meaning with `mode='sequential'`, where a list "
                "makes the whole group: set another `mode`, or leave it out."
            )
        bound, most = "num_generations", group
        if self.max_trajectories is not None and self.mode == "two_stage":
            bound, most = "max_trajectories", self.max_trajectories
        if self.num_sketches is not None and not 0 <= self.num_sketches <= most:
            raise ValueError(
                f"`num_sketches={self.num_sketches}` must be between 0 (plain GRPO) and `{bound}={most}`, "
                "which solve one sketch each."
            )
        if self.num_actions < 2 or self.branch_depth < 0:
            raise ValueError(
                f"`num_actions={self.num_actions}` must be at least 2 and `branch_depth={self.branch_depth}` at least "
                "0; for plain GRPO set `branch_depth=0`."
            )
        for name in ("max_sketch_length", "max_lists", "max_list_length", "context_length"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        if not 0 < self.off_policy_cap < math.inf or not math.isfinite(self.success_threshold):
            raise ValueError(
                f"`off_policy_cap={self.off_policy_cap}` must be positive and "
                f"`success_threshold={self.success_threshold}` finite."
            )
        if self.off_policy_scope not in OFF_POLICY_SCOPES:
            raise ValueError(f"`off_policy_scope`: {unknown_name('value', self.off_policy_scope, OFF_POLICY_SCOPES)}")
        check_template("sketch_template", self.sketch_template, required=["problem"])
        check_template("next_sketch_template", self.next_sketch_template, required=["problem", "sketches"])
        check_template("solve_template", self.solve_template, required=["problem"])
        check_template("candidate_template", self.candidate_template, required=["problem"])
        check_template("action_template", self.action_template, required=["problem", "actions"])
        for name in ("sketch_separator", "candidate_separator", "action_separator"):
            if not vars(self)[name]:
                raise ValueError(f"`{name}` must not be empty: texts would run into each other.")

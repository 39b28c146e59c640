"""SESA: the policy drafts sketches for a prompt one after another. The request for a sketch shows the earlier ones."""

from dataclasses import replace
from typing import Any

from trl_explore.explorers.explorer import Explorer
from trl_explore.explorers.resample import ResampleExplorer
from trl_explore.sketches.agent import Actions, check_actions
from trl_explore.sketches.lists import Lists
from trl_explore.sketches.metrics import check_coverage_column
from trl_explore.sketches.mode import Mode, context_length
from trl_explore.sketches.two_stage import TwoStage

from .base import ExplorationTrainer, Requires
from .config import ExplorationConfig
from .sesa_config import SESAConfig


class SESATrainer(ExplorationTrainer):
    """
    GRPO whose completions follow sketches. The policy drafts the sketches one after another, so that they differ.

    Method of [The Road Less Traveled: Enhancing Exploration in LLMs via Sequential
    Sampling](https://huggingface.co/papers/2510.15502). What changes with respect to GRPO, per generation batch:

    1. For every prompt, the policy drafts `num_sketches` short sketches one after another. The request for a sketch
       shows the earlier ones. Step j is one sampling call for all prompts.
    2. The policy samples one completion per row, from a prompt that shows the row's sketch. This is one sampling call.
    3. Rows are trained with the original prompt. So the loss sees no sketch, as in evaluation.

    With `mode="sequential"`, one response lists candidates for a prompt, and each candidate becomes the completion of
    a row. With `mode="agent"`, the policy proposes `num_actions` actions one after another for trajectories of a group
    that are at the same decision, and these trajectories take different actions. `max_trajectories` bounds the number
    of rows per group that explore. The other rows are sampled as in GRPO. With `num_sketches=0`, `branch_depth=0` or
    `max_trajectories=0`, the parameters equal GRPO's bit for bit. The same holds if no template shows sketches.
    Deviations from the paper (all of them are in `docs/methods/sesa.md`):

    1. The baseline of the advantage is the mean of the group, not its maximum as in Eq. 1.
    2. Empty sketches are not shown: their rows are sampled from the plain prompt. Duplicates are kept and counted.
    3. If a list has too few candidates, the policy continues it. If it still has too few, candidates are repeated.
    4. Two actions are equal if their tool calls are equal. Each branch is a row of the batch, so the number of
       branches is fixed.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`SESAConfig`] or a plain
    [`~trl.GRPOConfig`]. `mode="agent"` needs an `environment_factory`. The other modes refuse environments and tools,
    and all modes refuse vision-language models and `rollout_func`. If an environment raises, its trajectory ends with
    reward 0.
    """

    method = "sesa"

    max_completion_length: int
    num_generations: int
    config_class = SESAConfig
    args: SESAConfig
    requires = Requires(samples=True, main_rows=True, whole_groups=True, turns=True)
    mode: Mode | None = None  # None if no row explores

    def make_explorer(self) -> Explorer | None:
        if self.args.explores:
            self.mode = self._make_mode()
            return self.mode
        # Without sketches, the chosen prompts are sampled once more as in GRPO, as with `explore="resample"`.
        if self.args.explores_some:
            return ResampleExplorer(self, self.sample, self.scorer)
        return None

    # --------------------------------------------------------------------------------------------- checks and the mode

    def requirements(self, args: ExplorationConfig) -> Requires:
        assert isinstance(args, SESAConfig)
        requires = super().requirements(args)
        # In `mode="two_stage"`, completions have GRPO's limit, and only sketches have another one. With vLLM,
        # `max_tokens` in `generation_kwargs` would replace the limit of sketches, too.
        own_limit = args.explores and (args.mode != "two_stage" or args.use_vllm)
        return replace(requires, tools=args.mode == "agent", own_limit=requires.own_limit or own_limit)

    def check(self, args: ExplorationConfig, *, tools: Any, environment_factory: Any) -> None:
        assert isinstance(args, SESAConfig)
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.mode == "agent" and environment_factory is None:
            raise ValueError(
                "`mode='agent'` needs an environment to act in: pass `environment_factory`, or choose "
                "`mode='two_stage'` for single-turn tasks."
            )
        if args.mode != "agent" and environment_factory is not None:
            raise ValueError(
                f"`mode={args.mode!r}` does not support `environment_factory` (multi-turn rollouts): set "
                "`mode='agent'`, or use GRPOTrainer."
            )
        if args.max_completion_length is None and args.explores:
            raise ValueError(
                "`max_completion_length=None`: completions with a sketch and lists of candidates need a limit. Set a "
                "number."
            )
        rows = args.per_device_train_batch_size * args.steps_per_generation  # of a generation batch, on one process
        if args.sketch_assignment == "shuffled" and rows < 2 * args.num_generations:
            raise ValueError(
                "`sketch_assignment='shuffled'` exchanges sketches between the prompts of a process, which has only "
                f"one per generation batch: raise `per_device_train_batch_size={args.per_device_train_batch_size}` or "
                f"`steps_per_generation={args.steps_per_generation}`, or lower "
                f"`num_generations={args.num_generations}`."
            )

    def _make_mode(self) -> Mode:
        """Create the explorer of the configured `mode`. Raise ValueError if the model's context leaves no room for a
        prompt, or if the tools of `mode="agent"` cannot be proposed as actions."""
        args, num_sketches = self.args, self.args.sketches_per_prompt
        sketch_length = args.max_sketch_length if args.mode == "two_stage" and num_sketches else 0
        parts = (self, self.sample, self.scorer)
        sizes: Any = dict(
            group_size=self.num_generations,
            num_explored=args.explored_rows,
            context_length=context_length(self, args, longest_sketch=sketch_length),
        )
        if args.mode == "two_stage":
            return TwoStage(*parts, num_sketches=num_sketches, **sizes)
        if args.mode == "sequential":
            return Lists(*parts, **sizes)
        assert self.turns is not None
        for name, tools in self.turns.tool_loop.tools_by_environment().items():
            check_actions(tools, "" if name is None else f"[{name!r}]")
        return Actions(*parts, turns=self.turns, **sizes)

    def setup(self) -> None:
        super().setup()
        check_coverage_column(
            self.args.coverage_column, self.train_dataset, remove_unused_columns=self.args.remove_unused_columns
        )

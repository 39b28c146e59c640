"""DEEP-GRPO: branch from pivots inside failed completions, and learn from the branches in a stream of their own."""

from typing import Any

from trl_explore.pivots.explorer import PivotExplorer
from trl_explore.sampling.continued import options_from_the_start

from .base import ExplorationTrainer, Requires
from .deep_grpo_config import DeepGRPOConfig


class DeepGRPOTrainer(ExplorationTrainer):
    """
    GRPO that also resamples from inside failed completions, and learns from those branches in a second stream.

    Method of [Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven
    Resampling](https://huggingface.co/papers/2602.14169). What changes with respect to GRPO, per generation batch:

    1. Every failed completion is cut into segments; one pivot is drawn by recoverability times depth (Eq. 1).
    2. From each pivot K branches are sampled, all in one batched call, and scored by the same reward functions.
    3. Their advantages are relative to their siblings only; the shared prefix is masked out of the loss (Eq. 4).
    4. The loss is `L_main + aux_loss_weight * L_aux`, each averaged over its own tokens or rows (Eq. 2).

    `aux_loss_weight=0` gives GRPO's parameters bit for bit. Deviations from the paper (all of them in
    `docs/methods/deep_grpo.md`):

    1. Branches whose siblings all got the same reward stay in the average unless `drop_zero_advantage=True` (App. C).
    2. The KL term follows `beta`, whose default is TRL's 0; the paper trains with 1e-4.
    3. The slope of the success estimator has a quadratic penalty, so that separable outcomes cannot diverge.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`DeepGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. An agent with `tools` or an `environment_factory` is left before its turns, and inside the
    last one; branches go on with their tools. Vision-language models and `rollout_func` are refused.
    """

    method = "deep_grpo"
    config_class = DeepGRPOConfig
    requires = Requires(samples=True, extra_rows=True, tools=True, turns=True, watched_tools=True)

    @property
    def pivots(self) -> PivotExplorer:
        """The explorer, with its estimator of success."""
        assert isinstance(self.branch_explorer, PivotExplorer)
        return self.branch_explorer

    def make_branch_explorer(self) -> PivotExplorer:
        return PivotExplorer(self, self.make_forks(), self.scorer)

    def method_files(self) -> list[str]:
        own = [self.args.hard_states_file] if self.args.hard_states_file else []
        return [*super().method_files(), *own]

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.deferred_branching and (tools or environment_factory is not None):
            raise ValueError(
                "`deferred_branching=True` samples branches one batch later, when the environments of an agent are at "
                "other tasks: set it to False."
            )
        counted = [] if args.use_vllm else options_from_the_start(args.generation_kwargs or {})
        if args.deferred_branching and counted:
            raise ValueError(
                f"`deferred_branching=True` samples branches in one call with the main rows, where `{counted[0]}` of "
                "`generation_kwargs` cannot count from the start of a completion: set `deferred_branching=False`, or "
                "leave the option out."
            )

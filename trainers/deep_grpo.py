"""DEEP-GRPO: branch from pivots inside failed completions, and train the branches as a separate stream."""

from typing import Any

from trl_explore.pivots.estimator import SuccessEstimator
from trl_explore.pivots.explorer import PivotExplorer
from trl_explore.sampling.continued import options_from_the_start

from .base import ExplorationTrainer, Requires
from .config import ExplorationConfig
from .deep_grpo_config import DeepGRPOConfig


class DeepGRPOTrainer(ExplorationTrainer):
    """
    GRPO that also samples branches from inside failed completions, and trains them as a second stream.

    Method of [Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven
    Resampling](https://huggingface.co/papers/2602.14169). What changes with respect to GRPO, per generation batch:

    1. Every failed completion is cut into segments. One pivot is sampled by recoverability times depth (Eq. 1).
    2. From each pivot, K branches are sampled, all in one call. The same reward functions score them.
    3. The advantage of a branch compares it with its siblings only. The loss masks the shared prefix (Eq. 4).
    4. The loss is `L_main + aux_loss_weight * L_aux`. Each term is a mean over its own tokens or rows (Eq. 2).

    With `aux_loss_weight=0`, the parameters equal GRPO's bit for bit. Deviations from the paper (all of them are
    in `docs/methods/deep_grpo.md`):

    1. Branches whose siblings all got the same reward stay in the mean unless `drop_zero_advantage=True` (App. C).
    2. `beta` is the weight of the KL term. Its default is TRL's 0; the paper trains with 1e-4.
    3. The slope of the success estimator has a quadratic penalty, so that separable outcomes cannot diverge.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`DeepGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. With `tools` or an `environment_factory`, pivots are before an agent's turns and inside its
    last turn, and branches continue with their tools. The trainer refuses vision-language models and `rollout_func`.
    """

    method = "deep_grpo"
    config_class = DeepGRPOConfig
    args: DeepGRPOConfig
    splits_groups = True  # each completion gets its pivot by itself, so a group may span several processes
    requires = Requires(samples=True, extra_rows=True, tools=True, turns=True, watched_tools=True)

    @property
    def estimator(self) -> SuccessEstimator:
        """Estimator of the probability that a pivot has a successful branch."""
        assert isinstance(self.branch_explorer, PivotExplorer)
        return self.branch_explorer.estimator

    def make_branch_explorer(self) -> PivotExplorer:
        return PivotExplorer(self, self.make_forks(), self.scorer)

    def method_files(self) -> list[str]:
        files = super().method_files()
        if self.args.hard_states_file:
            files = [*files, self.args.hard_states_file]
        return files

    def check(self, args: ExplorationConfig, *, tools: Any, environment_factory: Any) -> None:
        assert isinstance(args, DeepGRPOConfig)
        super().check(args, tools=tools, environment_factory=environment_factory)
        if args.deferred_branching and (tools or environment_factory is not None):
            raise ValueError(
                "`deferred_branching=True` samples branches one batch later, when the environments of an agent are at "
                "other tasks: set it to False."
            )
        counted: list[str] = []  # options that count tokens from the start of a completion
        if not args.use_vllm:
            counted = options_from_the_start(args.generation_kwargs or {})
        if args.deferred_branching and counted:
            raise ValueError(
                f"`deferred_branching=True` samples branches in one call with the main rows, where `{counted[0]}` of "
                "`generation_kwargs` cannot count from the start of a completion: set `deferred_branching=False`, or "
                "leave the option out."
            )

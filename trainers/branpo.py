"""BranPO: branch an agent's trajectories near their end, and credit endings with different outcomes."""

import sys
import warnings
from typing import Any

from trl_explore.branches.explorer import REDUNDANCY_DEPTH, TailBranchExplorer
from trl_explore.forks.trajectories import Trajectory

from .base import ExplorationTrainer, Requires
from .branpo_config import BranPOConfig
from .config import ExplorationConfig


class BranPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents, with contrastive branches near the end of trajectories.

    Method of [Training Multi-Turn Search Agent via Contrastive Dynamic Branch
    Sampling](https://huggingface.co/papers/2602.03719). What changes with respect to GRPO, per generation batch:

    1. After the trajectories of a prompt are scored, other endings are sampled for each trajectory: first without its
       last response, then without its last two responses, and so on. The depth and the number of endings depend on the
       trajectory's reward and on the accuracy of its group. The first ending whose outcome differs from the
       trajectory's outcome becomes one more row.
    2. The shared prefix gets the mean reward of both endings, compared with the other prefixes of the prompt. Each
       ending (suffix) is compared with all suffixes of the prompt. The row of a branch trains its suffix only.
    3. If a successful trajectory took more turns than the others of its group, the method looks for a shorter ending
       instead. If it finds one, the turns after the fork are not reinforced.

    If no branch of a batch is kept, the parameters equal GRPO's bit for bit. The loss is one mean over main rows
    and branches. Deviations from the paper and open points are in `docs/methods/branpo.md`.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is a [`BranPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` work as in TRL. Without them, the method samples further
    completions of one turn from the prompt. It refuses vision-language models and `rollout_func`.

    Raises:
        RuntimeError: During training, if at least eight tool calls in a row lost their service, and no tool call of
            their generation batches succeeded. Environments that raise without a mistake of the model count in the
            same way. The trainer first writes a checkpoint, unless `save_strategy="no"` or no step is done.
    """

    method = "branpo"
    config_class = BranPOConfig
    args: BranPOConfig
    requires = Requires(samples=True, extra_rows=True, whole_groups=True, tools=True, turns=True, watched_tools=True)

    def make_branch_explorer(self) -> TailBranchExplorer:
        args = self.args
        depths = args.branch_depth_hard, args.branch_depth, args.branch_depth_solved, REDUNDANCY_DEPTH
        # Environment states are kept only for turns in which a branch can start. Random branches start in any turn.
        num_turns = sys.maxsize if args.branch_selection == "random" else max(depths)
        forks = self.make_agent_forks(num_turns=num_turns, most_rounds=self.interaction_limit)
        return TailBranchExplorer(self, forks, self.scorer)

    def check(self, args: ExplorationConfig, *, tools: Any, environment_factory: Any) -> None:
        assert isinstance(args, BranPOConfig)
        if not tools and environment_factory is None:
            for name in ("interaction_limits", "eval_interaction_limit", "max_tool_calling_iterations"):
                value = getattr(args, name)
                if value is not None:
                    raise ValueError(
                        f"`{name}={value}` is for trajectories of several turns, but there are neither "
                        "`tools` nor an `environment_factory`: pass one of them, or leave the field out."
                    )
        super().check(args, tools=tools, environment_factory=environment_factory)

    def setup(self) -> None:
        super().setup()
        if not self.tools:
            warnings.warn(
                "BranPO branches near the tail of trajectories of several turns, but there are neither `tools` nor an "
                "`environment_factory` with tools: every completion is one turn, and a branch is one more completion "
                "of the same prompt. Pass one of them; `DeepGRPOTrainer` branches within completions of one turn.",
                stacklevel=2,
            )

    @property
    def trajectories(self) -> list[Trajectory]:
        """Trajectories of the newest generation batch."""
        assert self.forks is not None
        return self.forks.trajectories

    def interaction_limit(self) -> int | None:
        """Return the largest number of rounds of tool calls in trajectories of the next batch. None for no limit."""
        limit = self.args.interaction_limit(self.state.global_step)
        if self.is_training:
            return limit
        return self.args.eval_interaction_limit or limit

"""BranPO: trajectories of agents are left near their tail, and contrasting continuations take the credit there."""

import sys
import warnings
from typing import Any

from trl_explore.branches.explorer import REDUNDANCY_DEPTH, TailBranchExplorer
from trl_explore.forks.trajectories import Trajectory

from .base import ExplorationTrainer, Requires
from .branpo_config import BranPOConfig


class BranPOTrainer(ExplorationTrainer):
    """
    GRPO for multi-turn agents with contrastive branches near the tail of their trajectories.

    Method of [Training Multi-Turn Search Agent via Contrastive Dynamic Branch
    Sampling](https://huggingface.co/papers/2602.03719). What changes with respect to GRPO, per generation batch:

    1. After the rollouts of a prompt are scored, other endings are sampled for each: from before its last response,
       then from before the response before that. How deep and how often depends on its reward and on the accuracy of
       its group. The first continuation with the other outcome is kept as one more row.
    2. The shared prefix is credited with the mean reward of both endings, against the prompt's other prefixes; each
       ending (suffix) is credited against all suffixes of the prompt. The branch's row trains its suffix only.
    3. For a success that took more turns than the others of its group, a shorter way is looked for instead; where
       there is one, the turns after the fork are not reinforced.

    A batch in which no branch is kept gives GRPO's parameters bit for bit. Rows of branches are averaged together with
    the initial ones, as if they were one batch. Deviations from the paper and open points are in
    `docs/methods/branpo.md`.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`BranPOConfig`] or a plain
    [`~trl.GRPOConfig`]. `tools` and `environment_factory` are TRL's; without them, completions of a single turn are
    sampled again from the prompt. Vision-language models and `rollout_func` are refused.

    Raises:
        RuntimeError: While training, if at least eight tool calls in a row lost the connection to their service, and
            no call of their generation batches succeeded. A checkpoint is written before.
    """

    method = "branpo"
    config_class = BranPOConfig
    requires = Requires(
        samples=True, extra_rows=True, pooled=True, whole_groups=True, tools=True, turns=True, watched_tools=True
    )

    def make_branch_explorer(self) -> TailBranchExplorer:
        args = self.args
        depths = args.branch_depth_hard, args.branch_depth, args.branch_depth_solved, REDUNDANCY_DEPTH
        num_turns = sys.maxsize if args.branch_selection == "random" else max(depths)
        forks = self.make_agent_forks(num_turns=num_turns, most_rounds=self.interaction_limit)
        return TailBranchExplorer(self, forks, self.scorer)

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
        if not tools and environment_factory is None:
            for name in ("interaction_limits", "eval_interaction_limit", "max_tool_calling_iterations"):
                if vars(args)[name] is not None:
                    raise ValueError(
                        f"`{name}={vars(args)[name]}` is for trajectories of several turns, but there are neither "
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
        """The trajectories of the newest generation batch."""
        assert self.forks is not None
        return self.forks.trajectories

    def interaction_limit(self) -> int | None:
        """Rounds of tool calls that the trajectories of the next batch may have; `None` for any number."""
        limit = self.args.interaction_limit(self.state.global_step)
        return limit if self.is_training else self.args.eval_interaction_limit or limit

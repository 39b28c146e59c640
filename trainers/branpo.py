"""BranPO: trajectories of agents are left near their tail, and contrasting continuations take the credit there."""

import sys
import time
import warnings
from typing import Any

import torch

from trl_explore.agents.forks import Forks
from trl_explore.agents.trajectories import Trajectory
from trl_explore.agents.turns import Turns
from trl_explore.branches.search import REDUNDANCY_DEPTH, BranchSearch
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

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
    turns: Turns
    forks: Forks
    _branch_rows: ScoredRows | None = None
    _credit: dict[int, list[float]] = {}  # of the tokens of main rows, where it is not GRPO's
    _columns: dict[str, list[Any]] = {}

    # ------------------------------------------------------------------------------------------------ the algorithm

    def search(self, output: RowDict) -> None:
        start, branches = time.perf_counter(), self.branches
        deciding = self.ranks.local(self.scorer.success()).tolist()
        possible = output["completion_mask"].any(dim=1)
        if self.choice is not None:
            possible &= self.ranks.local(self.choice.explored(self.scorer.success()))
        plans = branches.plans(deciding, possible.tolist())
        kept = branches.kept_branches(plans, deciding)
        self.log_metric("branch/seconds", time.perf_counter() - start)
        for name, value in branches.metrics(plans, kept).items():
            self.log_metric(name, value)
        if self.log_completions:
            self._columns = branches.columns(plans, kept)
        rows, of_branches = branches.advantages(self.ranks.local(self.scorer.totals()).tolist(), kept)
        self._branch_rows = branches.score(kept, of_branches)
        self._credit = {row: branches.credit_of(row, kept.get(row), plans[row], *rows[row]) for row in rows}

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        if self._branch_rows is None:
            return output["advantages"]
        advantages = output["advantages"].unsqueeze(1).repeat(1, output["completion_ids"].shape[1])
        for row, own in self._credit.items():
            advantages[row, : len(own)] = torch.tensor(own, device=advantages.device)
        return advantages

    def extra_streams(self, output, examples, rewards):
        return {} if self._branch_rows is None else {"branch": (self._branch_rows, 1.0)}

    # -------------------------------------------------------------------------------------------- its parts and limits

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
        args = self.args
        depths = args.branch_depth_hard, args.branch_depth, args.branch_depth_solved, REDUNDANCY_DEPTH
        num_turns = sys.maxsize if args.branch_selection == "random" else max(depths)
        limit = self.interaction_limit
        self.forks = Forks(self, self.turns, self.sample, self.watch, num_turns=num_turns, most_rounds=limit)
        self.branches = BranchSearch(self, self.scorer, self.forks)
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
        """The main rows as they were rolled out."""
        return self.forks.trajectories

    def interaction_limit(self) -> int | None:
        """Rounds of tool calls that the trajectories of the next batch may have; `None` for any number."""
        limit = self.args.interaction_limit(self.state.global_step)
        return limit if self.is_training else self.args.eval_interaction_limit or limit

    def completion_columns(self) -> dict[str, list[Any]]:
        return self._columns

"""SESA: the completions of a prompt are drafted one after another, each knowing the drafts before it."""

import math
from dataclasses import replace
from typing import Any

import torch

from trl_explore.evaluation.metrics import coverage_at_k
from trl_explore.rewards.success import succeeded
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.streams import RowDict, row_tokens
from trl_explore.sketches.agent import Actions, check_actions
from trl_explore.sketches.lists import Lists
from trl_explore.sketches.metrics import check_coverage_column, group_metrics, read_targets
from trl_explore.sketches.mode import Mode
from trl_explore.sketches.two_stage import TwoStage
from trl_explore.sketches.weights import likelihood_ratios

from .base import Chooser, ExplorationTrainer, Requires
from .sesa_config import SESAConfig


class SESATrainer(ExplorationTrainer):
    """
    GRPO whose completions follow sketches drafted one after another, each prompted to differ from those before it.

    Method of [The Road Less Traveled: Enhancing Exploration in LLMs via Sequential
    Sampling](https://huggingface.co/papers/2510.15502). What changes with respect to GRPO, per generation batch:

    1. For every prompt, `num_sketches` short sketches are drafted in turn; each prompt shows the earlier ones. Step j
       is one batched call for all prompts.
    2. One completion per row is sampled, from a prompt that shows the row's sketch, all in one call.
    3. Rows are trained under the original prompt: the likelihood sees no sketch, as at evaluation.

    With `mode="sequential"` one response lists the candidates of a group, and each becomes a row. With `mode="agent"`,
    `num_actions` actions are proposed, one after another, for trajectories of a group that stand before the same
    decision, which share them out. `max_trajectories` bounds the rows of a group that explore; the others are sampled
    as in GRPO. `num_sketches=0`, `branch_depth=0` and `max_trajectories=0` give GRPO's parameters bit for bit,
    as do sketches that no template shows. Deviations from the paper (all of them in `docs/methods/sesa.md`):

    1. The baseline of the advantage is the group's mean, not its maximum as printed in Eq. 1.
    2. Empty sketches are not shown; their rows are sampled from the plain prompt. Duplicates are kept and counted.
    3. A list of candidates that is too short is continued; if that does not help, its candidates are repeated.
    4. Actions are counted as equal if their tool calls are; a branch is a row of the batch, so their number is fixed.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`SESAConfig`] or a plain [`~trl.GRPOConfig`].
    `mode="agent"` needs an `environment_factory`, the other modes accept neither environments nor tools.
    Vision-language models and `rollout_func` are refused. An environment that raises ends its trajectory with
    reward 0.
    """

    method = "sesa"

    max_completion_length: int
    num_generations: int
    config_class = SESAConfig
    requires = Requires(samples=True, main_rows=True, whole_groups=True, turns=True)
    mode: Mode

    # ------------------------------------------------------------------------------------------------ the algorithm

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        return self.mode.rollout(prompt_ids, self.main_examples, plain) if self.explores else plain(prompt_ids)

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        advantages = output["advantages"]
        if self.explores:
            self._log_group()
        return self._weighted(advantages, output) if self.explores and self.args.off_policy_correction else advantages

    def _weighted(self, advantages: torch.Tensor, output: RowDict) -> torch.Tensor:
        """Advantages `(B, T)`, weighted by likelihood ratios up to `off_policy_cap`, as `off_policy_scope` says."""
        cap = self.args.off_policy_cap
        ratios = likelihood_ratios(
            self.sample,
            row_tokens(output)[0],
            self.main_completion_ids,
            self.mode.drawn,
            max_drawn=self.mode.max_drawn,
            rows=self.mode.apart(len(self.main_completion_ids)),
        )
        ratios = ratios.to(advantages.device)
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        wide = torch.ones_like(output["completion_mask"], dtype=ratios.dtype)  # (B, T)
        wide[:, : ratios.shape[1]] = ratios
        real = wide[mask.bool()]
        counts = self.ranks.summed({"sum": real.sum().item(), "capped": (real > cap).sum().item(), "n": len(real)})
        self.log_metric("sketch/ratio_mean", counts["sum"] / max(counts["n"], 1))
        self.log_metric("sketch/ratio_capped_fraction", counts["capped"] / max(counts["n"], 1))
        wide = wide.clamp(max=cap)
        if self.args.off_policy_scope == "negative":
            wide = torch.where(advantages.unsqueeze(1) < 0, wide, 1.0)
        return advantages.unsqueeze(1) * wide

    # ------------------------------------------------------------------------------------------- its mode, and metrics

    def requirements(self, args: Any) -> Requires:
        return replace(super().requirements(args), tools=args.mode == "agent")

    def check(self, args: Any, *, tools: Any, environment_factory: Any) -> None:
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
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if args.sketch_assignment == "shuffled" and rows < 2 * args.num_generations:
            raise ValueError(
                "`sketch_assignment='shuffled'` exchanges sketches between the prompts of a process, which has only "
                f"one per generation batch: raise `per_device_train_batch_size={args.per_device_train_batch_size}` or "
                f"`steps_per_generation={args.steps_per_generation}`, or lower "
                f"`num_generations={args.num_generations}`."
            )

    def setup(self) -> None:
        super().setup()
        args, size = self.args, self.num_generations
        check_coverage_column(
            args.coverage_column, self.train_dataset, remove_unused_columns=args.remove_unused_columns
        )
        explored, num_sketches = args.explored_rows, args.sketches_per_prompt
        self.explores = args.explores
        config: Any = self.accelerator.unwrap_model(self.model).config
        known = vars(config.get_text_config()).get("max_position_embeddings")
        served = self.serving.backend.max_served_length if self.serving is not None else None
        context_length = min(args.context_length or known or math.inf, served or math.inf)
        sketch_length = args.max_sketch_length if args.mode == "two_stage" and num_sketches else 0
        if self.explores and context_length - max(sketch_length, self.max_completion_length) < 1:
            raise ValueError(
                f"`max_sketch_length={args.max_sketch_length}` and "
                f"`max_completion_length={args.max_completion_length}` leave no room for a prompt in a context of "
                f"{context_length} tokens: lower them, or set `context_length` if the model has more."
            )
        sizes: Any = dict(group_size=size, num_explored=explored, context_length=context_length)
        if args.mode == "two_stage":
            self.plain_columns = {"sketch": ""}
            self.mode = TwoStage(self, self.sample, num_sketches=num_sketches, **sizes)
        elif args.mode == "sequential":
            self.plain_columns = {"candidate": math.nan}
            self.mode = Lists(self, self.sample, **sizes)
        else:
            assert self.turns is not None
            self.mode = Actions(self, self.sample, turns=self.turns, **sizes)
            for name, tools in self.turns.world.tools_by_environment().items():
                check_actions(tools, "" if name is None else f"[{name!r}]")

    def completion_columns(self) -> dict[str, list[Any]]:
        return self.mode.columns

    def _log_group(self) -> None:
        size = self.num_generations
        rewards = self.scorer.success_here().view(len(self.main_examples) // size, size)
        successes = succeeded(rewards, threshold=self.args.success_threshold).tolist()
        covered = []
        for g, example in enumerate(self.main_examples[::size]):
            column = self.args.coverage_column
            targets = [] if column is None else read_targets(example.get(column), column)
            if targets:
                texts = [self.mode.text(ids) for ids in self.main_completion_ids[g * size : (g + 1) * size]]
                covered.append(coverage_at_k(texts, targets, size))
        own = self.mode.metrics
        if self.args.mode == "agent":
            rows = [tuple(ids) for ids in self.main_completion_ids]
            own["trajectories"] = sum(len(set(rows[i : i + size])) for i in range(0, len(rows), size))
        if self.args.mode == "two_stage":
            sketches = self.mode.columns["sketch"]
            behind = [
                [ok for ok, sketch in zip(row, sketches[g * size :], strict=False) if sketch]
                for g, row in enumerate(successes)
            ]
            own |= {"sketched": sum(map(len, behind)), "sketched_correct": sum(map(sum, behind))}
            own |= {"sketched_groups": sum(map(bool, behind)), "sketched_solved": sum(map(any, behind))}
        total = self.ranks.summed(
            {
                **own,
                "groups": len(successes),
                "correct": sum(map(sum, successes)),
                "solved": sum(map(any, successes)),
                "covered": sum(covered),
                "with_targets": len(covered),
            }
        )
        for name, value in group_metrics(total, size=size).items():
            self.log_metric(name, value)
        self.log_metric("sketch/drafting_seconds", own["drafting_seconds"])
        self.log_metric("sketch/solving_seconds", own["solving_seconds"])

"""DEEP-GRPO: branch from pivots inside failed completions, and learn from the branches in a stream of their own."""

import itertools
import math
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from trl_explore.pivots.choice import (
    Branching,
    Pivot,
    draw_pivots,
    drop_empty_end,
    failed_rows,
    pivot_distribution,
    relative_depths,
    segment_delimiters,
    segment_fixed,
)
from trl_explore.pivots.estimator import SuccessEstimator
from trl_explore.rewards.success import failed, succeeded
from trl_explore.rows.rollouts import Continuation, Rollout, Rows
from trl_explore.saving.checkpoints import path_inside
from trl_explore.saving.plain_values import from_plain, to_plain
from trl_explore.saving.whole_files import append_lines, cut_file, file_size

from .base import ExplorationTrainer
from .deep_grpo_config import DeepGRPOConfig
from .scoring import ScoredRows


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
    `trainers/README.md`):

    1. Branches whose siblings all got the same reward stay in the average unless `drop_zero_advantage=True` (App. C).
    2. The KL term follows `beta`, whose default is TRL's 0; the paper trains with 1e-4.
    3. The slope of the success estimator has a quadratic penalty, so that separable outcomes cannot diverge.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is a [`DeepGRPOConfig`] or a plain
    [`~trl.GRPOConfig`]. Tools, environments, vision-language models and `rollout_func` are refused.
    """

    _tag_names = ["trl", "grpo", "trl-explore", "deep-grpo"]
    _name = "DEEP-GRPO"
    card_template = "deep_grpo"
    _paper = {
        "title": "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling",
        "id": "2602.14169",
        "citation": textwrap.dedent("""\
            @article{guo2026deep,
                title        = {{Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling}},
                author       = {Yiran Guo and Zhongjian Qiao and Yingqi Xie and Jie Liu and others},
                year         = 2026,
                eprint       = {arXiv:2602.14169},
            }"""),  # fmt: skip
    }

    max_completion_length: int
    num_generations: int
    config_class = DeepGRPOConfig
    samples_extra_rows = True
    trains_extra_rows = True

    def setup(self) -> None:
        super().setup()
        args = self.args
        self.estimator = SuccessEstimator(
            buffer_size=args.estimator_buffer_size, l2=args.estimator_l2, min_samples=args.estimator_min_samples
        )
        # Equal on all processes: it decides which pivots of the whole batch are kept.
        self._shared_generator = torch.Generator().manual_seed(args.seed)
        self._delimiter_cache: dict[int, str] = {}
        self._num_cut = 0  # completions with a cut, of those that pivots were drawn in
        self._warned = False
        self._num_generation_batches = 0
        self._queue: list[Branching] = []
        self._pivot_depths: dict[int | None, float] = {}  # of the first pivot of each main row that has one
        self._recovered: dict[int | None, bool] = {}  # whether a branch of the row succeeded

    # ------------------------------------------------------------------------------------------------ the algorithm

    def extra_streams(
        self, output: dict[str, Any], examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        start = time.perf_counter()
        chosen = self._choose(output, examples)
        own_seconds = time.perf_counter() - start
        self._pivot_depths = {b.row: b.depth for b in reversed(chosen)}
        if self.args.deferred_branching:
            self._check_columns(examples)
            # What was sampled together with this batch is trained now; this batch's pivots go with the next one.
            branchings, self._queue = self._queue, chosen
            for branching in branchings:
                branching.row = None
        else:
            branchings = chosen
            self._sample_branches(branchings)
        start = time.perf_counter()
        rows = self._branch_rows(branchings)
        own_seconds += time.perf_counter() - start

        scored = self.score("aux", rows)
        start = time.perf_counter()
        solved = self._learn_from(branchings, scored)
        self._recovered = {}
        for branching, ok in zip(branchings, solved, strict=True):
            if ok is not None:
                self._recovered[branching.row] = ok or self._recovered.get(branching.row, False)
        own_seconds += time.perf_counter() - start
        self._log_pivots(branchings, solved, scored, own_seconds)
        if self.args.hard_states_file is not None:
            self._write_hard_states([b for b, ok in zip(branchings, solved, strict=True) if ok is False])
        return {} if scored is None else {"aux": (scored, self.args.aux_loss_weight)}

    def rollout(self, prompt_ids, plain):
        if not self.args.deferred_branching:
            return plain(prompt_ids)
        prefixes = [b.prompt_ids + b.prefix_ids for b in self._queue for _ in range(self.args.num_branches)]
        sampled = plain(prompt_ids + prefixes)
        logprobs = sampled.logprobs or [None] * len(sampled.completion_ids)
        branches = zip(sampled.completion_ids[len(prompt_ids) :], logprobs[len(prompt_ids) :], strict=True)
        most = self._budget(sampled.completion_ids[: len(prompt_ids)])
        for branching in self._queue:
            budget = max(1, most - len(branching.prefix_ids))  # without a limit, the batch of the pivot had another
            branching.branches = [
                Continuation(ids[:budget], logprobs=values and values[:budget])
                for ids, values in itertools.islice(branches, self.args.num_branches)
            ]
        num_main = len(prompt_ids)
        return Rollout(sampled.completion_ids[:num_main], sampled.logprobs and sampled.logprobs[:num_main])

    def _check_columns(self, examples: list[dict[str, Any]]) -> None:
        """Examples wait in checkpoints for their branches; what cannot wait there is told before the first step."""
        for name, value in examples[0].items():
            try:
                to_plain(value)
            except TypeError as error:
                raise ValueError(
                    f"`deferred_branching=True` keeps examples in checkpoints, which cannot hold the {error} of the "
                    f"column {name!r}: convert the column, for example to text, or set `deferred_branching=False`."
                ) from None

    def _choose(self, output, examples) -> list[Branching]:
        rewards = self._success_rewards()
        chosen = failed_rows(
            rewards,
            threshold=self.args.success_threshold,
            group_size=self.num_generations,
            branch_from=self.args.branch_from,
        )
        failures = failed(rewards, threshold=self.args.success_threshold)
        self.log_metric("pivots/failure_fraction", failures.float().mean().item())
        pivots = [p for row in self.local(chosen).nonzero().squeeze(1).tolist() for p in self._draw(row)]
        self._warn_without_cuts(int(chosen.sum()))
        if self.args.max_pivots_per_batch is not None:
            pivots = self._capped(pivots, self.args.max_pivots_per_batch)
        prompt_ids = self.prompt_token_ids(output)
        return [
            Branching(
                example=examples[p.row],
                prompt_ids=prompt_ids[p.row],
                prefix_ids=self.main_completion_ids[p.row][: p.start],
                depth=p.depth,
                row=p.row,
            )
            for p in pivots
        ]

    def _warn_without_cuts(self, num_drawn: int) -> None:
        if self._warned or not num_drawn or self.args.pivot_selection == "root":
            return
        self._warned = True  # looked at once, in the first batch with a failure
        if self.gathered(self._num_cut).sum() == 0 and self.accelerator.is_main_process:
            fixed = self.args.segmentation == "fixed"
            where = "shorter than a segment" if fixed else f"without any of {self.args.segment_delimiters!r}"
            fields = "a smaller `segment_length`" if fixed else "other `segment_delimiters`, or `segmentation='fixed'`"
            warnings.warn(
                f"All {num_drawn} failed completions of the first batch with failures are {where}, so that they could "
                f"not be cut: branches start from the prompt. Choose {fields}.",
                stacklevel=2,
            )

    def _draw(self, row: int) -> list[Pivot]:
        ids = self.main_completion_ids[row]
        starts = drop_empty_end(self._segment(ids), ids, self._tokenizer, end_ids=self.eos_token_ids)
        depths = relative_depths(len(starts))
        self._num_cut += len(starts) > 1
        budget = self._budget(self.main_completion_ids)
        last = max(0, budget - (self.args.min_remaining_tokens or max(1, budget // 10)))
        possible = torch.tensor([start <= last for start in starts])
        if self.args.pivot_selection == "root":
            # As many groups as there would be elsewhere, so that the control has its rivals' budget.
            return [Pivot(row, 0, float(depths[0]))] * min(self.args.num_pivots, int(possible.sum()))
        if self.args.pivot_selection == "uniform":
            probs = pivot_distribution(torch.ones_like(depths), gamma=0.0, possible=possible)
        else:
            predicted = self.estimator.predict(depths)
            probs = pivot_distribution(predicted, gamma=self.args.depth_bias, possible=possible)
        drawn = draw_pivots(probs, self.args.num_pivots, generator=self.exploration_generator)
        return [Pivot(row, starts[t], float(depths[t])) for t in drawn]

    def _segment(self, ids: list[int]) -> list[int]:
        if self.args.segmentation == "fixed":
            most = self._budget(self.main_completion_ids)
            return segment_fixed(len(ids), length=self.args.segment_length or min(50, most))
        return segment_delimiters(
            ids, self._tokenizer, delimiters=self.args.segment_delimiters, cache=self._delimiter_cache
        )

    def _budget(self, completion_ids: list[list[int]]) -> int:
        """
        Most tokens of a completion. With `max_completion_length=None` the backend decides that for the main rows;
        branches then end where the longest main row of this process ends.
        """
        return self.max_completion_length or max(map(len, completion_ids))

    def _capped(self, pivots: list[Pivot], limit: int) -> list[Pivot]:
        """Keep `limit` pivots of the whole batch: every completion's first one before anybody's second."""
        turns: list[int] = []
        for i, pivot in enumerate(pivots):
            turns.append(turns[-1] + 1 if i and pivots[i - 1].row == pivot.row else 0)
        per_process = gather_object([turns])
        everyone = torch.tensor([turn for of_process in per_process for turn in of_process], dtype=torch.float64)
        tie_break = torch.rand(len(everyone), generator=self._shared_generator, dtype=torch.float64)
        kept = set((everyone + tie_break).argsort()[:limit].tolist())
        first = sum(len(of_process) for of_process in per_process[: self.accelerator.process_index])
        return [pivot for i, pivot in enumerate(pivots, start=first) if i in kept]

    def _sample_branches(self, branchings: list[Branching]) -> None:
        most = self._budget(self.main_completion_ids)
        continuations = self.sample(
            [b.prompt_ids + b.prefix_ids for b in branchings],
            self.args.num_branches,
            [most - len(b.prefix_ids) for b in branchings],
        )
        for branching, branches in zip(branchings, continuations, strict=True):
            branching.branches = branches

    def _branch_rows(self, branchings: list[Branching]) -> Rows:
        pairs = [(b, branch) for b in branchings for branch in b.branches]
        return Rows(
            examples=[dict(b.example) for b, _ in pairs],
            prompt_ids=[b.prompt_ids for b, _ in pairs],
            completion_ids=[b.prefix_ids + branch.token_ids for b, branch in pairs],
            loss_mask=[[0] * len(b.prefix_ids) + [1] * len(branch.token_ids) for b, branch in pairs],
            group_size=self.args.num_branches,
            parents=[b.row for b, _ in pairs],
            # The sampler saw the prefixes as prompts; they are not trained.
            logprobs=[[*[0.0] * len(b.prefix_ids), *(branch.logprobs or [])] for b, branch in pairs]
            if self.use_vllm
            else None,
        )

    def _learn_from(self, branchings: list[Branching], scored: ScoredRows | None) -> list[bool | None]:
        """
        Teach the estimator which pivots were recovered; all processes see all outcomes, in the same order. `None` is a
        pivot none of whose branches could be scored.
        """
        self._num_generation_batches += 1
        solved: list[bool | None] = []
        if scored is not None:
            success = succeeded(scored.success_rewards, threshold=self.args.success_threshold)
            success = success.view(-1, self.args.num_branches)
            unknown = scored.success_rewards.isnan().view(-1, self.args.num_branches).all(dim=1).tolist()
            solved = [None if u else ok for ok, u in zip(success.any(dim=1).tolist(), unknown, strict=True)]
        known = [(b.depth, int(ok)) for b, ok in zip(branchings, solved, strict=True) if ok is not None]
        outcomes = gather_object(known)
        if outcomes:
            self.estimator.add(*zip(*outcomes, strict=True))
        if self._num_generation_batches % self.args.estimator_update_steps == 0:
            self.estimator.fit()
        return solved

    # ------------------------------------------------------------------------------------------- metrics, files, state

    def _log_pivots(self, branchings, solved, scored, own_seconds: float) -> None:
        branches = [branch for b in branchings for branch in b.branches]
        spread = 0
        if scored is not None:
            advantages = scored.rows["advantages"][: len(scored.rewards)]
            spread = int(advantages.view(-1, self.args.num_branches).any(dim=1).sum())
        suffix_tokens = sum(len(branch.token_ids) for branch in branches)
        main_tokens = sum(len(ids) for ids in self.main_completion_ids)
        tried, known, recovered, informative, depth, num_branches, aux, main = (
            self.gathered(value).sum().item()
            for value in (
                len(branchings),
                sum(ok is not None for ok in solved),
                sum(ok is True for ok in solved),
                spread,
                sum(b.depth for b in branchings),
                len(branches),
                suffix_tokens,
                main_tokens,
            )
        )
        self.log_metric("pivots/tried", tried)
        self.log_metric("pivots/success_weight", self.estimator.weight)
        self.log_metric("pivots/success_bias", self.estimator.bias)
        self.log_metric("pivots/token_ratio", aux / main)
        self.log_metric("pivots/sampled_tokens", aux)
        self.log_metric("pivots/own_seconds", own_seconds)
        if known:
            self.log_metric("pivots/recovered_fraction", recovered / known)
        if tried:
            self.log_metric("pivots/informative_fraction", informative / tried)
            self.log_metric("pivots/mean_depth", depth / tried)
            self.log_metric("pivots/mean_suffix_length", aux / num_branches)

    def completion_columns(self) -> dict[str, list[Any]]:
        rows = range(len(self.main_completion_ids))
        return {
            **super().completion_columns(),
            "pivot_depth": [self._pivot_depths.get(row, math.nan) for row in rows],
            "recovered": [float(self._recovered.get(row, math.nan)) for row in rows],
        }

    def method_files(self) -> list[str]:
        own = [self.args.hard_states_file] if self.args.hard_states_file else []
        return [*super().method_files(), *own]

    @property
    def _hard_states_path(self) -> Path:
        return path_inside(self.args.output_dir, self.args.hard_states_file, field="hard_states_file")

    def _write_hard_states(self, unrecovered: list[Branching]) -> None:
        records = [
            {
                "step": self.state.global_step,
                "prompt": b.example["prompt"],
                "prefix": self._tokenizer.decode(b.prefix_ids),
                "prompt_ids": b.prompt_ids,
                "prefix_ids": b.prefix_ids,
                "depth": b.depth,
            }
            for b in unrecovered
        ]
        records = gather_object(records)
        if self.accelerator.is_main_process:
            append_lines(self._hard_states_path, records)

    def exploration_state(self) -> dict[str, Any]:
        return {
            **super().exploration_state(),
            "estimator": self.estimator.state_dict(),
            "shared_generator": self._shared_generator.get_state(),
            "num_generation_batches": self._num_generation_batches,
            # A resumed run writes what came after the checkpoint again, so the file goes back to its length here.
            "hard_states_bytes": file_size(self._hard_states_path) if self.args.hard_states_file else 0,
            "queue": [[to_plain(b.example), b.prompt_ids, b.prefix_ids, b.depth] for b in self._queue],
        }

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        super().load_exploration_state(state)
        self.estimator.load_state_dict(state["estimator"])
        self._shared_generator.set_state(state["shared_generator"])
        self._num_generation_batches = state["num_generation_batches"]
        queue = state["queue"] if self.args.deferred_branching else []
        self._queue = [Branching(from_plain(example), *fields) for example, *fields in queue]
        if self.args.hard_states_file and self.accelerator.is_main_process:
            cut_file(self._hard_states_path, state["hard_states_bytes"])

"""DEEP-GRPO: branch from pivots inside failed completions, and learn from the branches in a stream of their own."""

import itertools
import math
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from trl_explore.checkpoints import append_lines, cut_file, file_size, path_inside
from trl_explore.names import explain_unknown_fields, unknown_name
from trl_explore.pivots import (
    Branching,
    Pivot,
    SuccessEstimator,
    draw_pivots,
    failed_rows,
    pivot_distribution,
    relative_depths,
    segment_delimiters,
    segment_fixed,
)
from trl_explore.rollouts import Continuation, Rollout, Rows

from .base import ExplorationTrainer
from .config import ExplorationConfig
from .scoring import ScoredRows

CHOICES = {
    "segmentation": ("delimiter", "fixed"),
    "pivot_selection": ("utility", "uniform", "root"),
    "branch_from": ("failures", "failed_groups", "all"),
}


@explain_unknown_fields
@dataclass
class DeepGRPOConfig(ExplorationConfig):
    r"""
    Configuration of [`DeepGRPOTrainer`]: every field of [`~trl.GRPOConfig`] and the knobs of DEEP-GRPO.

    Fields of GRPO keep TRL's defaults; the paper trains with `beta=1e-4`, 64 prompts per step and 8 generations.

    Args:
        success_threshold (`float`, *optional*, defaults to `1.0`):
            A completion whose total reward is below it has failed.
        num_branches (`int`, *optional*, defaults to `8`):
            Continuations K sampled from each pivot, at least 2.
        num_pivots (`int`, *optional*, defaults to `1`):
            Pivots per failed completion, drawn without replacement.
        aux_loss_weight (`float`, *optional*, defaults to `1.0`):
            Weight lambda of the branches' stream, at least 0. 0 trains plain GRPO and only measures the pivots.
        depth_bias (`float`, *optional*, defaults to `2.0`):
            Exponent gamma of Eq. 1; larger values branch later, 0 ignores depth, negative values branch early.
        segmentation (`str`, *optional*, defaults to `"delimiter"`):
            Where a completion may be cut: `"delimiter"` after the texts of `segment_delimiters`, `"fixed"` every
            `segment_length` tokens.
        segment_length (`int`, *optional*):
            Tokens per segment with `segmentation="fixed"`. `None` means 50, or `max_completion_length`
            if that is less.
        segment_delimiters (`list[str]`, *optional*, defaults to `[".", "\n"]`):
            Texts that end a segment with `segmentation="delimiter"`.
        pivot_selection (`str`, *optional*, defaults to `"utility"`):
            `"utility"` is Eq. 1. The two controls that a comparison needs: `"uniform"` draws any cut, `"root"`
            resamples the whole completion.
        branch_from (`str`, *optional*, defaults to `"failures"`):
            `"failures"` branches from every failed completion, `"failed_groups"` only where no completion of the
            prompt succeeded, `"all"` from successes too (the paper's expand-all ablation).
        max_pivots_per_batch (`int`, *optional*):
            Largest number of pivots per generation batch over all processes, drawn fairly over the completions. `None`
            sets no limit.
        estimator_buffer_size (`int`, *optional*, defaults to `10000`):
            Outcomes that the success estimator remembers.
        estimator_min_samples (`int`, *optional*, defaults to `10`):
            Outcomes before its first fit; until then all depths are equally promising.
        estimator_update_steps (`int`, *optional*, defaults to `1`):
            Generation batches between two fits.
        estimator_l2 (`float`, *optional*, defaults to `0.001`):
            Weight of the estimator's quadratic penalty, positive.
        deferred_branching (`bool`, *optional*, defaults to `False`):
            Sample the branches together with the next generation batch instead of in a second call (the paper's
            appendix H). Saves a generation call per batch; branches then start from states of the previous policy.
        hard_states_file (`str`, *optional*):
            File inside `output_dir` to which every pivot without a successful branch is appended as a JSON line.
    """

    success_threshold: float = field(default=1.0, metadata={"help": "A completion with a smaller reward has failed."})
    num_branches: int = field(default=8, metadata={"help": "Continuations K per pivot, at least 2."})
    num_pivots: int = field(default=1, metadata={"help": "Pivots per failed completion."})
    aux_loss_weight: float = field(default=1.0, metadata={"help": "Weight lambda of the branches' stream."})
    depth_bias: float = field(default=2.0, metadata={"help": "Exponent gamma of the depth bias (Eq. 1)."})
    segmentation: str = field(default="delimiter", metadata={"help": "Where to cut: 'delimiter' or 'fixed'."})
    segment_length: int | None = field(
        default=None,
        metadata={"help": "Tokens per segment for 'fixed'; None: 50, or less for short completions."},
    )
    segment_delimiters: list[str] = field(
        default_factory=lambda: [".", "\n"], metadata={"help": "Texts that end a segment for 'delimiter'."}
    )
    pivot_selection: str = field(
        default="utility", metadata={"help": "'utility' (Eq. 1), or the controls 'uniform' and 'root'."}
    )
    branch_from: str = field(
        default="failures", metadata={"help": "Completions to branch from: 'failures', 'failed_groups' or 'all'."}
    )
    max_pivots_per_batch: int | None = field(
        default=None, metadata={"help": "Largest number of pivots per generation batch; None: no limit."}
    )
    estimator_buffer_size: int = field(default=10_000, metadata={"help": "Outcomes the estimator remembers."})
    estimator_min_samples: int = field(default=10, metadata={"help": "Outcomes before the estimator's first fit."})
    estimator_update_steps: int = field(default=1, metadata={"help": "Generation batches between two fits."})
    estimator_l2: float = field(default=1e-3, metadata={"help": "Weight of the estimator's quadratic penalty."})
    deferred_branching: bool = field(
        default=False, metadata={"help": "Sample branches together with the next generation batch."}
    )
    hard_states_file: str | None = field(
        default=None, metadata={"help": "File inside output_dir for pivots without a successful branch (JSON lines)."}
    )

    def validate(self) -> None:
        super().validate()
        for name, choices in CHOICES.items():
            value = vars(self)[name]
            if value not in choices:
                raise ValueError(f"`{name}`: {unknown_name('value', str(value), choices)}")
        least = {"num_branches": 2, "num_pivots": 1, "estimator_buffer_size": 1, "estimator_update_steps": 1}
        for name, minimum in least.items():
            if vars(self)[name] < minimum:
                why = "; a branch's advantage is relative to its siblings" if name == "num_branches" else ""
                raise ValueError(f"`{name}={vars(self)[name]}` must be at least {minimum}{why}.")
        for name in ("aux_loss_weight", "depth_bias", "success_threshold", "estimator_l2"):
            if not math.isfinite(vars(self)[name]):
                raise ValueError(f"`{name}={vars(self)[name]}` must be a finite number.")
        if self.aux_loss_weight < 0:
            raise ValueError(f"`aux_loss_weight={self.aux_loss_weight}` must not be negative; 0 switches it off.")
        if self.estimator_l2 <= 0:
            raise ValueError(f"`estimator_l2={self.estimator_l2}` must be positive, or separable outcomes diverge.")
        if self.max_pivots_per_batch is not None and self.max_pivots_per_batch < 1:
            raise ValueError(f"`max_pivots_per_batch={self.max_pivots_per_batch}` must be at least 1, or None.")
        if not self.segment_delimiters or not all(self.segment_delimiters):
            raise ValueError(f"`segment_delimiters={self.segment_delimiters!r}` must hold non-empty texts.")
        if self.segment_length is not None and not 1 <= self.segment_length <= (self.max_completion_length or 0):
            raise ValueError(
                f"`max_completion_length={self.max_completion_length}` is smaller than one segment of "
                f"`segment_length={self.segment_length}` tokens: there would be nothing to branch from but the "
                "prompt. Lower `segment_length` or raise `max_completion_length`."
                if self.segment_length > 0
                else f"`segment_length={self.segment_length}` must be at least 1 token."
            )
        if self.hard_states_file is not None:
            path_inside(self.output_dir or ".", self.hard_states_file, field="hard_states_file")


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
    3. The success estimator has a quadratic penalty, so that separable outcomes cannot diverge.

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

    def setup(self) -> None:
        args = self.args
        self.estimator = SuccessEstimator(
            buffer_size=args.estimator_buffer_size, l2=args.estimator_l2, min_samples=args.estimator_min_samples
        )
        # Equal on all processes: it decides which pivots of the whole batch are kept.
        self._shared_generator = torch.Generator().manual_seed(args.seed)
        self._delimiter_cache: dict[int, bool] = {}
        self._num_generation_batches = 0
        self._queue: list[Branching] = []

    # ------------------------------------------------------------------------------------------------ the algorithm

    def extra_streams(
        self, output: dict[str, Any], examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        start = time.perf_counter()
        chosen = self._choose(output, examples, rewards)
        own_seconds = time.perf_counter() - start
        if self.args.deferred_branching:
            # What was sampled together with this batch is trained now; this batch's pivots go with the next one.
            branchings, self._queue = self._queue, chosen
        else:
            branchings = chosen
            self._sample_branches(branchings)
        start = time.perf_counter()
        rows = self._branch_rows(branchings)
        own_seconds += time.perf_counter() - start

        scored = self.score("aux", rows)
        start = time.perf_counter()
        solved = self._learn_from(branchings, scored)
        own_seconds += time.perf_counter() - start
        self._log_pivots(branchings, solved, scored, own_seconds)
        if self.args.hard_states_file is not None:
            self._write_hard_states([b for b, ok in zip(branchings, solved, strict=True) if not ok])
        return {} if scored is None else {"aux": (scored, self.args.aux_loss_weight)}

    def rollout(self, prompt_ids, plain):
        if not self.args.deferred_branching:
            return plain(prompt_ids)
        prefixes = [b.prompt_ids + b.prefix_ids for b in self._queue for _ in range(self.args.num_branches)]
        sampled = plain(prompt_ids + prefixes)
        logprobs = sampled.logprobs or [None] * len(sampled.completion_ids)
        branches = zip(sampled.completion_ids[len(prompt_ids) :], logprobs[len(prompt_ids) :], strict=True)
        for branching in self._queue:
            budget = self.max_completion_length - len(branching.prefix_ids)
            branching.branches = [
                Continuation(ids[:budget], logprobs=values and values[:budget])
                for ids, values in itertools.islice(branches, self.args.num_branches)
            ]
        num_main = len(prompt_ids)
        return Rollout(sampled.completion_ids[:num_main], sampled.logprobs and sampled.logprobs[:num_main])

    def _choose(self, output, examples, rewards) -> list[Branching]:
        failed = failed_rows(
            rewards,
            threshold=self.args.success_threshold,
            group_size=self.num_generations,
            branch_from=self.args.branch_from,
        )
        self.log_metric("pivots/failure_fraction", (rewards < self.args.success_threshold).float().mean().item())
        pivots = [p for row in self.local(failed).nonzero().squeeze(1).tolist() for p in self._draw(row)]
        if self.args.max_pivots_per_batch is not None:
            pivots = self._capped(pivots, self.args.max_pivots_per_batch)
        prompt_ids = self.prompt_token_ids(output)
        return [
            Branching(
                example=examples[p.row],
                prompt_ids=prompt_ids[p.row],
                prefix_ids=self.main_completion_ids[p.row][: p.start],
                depth=p.depth,
            )
            for p in pivots
        ]

    def _draw(self, row: int) -> list[Pivot]:
        starts = self._segment(self.main_completion_ids[row])
        depths = relative_depths(len(starts))
        if self.args.pivot_selection == "root":
            return [Pivot(row, starts[0], float(depths[0]))]
        if self.args.pivot_selection == "uniform":
            probs = pivot_distribution(torch.ones_like(depths), gamma=0.0)
        else:
            probs = pivot_distribution(self.estimator.predict(depths), gamma=self.args.depth_bias)
        drawn = draw_pivots(probs, self.args.num_pivots, generator=self.exploration_generator)
        return [Pivot(row, starts[t], float(depths[t])) for t in drawn]

    def _segment(self, ids: list[int]) -> list[int]:
        if self.args.segmentation == "fixed":
            return segment_fixed(len(ids), length=self.args.segment_length or min(50, self.max_completion_length))
        return segment_delimiters(
            ids, self._tokenizer, delimiters=self.args.segment_delimiters, cache=self._delimiter_cache
        )

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
        continuations = self.sample(
            [b.prompt_ids + b.prefix_ids for b in branchings],
            self.args.num_branches,
            [self.max_completion_length - len(b.prefix_ids) for b in branchings],
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
            # The sampler saw the prefixes as prompts; they are not trained.
            logprobs=[[*[0.0] * len(b.prefix_ids), *(branch.logprobs or [])] for b, branch in pairs]
            if self.use_vllm
            else None,
        )

    def _learn_from(self, branchings: list[Branching], scored: ScoredRows | None) -> list[bool]:
        """Teach the estimator which pivots were recovered; all processes see all outcomes, in the same order."""
        self._num_generation_batches += 1
        solved: list[bool] = []
        if scored is not None:
            success = (scored.rewards >= self.args.success_threshold).view(-1, self.args.num_branches)
            solved = success.any(dim=1).tolist()
        outcomes = gather_object([(b.depth, int(ok)) for b, ok in zip(branchings, solved, strict=True)])
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
            groups = scored.rewards.nan_to_num().view(-1, self.args.num_branches)
            spread = int((groups.max(dim=1).values > groups.min(dim=1).values).sum()) if len(groups) else 0
        suffix_tokens = sum(len(branch.token_ids) for branch in branches)
        main_tokens = sum(len(ids) for ids in self.main_completion_ids)
        tried, recovered, informative, depth, num_branches, aux, main = (
            self.gathered(value).sum().item()
            for value in (
                len(branchings),
                sum(solved),
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
        if tried:
            self.log_metric("pivots/recovered_fraction", recovered / tried)
            self.log_metric("pivots/informative_fraction", informative / tried)
            self.log_metric("pivots/mean_depth", depth / tried)
            self.log_metric("pivots/mean_suffix_length", aux / num_branches)

    def method_files(self) -> list[str]:
        return [self.args.hard_states_file] if self.args.hard_states_file else []

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
            "estimator": self.estimator.state_dict(),
            "shared_generator": self._shared_generator.get_state(),
            "num_generation_batches": self._num_generation_batches,
            # A resumed run writes what came after the checkpoint again, so the file goes back to its length here.
            "hard_states_bytes": file_size(self._hard_states_path) if self.args.hard_states_file else 0,
            "queue": [[b.example, b.prompt_ids, b.prefix_ids, b.depth] for b in self._queue],
        }

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self._shared_generator.set_state(state["shared_generator"])
        self._num_generation_batches = state["num_generation_batches"]
        self._queue = [Branching(*fields) for fields in state["queue"]]
        if self.args.hard_states_file and self.accelerator.is_main_process:
            cut_file(self._hard_states_path, state["hard_states_bytes"])

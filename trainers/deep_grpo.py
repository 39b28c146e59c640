"""DEEP-GRPO: branch from pivots inside failed completions, and learn from the branches in a stream of their own."""

import itertools
import math
import time
from typing import Any

import torch

from trl_explore.agents.forks import Forks
from trl_explore.pivots.choice import BranchPoint
from trl_explore.pivots.estimator import SuccessEstimator
from trl_explore.pivots.search import PivotSearch, check_columns
from trl_explore.rows.rollouts import Continuation, Rollout
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict, row_tokens
from trl_explore.sampling.continued import options_from_the_start
from trl_explore.saving.checkpoints import path_inside
from trl_explore.saving.plain_values import from_plain, to_plain
from trl_explore.saving.whole_files import MethodFile

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
    _points: list[BranchPoint]  # those whose branches are trained with this batch
    _queue: list[BranchPoint]  # those that wait for their branches
    _pivot_depths: dict[int | None, float]  # of the first pivot of each main row that has one
    _recovered: dict[int | None, bool]  # whether a branch of the row succeeded

    # ------------------------------------------------------------------------------------------------ the algorithm

    def search(self, output: RowDict) -> None:
        super().search(output)
        start = time.perf_counter()
        explored = None if self.choice is None else self.choice.explored(self.scorer.success())
        prompt_ids = row_tokens(output)[0]
        chosen = self.pivots.choose(self.main_examples, prompt_ids, self.main_completion_ids, explored)
        self._own_seconds = time.perf_counter() - start
        self._pivot_depths = {b.row: b.depth for b in reversed(chosen)}
        if not self.args.deferred_branching:
            self._points = chosen
            self.pivots.branch(chosen, self.sample, self.pivots.budget(self.main_completion_ids))
            return
        check_columns(self.main_examples[0])
        # What was sampled together with this batch is trained now; this batch's pivots go with the next one.
        self._points, self._queue = self._queue, chosen
        for point in self._points:
            point.row = None

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        start, points = time.perf_counter(), self._points
        rows = self.pivots.rows(points)
        self._own_seconds += time.perf_counter() - start

        scored = self.scorer.score("aux", rows)
        start = time.perf_counter()
        solved = self.pivots.learn(points, scored)
        self._recovered = {}
        for point, ok in zip(points, solved, strict=True):
            if ok is not None:
                self._recovered[point.row] = ok or self._recovered.get(point.row, False)
        self._own_seconds += time.perf_counter() - start
        metrics = self.pivots.metrics(points, solved, scored, main_tokens=sum(map(len, self.main_completion_ids)))
        for name, value in {**metrics, "own_seconds": self._own_seconds}.items():
            self.log_metric(f"pivots/{name}", value)
        if self.args.hard_states_file is not None:
            unrecovered = [b for b, ok in zip(points, solved, strict=True) if ok is False]
            step, decode = self.state.global_step, self.tokenizer.decode
            self.hard_states.append(self.ranks.objects([b.record(step, decode) for b in unrecovered]))
        return {} if scored is None else {"aux": (scored, self.args.aux_loss_weight)}

    def rollout(self, prompt_ids, plain):
        if not self.args.deferred_branching:
            return plain(prompt_ids)
        prefixes = [b.prompt_ids + b.prefix_ids for b in self._queue for _ in range(self.args.num_branches)]
        sampled = plain(prompt_ids + prefixes)
        logprobs = sampled.logprobs or [None] * len(sampled.completion_ids)
        branches = zip(sampled.completion_ids[len(prompt_ids) :], logprobs[len(prompt_ids) :], strict=True)
        most = self.pivots.budget(sampled.completion_ids[: len(prompt_ids)])
        for point in self._queue:
            budget = max(1, most - len(point.prefix_ids))  # without a limit, the batch of the pivot had another
            point.branches = [
                Continuation(ids[:budget], logprobs=values and values[:budget])
                for ids, values in itertools.islice(branches, self.args.num_branches)
            ]
        num_main = len(prompt_ids)
        return Rollout(sampled.completion_ids[:num_main], sampled.logprobs and sampled.logprobs[:num_main])

    # -------------------------------------------------------------------------------------- its parts, files and state

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

    def setup(self) -> None:
        super().setup()
        args = self.args
        self.estimator = SuccessEstimator(
            buffer_size=args.estimator_buffer_size, l2=args.estimator_l2, min_samples=args.estimator_min_samples
        )
        if self.tools or self.environments:
            assert self.turns is not None
            self.forks = Forks(self, self.turns, self.sample, self.watch)
        self.pivots: PivotSearch = PivotSearch(self, self.scorer, self.estimator, self.forks)
        self._points, self._queue, self._pivot_depths, self._recovered = [], [], {}, {}
        self._own_seconds = 0.0
        file = args.hard_states_file and path_inside(args.output_dir, args.hard_states_file, field="hard_states_file")
        self.hard_states: MethodFile = MethodFile(file, writes=self.accelerator.is_main_process)

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

    def forget_data(self) -> None:
        super().forget_data()
        self._points, self._queue = [], []  # deferred branches continue prompts of the first data

    def exploration_state(self) -> dict[str, Any]:
        return {
            **super().exploration_state(),
            "estimator": self.estimator.state_dict(),
            "shared_generator": self.pivots.shared_generator.get_state(),
            "num_generation_batches": self.pivots.num_batches,
            "hard_states_bytes": self.hard_states.size,
            "queue": [[to_plain(b.example), b.prompt_ids, b.prefix_ids, b.depth] for b in self._queue],
        }

    def load_exploration_state(self, state: dict[str, Any]) -> None:
        super().load_exploration_state(state)
        self.estimator.load_state_dict(state["estimator"])
        self.pivots.shared_generator.set_state(state["shared_generator"])
        self.pivots.num_batches = state["num_generation_batches"]
        queue = state["queue"] if self.args.deferred_branching else []
        self._queue = [BranchPoint(from_plain(example), *fields) for example, *fields in queue]
        self.hard_states.cut_back(state["hard_states_bytes"])

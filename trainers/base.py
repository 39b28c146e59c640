"""The seams between exploration methods and TRL's `GRPOTrainer`.

This file, `agents.py`, `branching.py`, `completions_table.py`, `features.py`, `packing.py`, `publishing.py`,
`resume.py`, `sampling.py`, `scoring.py`, `serving.py` and `streams.py` are the only ones that name a TRL private;
`tests/test_contract.py` pins each.

A method answers up to four questions (how is a group sampled, what is a completion worth, which tokens get the credit,
which further rows are trained); the answers given here are plain GRPO's.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from trl.trainer.utils import get_config_model_id

from trl_explore.rewards.success import check_success_reward
from trl_explore.rows.advantages import combine_rewards, has_signal
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.streams import (
    LOSS_NORMALISERS,
    RowDict,
    check_loss_type,
    loss_mask,
    mask_rows,
    row_tokens,
)

from .config import ExplorationConfig, upgrade_config
from .sampling import SamplingTrainer
from .scoring import ScoredRows

Chooser = Callable[[list[list[int]]], Rollout]


class ExplorationTrainer(SamplingTrainer):
    """
    Base class of the exploration trainers; used by itself it is [`~trl.GRPOTrainer`].

    What it changes with respect to GRPO is nothing by itself. It gives subclasses four hooks ([`rollout`],
    [`shape_rewards`], [`assign_advantages`], [`extra_streams`]), three services ([`sample`], [`judge`], [`score`]),
    and it saves what a bit-exact resume needs, also off generation boundaries.

    The constructor takes what [`~trl.GRPOTrainer`] takes. `args` may be a plain [`~trl.GRPOConfig`], which gets the
    method's defaults. A subclass that samples rows itself refuses `rollout_func`, vision-language models, and, unless
    it says otherwise, tools and environments.

    Raises:
        ValueError: For a field, data set or option the method cannot work with, before any model work.
        NotImplementedError: For a sampling backend that the method does not support yet.
    """

    config_class: type[ExplorationConfig] = ExplorationConfig
    accepts_tools = False  # although it samples rows itself; a method that does not takes them as GRPO does
    accepts_vision = True  # unless it samples rows itself
    samples_extra_rows = False
    needs_whole_groups = False

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    args: Any
    main_completion_ids: list[list[int]] = []
    main_examples: list[dict[str, Any]] = []
    _shaped_rewards: torch.Tensor | None = None
    _rollout: Rollout | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            model_id = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{model_id.split('/')[-1]}-{self._name}")
        args = upgrade_config(args, self.config_class)
        self._check_arguments(args, train_dataset, tools, rollout_func, environment_factory)
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=self.prepare_tools(tools),
            rollout_func=rollout_func,
            environment_factory=self.prepare_environments(environment_factory),
        )
        check_success_reward(args.success_reward, self.reward_func_names)
        if self._is_vlm and not (self._samples_as_grpo and self.accepts_vision):
            raise ValueError(
                f"{type(self).__name__} does not support vision-language models: pass a text model or use GRPOTrainer."
            )
        self.drop_zero_advantage = args.drop_zero_advantage
        self.sampling_batch_size = args.sampling_batch_size
        self.setup()

    def _check_arguments(self, args, train_dataset, tools, rollout_func, environment_factory) -> None:
        name = type(self).__name__
        check_loss_type(args.loss_type)
        if rollout_func is not None and not self._samples_as_grpo:
            raise ValueError(
                f"`rollout_func` cannot be combined with {name}, which samples rollouts itself: remove it, or use "
                "GRPOTrainer."
            )
        if (tools or environment_factory is not None) and not (self._samples_as_grpo or self.accepts_tools):
            field = "tools" if tools else "environment_factory"
            raise ValueError(
                f"{name} does not support `{field}` (multi-turn rollouts): remove it, or use GRPOTrainer."
            )
        options = args.generation_kwargs or {}
        beams, copies = (options.get(key) or 1 for key in ("num_beams", "num_return_sequences"))
        if copies > 1:
            raise ValueError(
                f"`generation_kwargs={{'num_return_sequences': {copies}}}`: every row of a batch has one completion. "
                f"Leave it out, and raise `num_generations={args.num_generations}` for more completions per prompt."
            )
        if args.use_vllm and beams > 1:
            raise ValueError(
                f"`generation_kwargs={{'num_beams': {beams}}}`: vLLM samples without beams. Leave it out, or set "
                "`use_vllm=False`."
            )
        if args.use_vllm and args.vllm_mode == "server" and args.max_completion_length is None:
            raise ValueError(
                "`max_completion_length=None`: a vLLM server is told how long completions may be. Set a number, or "
                "`use_vllm=False`."
            )
        if args.use_vllm and self.samples_extra_rows:
            self._check_vllm(args, name)
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if self.needs_whole_groups and rows % args.num_generations:
            raise ValueError(
                f"{name} needs all completions of a prompt on one process, but its {args.num_generations} would span "
                f"several: `per_device_train_batch_size={args.per_device_train_batch_size}` times "
                f"`steps_per_generation={args.steps_per_generation}` must be a multiple of "
                f"`num_generations={args.num_generations}`. Change one of the three."
            )
        if isinstance(train_dataset, Dataset | IterableDataset) and environment_factory is None:
            columns = train_dataset.column_names
            if columns is not None and "prompt" not in columns:
                raise ValueError(
                    f"`train_dataset` has no `prompt` column, only {columns}: rename the column that holds the "
                    "prompts with `dataset.rename_column(..., 'prompt')`."
                )

    @property
    def _samples_as_grpo(self) -> bool:
        """Whether GRPO samples all rows: then tools, environments, `rollout_func` and images are its own matter."""
        cls = type(self)
        return cls.rollout is ExplorationTrainer.rollout and cls.extra_streams is ExplorationTrainer.extra_streams

    def _check_vllm(self, args, name: str) -> None:
        if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
            raise NotImplementedError(
                f"{name} samples at its own pace on every process, but `vllm_tensor_parallel_size="
                f"{args.vllm_tensor_parallel_size}` in `vllm_mode='colocate'` makes them one: set it to 1, or use "
                "`vllm_mode='server'`, whose `vllm serve --tensor-parallel-size` may be any."
            )
        if args.vllm_structured_outputs_regex is not None:
            raise ValueError(
                f"`vllm_structured_outputs_regex` describes whole completions, but {name} also samples from inside "
                "them: leave it out, or use GRPOTrainer."
            )

    # ------------------------------------------------------------------ the four hooks, and what a method may define

    def setup(self) -> None:
        """Make the method's own state; runs at the end of construction."""

    def prepare_environments(self, environment_factory: Any) -> Any:
        """Wrap what the user passed as `environment_factory`; runs before TRL sees it."""
        return environment_factory

    def prepare_tools(self, tools: Any) -> Any:
        """Wrap what the user passed as `tools`; runs before TRL sees them."""
        return tools

    def rollout(self, prompt_ids: list[list[int]], plain: Chooser) -> Rollout:
        """
        How is a group sampled? Training only.

        Args:
            prompt_ids (`list[list[int]]`):
                Prompt tokens of this process's rows, `[B][P_i]`; the rows of a group are consecutive.
            plain (`Callable[[list[list[int]]], Rollout]`):
                GRPO's own sampling: one completion per token list that it is given.

        Returns:
            [`Rollout`]: Exactly one completion per row.
        """
        return plain(prompt_ids)

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        What is a completion worth? Training only; the logged `reward` stays the raw one.

        Args:
            rewards_per_func (`torch.Tensor`):
                Raw rewards over all processes, shape `(N, F)`, groups consecutive; NaN where not scored.

        Returns:
            `torch.Tensor`: Rewards that GRPO's advantages are computed from, shape `(N, F)`.
        """
        return rewards_per_func

    def assign_advantages(self, output: RowDict) -> torch.Tensor:
        """
        Which tokens get the credit?

        Args:
            output (`dict`):
                The main rows as TRL scored them, of this process.

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        return output["advantages"]

    def extra_streams(
        self, output: RowDict, examples: list[dict[str, Any]], rewards: torch.Tensor
    ) -> dict[str, tuple[ScoredRows, float]]:
        """
        Which further rows are trained, and how strongly? Every process calls [`sample`] and [`score`] equally often.

        Args:
            output (`dict`):
                The main rows as TRL scored them, of this process.
            examples (`list[dict]`):
                The data-set examples behind them, `[B]`.
            rewards (`torch.Tensor`):
                Total raw reward per main row over all processes, shape `(N,)`; NaN where unscorable.

        Returns:
            `dict[str, tuple[ScoredRows, float]]`: Streams by name with their weight; each is averaged over its own
            rows or tokens.
        """
        return {}

    # ------------------------------------------------------------------------------------- services for the methods

    def prompt_token_ids(self, output: RowDict) -> list[list[int]]:
        """
        Prompt tokens of the main rows without padding.

        Args:
            output (`dict`):
                The main rows as TRL scored them.

        Returns:
            `list[list[int]]`: `[B][P_i]`.
        """
        return row_tokens(output)[0]

    # ---------------------------------------------------------------------------------------------- seams into TRL

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        def plain(ids: list[list[int]]) -> Rollout:
            start = time.perf_counter()
            completion_ids, logprobs = super(ExplorationTrainer, self)._generate_single_turn(
                ids, images, multimodal_fields, num_generations, has_tool_images
            )
            if self._is_training:
                self._note_seconds("main", time.perf_counter() - start)
            return Rollout(completion_ids, logprobs)

        rollout = self.rollout(prompt_ids, plain) if self._is_training else plain(prompt_ids)
        self._rollout = rollout if self._is_training else None
        logprobs = rollout.logprobs
        return rollout.completion_ids, self.unscored(rollout.completion_ids) if logprobs is None else logprobs

    def _generate(self, prompts):
        result = super()._generate(prompts)
        if self._partial is not None or self._rollout is None or self._rollout.loss_mask is None:
            return result
        prompt_ids, completion_ids, _, *others = result
        return prompt_ids, completion_ids, self._rollout.loss_mask, *others

    def _generate_and_score_completions(self, inputs):
        if not self._is_training:
            return super()._generate_and_score_completions(inputs)
        self._any_example, self.main_examples = inputs[0], inputs
        self._main_totals = None
        self._generation_seconds = {}
        output = super()._generate_and_score_completions(inputs)
        self._log_raw_rewards()
        self.watch_correction(output)
        if self.drop_zero_advantage:
            assert self._shaped_rewards is not None
            output["advantages"] = output["advantages"].masked_fill(self._equal_rewards(self._shaped_rewards), 0.0)
        output["advantages"] = self.assign_advantages(output)
        if self.drop_zero_advantage:
            keep = has_signal(output["advantages"])
            self._main_totals = self._totals(output, keep)
            if LOSS_NORMALISERS[self.loss_type] == "tokens":
                output["num_tokens"] = loss_mask(output).sum(dim=1)
                self._main_totals.num_batch_tokens = self._totals(output, torch.ones_like(keep)).num_tokens
            output = mask_rows(output, keep)
            output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], self._main_totals.num_tokens)
        # The examples are copied: TRL writes into the dictionaries that it is given.
        streams = self.extra_streams(output, [dict(example) for example in inputs], self._total_rewards())
        if self.log_completions:
            self.keep_for_table(output, {name: scored for name, (scored, _) in streams.items()})
        streams = {name: stream for name, stream in streams.items() if stream[1] > 0}
        pooled = self._pool(output, [s for s, _ in streams.values()]) if self.pools_streams and streams else None
        self._stream_steps = {name: self._prepare_stream(name, *stream, pooled) for name, stream in streams.items()}
        for name, seconds in self._generation_seconds.items():
            self.log_metric(f"generation/{name}_seconds", seconds)
        return output

    def _main_rewards(self) -> list[list[float] | None] | None:
        if self._rollout is None or self._rollout.known_rewards is None:
            return None
        # What the reward functions logged when they saw these rows, as if they saw them now.
        for column in sorted({name for row in self._rollout.extra or [] for name in row}):
            self._pending_extra_logs[column].extend(row.get(column) for row in self._rollout.extra or [])
        return list(self._rollout.known_rewards)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._partial is not None or not self._is_training:
            return rewards
        self.main_completion_ids = completion_ids_list
        self._shaped_rewards = self.shape_rewards(rewards.clone())
        return self._shaped_rewards

    def _log_raw_rewards(self) -> None:
        raw, shaped = self._rewards_per_func, self._shaped_rewards
        assert raw is not None and shaped is not None
        if torch.equal(raw.nan_to_num(), shaped.nan_to_num()):
            return
        # TRL logged the shaped rewards it normalised; users compare `reward` across methods, so it stays the raw one.
        metrics, total = self._metrics["train"], combine_rewards(raw, self.reward_weights)
        metrics["shaped_reward"].append(metrics["reward"][-1])
        metrics["reward"][-1] = total.nanmean().item()
        metrics["reward_std"][-1] = total[~total.isnan()].std().item()
        for i, name in enumerate(self.reward_func_names):
            column = raw[:, i][~raw[:, i].isnan()]
            metrics[f"rewards/{name}/mean"][-1] = column.mean().item()
            metrics[f"rewards/{name}/std"][-1] = column.std().item()
            logged: deque = self._logs["rewards"][name]
            for _ in range(min(len(raw), len(logged))):
                logged.pop()
            logged.extend(raw[:, i].tolist())

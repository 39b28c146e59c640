"""Evaluation during training: pass@k, majority vote and greedy accuracy of the current model on held-out prompts."""

import asyncio
import copy
import math
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import GenerationConfig, ProcessorMixin, Trainer, TrainerCallback, TrainerState, set_seed
from trl import apply_chat_template, is_conversational
from trl.chat_template_utils import parse_response
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_explore.evaluation.metrics import coverage_at_k, sample_metrics
from trl_explore.rewards.answers import answer_key, completion_text
from trl_explore.rewards.success import check_success_reward, is_success
from trl_explore.sampling.generation import complete


@contextmanager
def undisturbed(model: nn.Module, *, seed: int) -> Iterator[None]:
    """`model` is in eval mode and the random generators start from `seed`; afterwards all is as before."""
    # Module by module: frozen parts may be in eval mode already.
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = torch.accelerator.current_accelerator()
    devices = range(torch.accelerator.device_count())  # seeding reaches all, not only the one in use
    try:
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"):
            set_seed(seed)
            model.eval()
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, training in modes:
            module.training = training


class PassAtKCallback(TrainerCallback):
    """
    Logs pass@k of the current model on held-out prompts during training, and leaves no trace in the training.

    Random states, training flags, metric accumulators, token counts and the generation config are afterwards as
    before: parameters and training metrics of a run are the same with and without it. Completions come from the
    training model through `generate`, even where training samples with vLLM. Logged, and kept in `history`
    (`list[dict]`, with the step): `eval/pass_at_{k}`, `eval/maj_at_{k}`, `eval/greedy_accuracy`, `eval/reward` and
    `eval/coverage_at_{k}`, as defined by [`~trl_explore.evaluation.metrics.sample_metrics`] on the weighted sums of
    rewards. The last evaluation's `successes` are there too: how many samples of each prompt succeeded (`"correct"`),
    and whether its greedy completion did (`"greedy_correct"`); without a reward, none.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, of this class or a subclass, that the callback is added to.
        eval_dataset ([`~datasets.Dataset`] or `list[dict]`):
            Prompts in a column `prompt`, plain or conversational, and the columns that the reward functions read.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Synchronous reward functions that decide success. `None` for the trainer's own, with their weights.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function. `None` for the trainer's, or 1 each for `reward_funcs` given here.
        num_samples (`int`, *optional*, defaults to `8`):
            Samples per prompt.
        k (`Sequence[int]`, *optional*, defaults to `(1, 8)`):
            Values of k for pass@k. Each in `[1, num_samples]`.
        maj_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for the majority vote. Each in `[1, num_samples]`.
        coverage_k (`Sequence[int]`, *optional*, defaults to `()`):
            Values of k for coverage@k, the share of a prompt's `targets` that its first k answers hit: a column of
            lists that every row then needs. Each in `[1, num_samples]`.
        every (`int`, *optional*):
            Optimizer steps between evaluations. `None` for the trainer's `eval_steps`; where these are not set either,
            only the beginning and the end of training are evaluated.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature, positive. The other sampling options are those of the training arguments.
        max_completion_length (`int`, *optional*):
            Most tokens per completion. `None` for the trainer's.
        greedy (`bool`, *optional*, defaults to `True`):
            Whether to decode one more completion per prompt greedily.
        answer_fn (`Callable`, *optional*, defaults to [`~trl_explore.rewards.answers.answer_key`]):
            Text of a completion to its answer (hashable, `None` for none), for the majority vote and coverage.
        success_threshold (`float`, *optional*):
            Smallest weighted sum of rewards that counts as success. `None` stands for a reward of 1 from the only
            reward function, or from the one that `success_reward` names; else it must be given.
        success_reward (`str`, *optional*):
            Name of the reward function that decides success, as it returns it, without its weight. `None` for the
            weighted sum.
        batch_size (`int`, *optional*, defaults to `64`):
            Completions per `generate` call and process. Positive.
        seed (`int`, *optional*, defaults to `0`):
            Seed of each evaluation: all draw the same random numbers, which makes their differences less noisy.
        metric_prefix (`str`, *optional*, defaults to `"eval"`):
            First part of the logged names.
        at_begin (`bool`, *optional*, defaults to `True`):
            Whether to evaluate before the first step. The end is always evaluated; no step is evaluated twice.

    Raises:
        `ValueError`: If an argument is outside its range, the reward functions leave open what success is, or the
        trainer has tools, environments, a `rollout_func` or a multimodal processor.
    """

    def __init__(
        self,
        trainer: Any,
        eval_dataset: Iterable[dict[str, Any]],
        *,
        reward_funcs: Callable | list[Callable] | None = None,
        reward_weights: Sequence[float] | None = None,
        num_samples: int = 8,
        k: Sequence[int] = (1, 8),
        maj_k: Sequence[int] = (),
        coverage_k: Sequence[int] = (),
        every: int | None = None,
        temperature: float = 1.0,
        max_completion_length: int | None = None,
        greedy: bool = True,
        answer_fn: Callable[[str], Hashable | None] = answer_key,
        success_threshold: float | None = None,
        success_reward: str | None = None,
        batch_size: int = 64,
        seed: int = 0,
        metric_prefix: str = "eval",
        at_begin: bool = True,
    ) -> None:
        self.trainer = trainer
        self.rows = [dict(row) for row in eval_dataset]
        if reward_funcs is None:
            funcs, processing_classes = list(trainer.reward_funcs), trainer.reward_processing_classes
            weights, names = trainer.reward_weights.tolist(), list(trainer.reward_func_names)
        else:
            funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            processing_classes, weights = [None] * len(funcs), [1.0] * len(funcs)
            if any(isinstance(func, nn.Module) or is_async_callable(func) for func in funcs):
                raise ValueError(
                    "reward_funcs must be synchronous functions; for reward models and async functions pass them to "
                    "the trainer and leave reward_funcs out."
                )
            names = [*map(get_callable_name, funcs)]
        weights = weights if reward_weights is None else list(reward_weights)
        if len(weights) != len(funcs):
            raise ValueError(
                f"reward_weights must have one weight per reward function, got {len(weights)} for {len(funcs)}."
            )
        self.rewards: list[tuple[Any, Any, float]] = list(zip(funcs, processing_classes, weights, strict=True))
        check_success_reward(success_reward, names)
        self.reward_names, self.success_reward = names, success_reward
        self.num_samples, self.k, self.maj_k, self.coverage_k = num_samples, tuple(k), tuple(maj_k), tuple(coverage_k)
        self.temperature, self.greedy, self.batch_size, self.seed = temperature, greedy, batch_size, seed
        self.every, self.at_begin = every, at_begin
        length = trainer.args.max_completion_length if max_completion_length is None else max_completion_length
        self.max_completion_length = length
        self.answer_fn, self.metric_prefix = answer_fn, metric_prefix
        self.history: list[dict[str, float]] = []
        self.successes: dict[str, list[int]] = {}
        if success_threshold is None and success_reward is None and len(funcs) != 1:
            raise ValueError(
                f"success_threshold must be given, because the sum of {len(funcs)} rewards does not say what success "
                f"is; or name the one function that does as success_reward, or pass it alone as reward_funcs."
            )
        perfect = weights[0] if success_reward is None else 1.0
        self.success_threshold = perfect if success_threshold is None else success_threshold
        if not self.rows or any("prompt" not in row for row in self.rows):
            raise ValueError("eval_dataset must have rows, each with a `prompt`; rename the column of the prompts.")
        if not self.k or not all(1 <= value <= num_samples for value in self.k + self.maj_k + self.coverage_k):
            raise ValueError(
                f"k, maj_k and coverage_k must be between 1 and num_samples={num_samples}, got k={self.k}, "
                f"maj_k={self.maj_k}, coverage_k={self.coverage_k}; raise num_samples or lower them."
            )
        if self.coverage_k and not all(row.get("targets") for row in self.rows):
            raise ValueError(
                "coverage_k needs a column `targets` with a list of targets in every row of eval_dataset."
            )
        if temperature <= 0 or batch_size < 1 or (every is not None and every < 1):
            raise ValueError(
                f"temperature, batch_size and every must be positive, got temperature={temperature}, "
                f"batch_size={batch_size}, every={every}; greedy=True decodes greedily."
            )
        episodes = trainer.tools or trainer.environment_factories is not None or trainer.rollout_func is not None
        if episodes or isinstance(trainer.processing_class, ProcessorMixin):
            raise ValueError(
                "Sampled here are text completions of a single turn, and the trainer has tools, environments, a "
                "rollout_func or a multimodal processor; evaluate with the trainer's eval_dataset instead."
            )

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.at_begin:
            self._report(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        every = self.every
        if every is None and args.eval_steps is not None:
            every = state.eval_steps  # the arguments' value may be a share of the run; the state's is resolved
        if every is not None and state.global_step % every == 0:
            self._report(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._report(state)

    def _report(self, state: TrainerState) -> None:
        key = f"{self.metric_prefix}/pass_at_{self.k[0]}"
        if any(entry["step"] == state.global_step and key in entry for entry in state.log_history):
            return
        metrics = self.evaluate()
        self.history.append({"step": state.global_step, **metrics})
        # GRPOTrainer.log would average and clear the training metrics gathered so far; the parent's only logs. It also
        # takes the pending order to log the training step as carried out.
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, dict(metrics))
        self.trainer.control.should_log = should_log

    def evaluate(self) -> dict[str, float]:
        """
        Evaluates the current model without logging; every process must call it.

        Returns:
            `dict[str, float]`: The metrics under their logged names, equal on all processes.
        """
        accelerator = self.trainer.accelerator
        rank, num_ranks, num_rows = accelerator.process_index, accelerator.num_processes, len(self.rows)
        # Sharded models wait for each other in every forward pass, so each rank takes as many rows: some come twice.
        share = [i % num_rows for i in range(rank, math.ceil(num_rows / num_ranks) * num_ranks, num_ranks)]
        with undisturbed(self.trainer.model_wrapped, seed=self.seed + rank):
            sampled = self._evaluate_rows(share, self.num_samples, do_sample=True)
            greedy = self._evaluate_rows(share, 1, do_sample=False) if self.greedy else [([], [], [])] * len(share)
        by_index = dict(gather_object([(i, records) for i, *records in zip(share, sampled, greedy, strict=True)]))
        samples, best = zip(*(by_index[index] for index in range(num_rows)), strict=True)
        totals, rewards, answers = zip(*samples, strict=True)  # (P, N) each
        greedy_rewards = [of_prompt[0] for _, of_prompt, _ in best] if self.greedy else None
        threshold = self.success_threshold
        kinds = {"correct": rewards} | (
            {"greedy_correct": [of_prompt for _, of_prompt, _ in best]} if self.greedy else {}
        )
        self.successes = {
            kind: [sum(is_success(reward, threshold=threshold) for reward in of_prompt) for of_prompt in given]
            for kind, given in kinds.items()
        }
        metrics = sample_metrics(
            rewards, answers, greedy_rewards, threshold=threshold, k=self.k, maj_k=self.maj_k, totals=totals
        )
        for k in self.coverage_k:
            covered = [coverage_at_k(a, row["targets"], k) for a, row in zip(answers, self.rows, strict=True)]
            metrics[f"coverage_at_{k}"] = math.fsum(covered) / len(covered)
        return {f"{self.metric_prefix}/{name}": value for name, value in metrics.items()}

    def sample_rewards(self, indices: list[int], *, seed: int) -> list[list[float | None]]:
        """
        Rewards that decide success, of `num_samples` completions of some of the rows; every process must call it.

        Args:
            indices (`list[int]`):
                Positions in `eval_dataset`. Each process may have its own, equally many.
            seed (`int`):
                What the samples are drawn from, instead of the callback's seed.

        Returns:
            `list[list[float | None]]`: Rewards, per index; `None` where there is none.
        """
        with undisturbed(self.trainer.model_wrapped, seed=seed):
            return [rewards for _, rewards, _ in self._evaluate_rows(indices, self.num_samples, do_sample=True)]

    @contextmanager
    def generating_model(self) -> Iterator[Any]:
        """The trainer's model with all its parameters, without gradients; every process must enter."""
        trainer = self.trainer
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        full = DistributedBackend(trainer.accelerator).summon_full_params(trainer.model_wrapped, recurse=False)
        with unwrapped as model, torch.no_grad(), full:
            yield model

    def _evaluate_rows(self, indices: list[int], copies: int, *, do_sample: bool) -> list[tuple[list, list, list]]:
        """Totals, deciding rewards and answers of `copies` completions of each row: lists `[copies]` per index."""
        records, chunk = [], max(1, self.batch_size // copies)
        with self.generating_model() as model:
            for start in range(0, len(indices), chunk):
                # Copies, because a reward function may change what it is given.
                rows = [copy.deepcopy(self.rows[i]) for i in indices[start : start + chunk] for _ in range(copies)]
                completion_ids, completions = self._generate(model, rows, do_sample=do_sample)
                totals, rewards = self._score(rows, completions, completion_ids)
                needed = self.maj_k or self.coverage_k
                answers = [self.answer_fn(completion_text(text)) if needed else None for text in completions]
                parts = [slice(i, i + copies) for i in range(0, len(rows), copies)]
                records += [(totals[part], rewards[part], answers[part]) for part in parts]
        return records

    def _generate(self, model: Any, rows: list[dict], *, do_sample: bool) -> tuple[list[list[int]], list]:
        """A completion per row: its ids `[B][T_i]` including the end token, and in the form that rewards receive."""
        trainer, args, tokenizer = self.trainer, self.trainer.args, self.trainer.processing_class
        prompts = [row["prompt"] for row in rows]
        conversational = is_conversational(rows[0])
        if conversational:
            template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
            encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True, **template)
        else:
            encoded = tokenizer(text=prompts)
        prompt_ids = encoded["input_ids"]

        options = {"repetition_penalty": args.repetition_penalty, "cache_implementation": args.cache_implementation}
        if do_sample:
            options |= {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
        if not args.use_vllm:  # else they are vLLM's options
            options |= args.generation_kwargs or {}
        options |= {
            "max_new_tokens": self.max_completion_length,
            "do_sample": do_sample,
            "temperature": self.temperature if do_sample else 1.0,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": trainer.eos_token_ids,  # the model's and the tokenizer's
        }
        config = GenerationConfig(**options, disable_compile=True)
        completion_ids = []
        for start in range(0, len(rows), self.batch_size):
            completion_ids += complete(model, prompt_ids[start : start + self.batch_size], config)

        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        if not conversational:
            return completion_ids, texts
        if vars(tokenizer).get("response_template") is None:
            return completion_ids, [[{"role": "assistant", "content": text}] for text in texts]
        pairs = zip(completion_ids, prompt_ids, strict=True)
        return completion_ids, [[parse_response(tokenizer, ids, prefix=prefix)] for ids, prefix in pairs]

    def _score(
        self, rows: list[dict], completions: list, completion_ids: list[list[int]]
    ) -> tuple[list[float | None], list[float | None]]:
        """Of each completion the weighted sum of its rewards, and the reward that decides; `None` where none is."""
        trainer, prompts = self.trainer, [row["prompt"] for row in rows]
        columns = [name for name in rows[0] if name not in ("prompt", "completion", "completion_ids")]
        inputs: dict[str, Any] = {name: [row[name] for row in rows] for name in columns}
        inputs |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        inputs |= {"trainer_state": trainer.state, "log_extra": _discard, "log_metric": _discard}
        totals: list[float | None] = [None] * len(rows)
        deciding: list[float | None] = totals if self.success_reward is None else [None] * len(rows)
        for name, (func, processing_class, weight) in zip(self.reward_names, self.rewards, strict=True):
            if isinstance(func, nn.Module):
                texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
                if is_conversational(rows[0]):
                    kwargs = {"processing_class": processing_class, **trainer.chat_template_kwargs}
                    texts = [apply_chat_template({"messages": messages}, **kwargs)["text"] for messages in texts]
                options = {"return_tensors": "pt", "padding": True, "padding_side": "right"}
                encoded = processing_class(text=texts, add_special_tokens=False, **options)
                rewards = func(**encoded.to(trainer.accelerator.device)).logits[:, 0].tolist()
            elif is_async_callable(func):
                rewards = asyncio.run_coroutine_threadsafe(func(**inputs), trainer.async_loop).result()
            else:
                rewards = func(**inputs)
            if len(rewards) != len(rows):
                raise ValueError(f"{func} must return one reward per completion, got {len(rewards)} for {len(rows)}.")
            for i, reward in enumerate(rewards):
                if reward is not None and not math.isnan(reward):
                    totals[i] = (totals[i] or 0.0) + weight * float(reward)
                    if name == self.success_reward:
                        deciding[i] = float(reward)
        return totals, deciding


def _discard(name: str, values: Any) -> None:
    """Stands in for TRL's log_extra and log_metric, which would mix evaluation into the training log."""

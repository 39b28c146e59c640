"""Graded samples of a trainer's model.

Prompts, rewards and most sampling options are the same as in training. Only temperature and maximum length may differ.
"""

import asyncio
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import nn
from transformers import GenerationConfig, ProcessorMixin
from trl import GRPOConfig, apply_chat_template
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_explore.evaluation.completions import completions_for_rewards, encode_prompts
from trl_explore.evaluation.grading import Graded, Grader
from trl_explore.rewards.success import check_success_reward
from trl_explore.sampling.generation import complete, generating_model


class PolicySamples:
    """
    Samples and grades completions of prompts.

    Call [`draw`] within [`~trl_explore.evaluation.samplers.undisturbed`], which sets the seed and restores the state
    of the model.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer whose model is sampled.
        rows (`Iterable[dict]`):
            Rows of the dataset, each with a `prompt`.
        reward_funcs (`Callable`, `list[Callable]` or `None`):
            Synchronous reward functions. `None` uses the trainer's current ones.
        reward_weights (`Sequence[float]` or `None`):
            Weight of each reward function. `None` uses the trainer's weights, or 1 each for given functions.
        success_reward (`str` or `None`):
            Name of the reward function that decides success. `None` uses the weighted sum.
        temperature (`float`):
            Sampling temperature.
        max_completion_length (`int` or `None`):
            Maximum number of tokens per completion. `None` uses the trainer's.
        batch_size (`int`):
            Number of completions per `generate` call.
        answer_fn (`Callable`, *optional*):
            Maps the text of a completion to its answer. `None` reads no answers.

    Raises:
        `ValueError`: If an argument does not fit the trainer, or if the trainer does not sample single-turn text.
    """

    def __init__(
        self,
        trainer: Any,
        rows: Iterable[dict[str, Any]],
        *,
        reward_funcs: Callable | list[Callable] | None,
        reward_weights: Sequence[float] | None,
        success_reward: str | None,
        temperature: float,
        max_completion_length: int | None,
        batch_size: int,
        answer_fn: Callable[[str], Hashable | None] | None = None,
    ) -> None:
        self.trainer, self.rows = trainer, [dict(row) for row in rows]
        self.temperature, self.batch_size = temperature, batch_size
        if max_completion_length is None:
            max_completion_length = trainer.args.max_completion_length
        self.max_completion_length = max_completion_length
        self._follows_trainer = reward_funcs is None
        self._given_weights = list(reward_weights or [])
        if reward_funcs is None:
            names, funcs, weights = self._trainers_rewards()
        else:
            funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
            if any(isinstance(func, nn.Module) or is_async_callable(func) for func in funcs):
                raise ValueError(
                    "reward_funcs must be synchronous functions; for reward models and async functions pass them to "
                    "the trainer and leave reward_funcs out."
                )
            names, weights = [get_callable_name(func) for func in funcs], [1.0] * len(funcs)
        if reward_weights is not None:
            weights = list(reward_weights)
        if len(weights) != len(funcs):
            raise ValueError(
                f"reward_weights must have one weight per reward function, got {len(weights)} for {len(funcs)}."
            )
        check_success_reward(success_reward, names)
        self.reward_names, self.reward_weights = names, weights
        self.grade = Grader(
            list(zip(names, funcs, weights, strict=True)),
            success_reward=success_reward,
            answer_fn=answer_fn,
            trainer_state=trainer.state,
            log_extra=_discard,
            log_metric=_discard,
        )
        if not self.rows or any("prompt" not in row for row in self.rows):
            raise ValueError("eval_dataset must have rows, each with a `prompt`; rename the column of the prompts.")
        has_environments = trainer.environment_factories is not None or trainer.rollout_func is not None
        if trainer.tools or has_environments or isinstance(trainer.processing_class, ProcessorMixin):
            raise ValueError(
                "This evaluation samples text completions of a single turn, but the trainer has tools, environments, "
                "a rollout_func or a multimodal processor; evaluate with the trainer's eval_dataset instead."
            )

    def _trainers_rewards(self) -> tuple[list[str], list[Callable[..., Any]], list[float]]:
        """Return names, functions and weights of the trainer's current reward functions."""
        trainer = self.trainer
        pairs = zip(trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
        funcs = [_plain_function(trainer, func, processing_class) for func, processing_class in pairs]
        return list(trainer.reward_func_names), funcs, trainer.reward_weights.tolist()

    def _follow_trainer(self) -> None:
        """Update the grader: every call of `train` creates a new trainer state, and a user may replace the reward
        functions of the trainer."""
        self.grade.given["trainer_state"] = self.trainer.state
        if not self._follows_trainer:
            return
        names, funcs, weights = self._trainers_rewards()
        weights = self._given_weights or weights
        self.reward_names, self.reward_weights = names, weights
        self.grade.rewards = list(zip(names, funcs, weights, strict=True))

    def draw(self, indices: Sequence[int], num_samples: int, *, greedy: bool = False) -> list[Graded]:
        """
        Sample completions of rows and grade them.

        Every process must call it with the same number of rows.

        Args:
            indices (`Sequence[int]`):
                Positions of the rows, `[P]`.
            num_samples (`int`):
                Number of completions per row.
            greedy (`bool`, *optional*, defaults to `False`):
                If `True`, decode greedily.

        Returns:
            `list[Graded]`: Rewards and answers of the samples of each row, `[P]`.
        """
        self._follow_trainer()
        graded: list[Graded] = []
        rows_per_call = max(1, self.batch_size // num_samples)
        with generating_model(self.trainer) as model:
            for start in range(0, len(indices), rows_per_call):
                rows = [self.rows[index] for index in indices[start : start + rows_per_call]]
                completion_ids, completions = self._complete(model, rows, num_samples, greedy=greedy)
                graded += self.grade(rows, completions, completion_ids)
        return graded

    def _complete(
        self, model: Any, rows: list[dict], num_samples: int, *, greedy: bool
    ) -> tuple[list[list[int]], list[Any]]:
        """Return completions of rows: token ids `[B][T_i]` with the end token, and the form that rewards receive."""
        trainer, tokenizer = self.trainer, self.trainer.processing_class
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        prompts: list[Any] = []
        prompt_ids: list[list[int]] = []
        row_prompts = [row["prompt"] for row in rows]
        for prompt, ids in zip(row_prompts, encode_prompts(row_prompts, tokenizer, **template), strict=True):
            prompts += [prompt] * num_samples
            prompt_ids += [ids] * num_samples
        completion_ids: list[list[int]] = []
        config = self._config(greedy=greedy)
        for start in range(0, len(prompt_ids), self.batch_size):
            completion_ids += complete(model, prompt_ids[start : start + self.batch_size], config)
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return completion_ids, completions_for_rewards(prompts, prompt_ids, completion_ids, texts, tokenizer)

    def _config(self, *, greedy: bool) -> GenerationConfig:
        """Return the sampling options. `generation_kwargs` of the trainer can add options and replace the first ones.
        They cannot replace the options that are set after them, such as the length limit."""
        trainer = self.trainer
        args: GRPOConfig = trainer.args
        options: dict[str, Any] = {
            "repetition_penalty": args.repetition_penalty,
            "cache_implementation": args.cache_implementation,
        }
        temperature = 1.0  # greedy decoding does not use it
        if not greedy:
            options |= {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
            temperature = self.temperature
        # With vLLM, generation_kwargs are vLLM's options. TRL has already read a text with JSON as a dictionary.
        if not args.use_vllm and isinstance(args.generation_kwargs, dict):
            options |= args.generation_kwargs
        options |= {
            "max_new_tokens": self.max_completion_length,
            "do_sample": not greedy,
            "temperature": temperature,
            "pad_token_id": trainer.processing_class.pad_token_id,
            "eos_token_id": trainer.eos_token_ids,  # the model's and the tokenizer's
        }
        return GenerationConfig(**options, disable_compile=True)


def _plain_function(trainer: Any, func: Any, processing_class: Any) -> Callable[..., Any]:
    """Wrap a trainer's reward model or async function in a synchronous function. Return other functions unchanged."""
    if is_async_callable(func):

        @functools.wraps(func)
        def wait(**inputs: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(func(**inputs), trainer.async_loop).result()

        return wait
    if not isinstance(func, nn.Module):
        return func

    def judge(prompts: list[Any], completions: list[Any], **inputs: Any) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if not isinstance(prompts[0], str):
            # A prompt and a completion are lists of messages, so each sum is a conversation. Convert it to text.
            conversations = texts
            kwargs = {"processing_class": processing_class, **trainer.chat_template_kwargs}
            texts = [apply_chat_template({"messages": messages}, **kwargs)["text"] for messages in conversations]
        options = {"return_tensors": "pt", "padding": True, "padding_side": "right"}
        encoded = processing_class(text=texts, add_special_tokens=False, **options)
        return func(**encoded.to(trainer.accelerator.device)).logits[:, 0].tolist()

    return judge


def _discard(name: str, values: Any) -> None:
    """Replace TRL's log_extra and log_metric, which would add values of the evaluation to the training log."""

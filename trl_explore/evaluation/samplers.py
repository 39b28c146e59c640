"""Samplers for evaluation: transformers, vLLM in this process, and a vLLM server."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, set_seed

from trl_explore.machine.devices import available_accelerator
from trl_explore.machine.threads import few_threads
from trl_explore.rows.rollouts import Continuation
from trl_explore.sampling.generation import complete
from trl_explore.sampling.sampler import without_dropout

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_CONCURRENT_REQUESTS = 64


@dataclass(frozen=True)
class Sampling:
    """
    Sampling options.

    Args:
        num_samples (`int`, *optional*, defaults to `1`):
            Number of completions per prompt.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature. 0 decodes greedily and requires `num_samples=1`.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling, in `(0, 1]`.
        top_k (`int`, *optional*, defaults to `0`):
            Number of most probable tokens to sample from. 0 means all tokens.
        max_new_tokens (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens per completion.
        seed (`int`, *optional*, defaults to `0`):
            Seed, not negative.

    Raises:
        `ValueError`: If a value is outside its range.
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"num_samples and max_new_tokens must be at least 1, got num_samples={self.num_samples}, "
                f"max_new_tokens={self.max_new_tokens}."
            )
        if self.temperature < 0 or self.top_k < 0 or self.seed < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature, top_k and seed must not be negative, and top_p must be in (0, 1]; got "
                f"temperature={self.temperature}, top_k={self.top_k}, seed={self.seed}, top_p={self.top_p}."
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"temperature=0 decodes greedily, so that all {self.num_samples} samples of a prompt would be the "
                "same: set num_samples=1 or a positive temperature."
            )


class PromptSampler(Protocol):
    """Callable that samples completions for [`~trl_explore.evaluation.evaluate.evaluate`]."""

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        """
        Sample completions of prompts.

        Args:
            prompts (`dict[int, list[int]]`):
                Token ids of each prompt, by its position in the dataset.
            sampling (`Sampling`):
                Sampling options.

        Yields:
            `tuple[int, list[Continuation]]`: The position of a prompt and its `num_samples` completions. The prompts
            can come in any order.
        """
        ...


def seed_at(seed: int, position: int) -> int:
    """Return the seed of the batch that begins at `position`. It does not depend on other batches."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0])


@contextmanager
def undisturbed(model: nn.Module, *, seed: int) -> Iterator[None]:
    """
    Set the random seed and disable dropout of `model` inside the `with` block. Restore the random states and the model
    at its end.

    Args:
        model (`nn.Module`):
            The model that is sampled.
        seed (`int`):
            Seed of the random generators of Python, NumPy and PyTorch.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = available_accelerator()
    devices = range(torch.accelerator.device_count())  # `set_seed` seeds all devices, not only the current one
    device_type = "cuda"  # `fork_rng` needs the name of a type; without an accelerator, `devices` is empty
    if accelerator:
        device_type = accelerator.type
    try:
        with torch.random.fork_rng(devices, device_type=device_type), without_dropout(model):
            set_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class TransformersSampler:
    """
    Samples with `generate` of transformers.

    The samples of a batch depend only on the seed, the prompts and their positions in the dataset. So a continued
    evaluation returns the same samples as an uninterrupted one, except for the rest of an interrupted batch.

    Args:
        model ([`~transformers.PreTrainedModel`] or `PeftModel`):
            The model, which samples on its current device.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        batch_size (`int`, *optional*, defaults to `64`):
            Number of completions per `generate` call. A call always samples all completions of a prompt, even if they
            are more.
    """

    def __init__(
        self, model: "PreTrainedModel | PeftModel", tokenizer: "PreTrainedTokenizerBase", *, batch_size: int = 64
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.max_length = model.config.get_text_config().to_dict().get("max_position_embeddings")
        eos_token_ids: Any = model.generation_config.eos_token_id
        if not isinstance(eos_token_ids, list):
            eos_token_ids = [eos_token_ids]
        self.eos_token_ids = sorted({*eos_token_ids, tokenizer.eos_token_id} - {None})
        self.pad_token_id = tokenizer.pad_token_id
        if self.pad_token_id is None:
            self.pad_token_id = tokenizer.eos_token_id

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        _check_context(prompts, sampling, self.max_length)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            repetition_penalty=1.0,  # `generate` takes options that are not set from the model's generation config
            disable_compile=True,
            **options,
        )
        size = max(1, self.batch_size // sampling.num_samples)
        # Group prompts by their positions in the dataset, so that a continued evaluation has the same batches.
        for number, positions in groupby(sorted(prompts), key=lambda position: position // size):
            batch = list(positions)
            prompt_ids: list[list[int]] = []
            for position in batch:
                prompt_ids += [prompts[position]] * sampling.num_samples
            with (
                undisturbed(self.model, seed=seed_at(sampling.seed, number * size)),
                torch.no_grad(),
                few_threads(self.model),
            ):
                completion_ids = complete(self.model, prompt_ids, config)
            done = [Continuation(ids, finished=ids[-1] in self.eos_token_ids) for ids in completion_ids]
            for index, position in enumerate(batch):
                yield position, done[index * sampling.num_samples : (index + 1) * sampling.num_samples]


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of `max_lora_rank` that vLLM accepts


def _vllm_rank(config: Any) -> int:
    """Return the smallest `max_lora_rank` of vLLM for an adapter, or its rank if vLLM has none as large."""
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    return next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank)


class VLLMSampler:
    """
    Samples with vLLM in this process. vLLM's own `seed` option determines the samples.

    Args:
        model (`str`):
            Hub name or folder of the model.
        adapter (`str`, *optional*):
            Folder of a LoRA adapter.
        batch_size (`int`, *optional*, defaults to `1024`):
            Number of completions per `LLM.generate` call. A call always samples all completions of a prompt, even if
            they are more.
        **options:
            Options of `vllm.LLM`, such as `seed`.

    Raises:
        `ImportError`: If vLLM is not installed.
    """

    def __init__(self, model: str, *, adapter: str | None = None, batch_size: int = 1024, **options: Any) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError("use_vllm needs vLLM: `pip install trl-explore[vllm]`.") from error
        self.batch_size, self.adapter = batch_size, None
        if adapter is not None:
            from peft import PeftConfig
            from vllm.lora.request import LoRARequest

            self.adapter = LoRARequest("adapter", 1, adapter)
            options |= {"enable_lora": True, "max_lora_rank": _vllm_rank(PeftConfig.from_pretrained(adapter))}
        self.llm = LLM(model=model, **options)

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        from vllm import SamplingParams

        _check_context(prompts, sampling, self.llm.llm_engine.model_config.max_model_len)
        size, order = max(1, self.batch_size // sampling.num_samples), sorted(prompts)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            outputs = self.llm.generate(
                [{"prompt_token_ids": prompts[position]} for position in batch],
                sampling_params=SamplingParams(**_parameters(sampling)),
                lora_request=self.adapter,
                use_tqdm=False,
            )
            for position, output in zip(batch, outputs, strict=True):
                completions = []
                for sample in output.outputs:
                    completions.append(Continuation(list(sample.token_ids), finished=sample.finish_reason == "stop"))
                yield position, completions


class ServerSampler:
    """
    Samples with a vLLM server.

    The seed of the server determines the samples, and the seed of `Sampling` has no effect. A seed per request would
    be slower, and on CPUs a long prompt with a seed crashes vLLM's engine.

    Args:
        base_url (`str`):
            Address of the server, with or without `/v1`.
        model (`str`):
            Name of a model or adapter that the server lists.

    Raises:
        `ConnectionError`: If no server answers.
        `ValueError`: If the server does not list the model.
    """

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url, self.model = base_url.rstrip("/").removesuffix("/v1"), model
        served = {entry["id"]: entry.get("max_model_len") for entry in self._ask("GET", "/v1/models")["data"]}
        if model not in served:
            raise ValueError(
                f"the server at {self.base_url} serves {', '.join(served)}, not {model}: name one of them, or start "
                f"a server with `vllm serve {model}`."
            )
        self.max_length = served[model]

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        _check_context(prompts, sampling, self.max_length)
        executor = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS)
        try:
            futures = {executor.submit(self._complete, prompts[i], sampling): i for i in sorted(prompts)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            executor.shutdown(cancel_futures=True)

    def _complete(self, prompt_ids: list[int], sampling: Sampling) -> list[Continuation]:
        request = {"model": self.model, "prompt": prompt_ids, "return_token_ids": True, **_parameters(sampling)}
        choices = self._ask("POST", "/v1/completions", json=request)["choices"]
        return [Continuation(choice["token_ids"], finished=choice["finish_reason"] == "stop") for choice in choices]

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        import requests

        try:
            with requests.Session() as session:
                # Environment variables may name a proxy, which cannot reach this machine's own addresses.
                session.trust_env = "://127.0.0.1" not in self.base_url and "://localhost" not in self.base_url
                answer = session.request(method, self.base_url + path, timeout=(10, None), **options)
            answer.raise_for_status()
            return answer.json()
        except (requests.RequestException, ValueError) as error:
            raise ConnectionError(
                f"no vLLM server answers at {self.base_url}{path} ({error}). Start one with `vllm serve MODEL`, or "
                "correct vllm_server_base_url."
            ) from error


def _parameters(sampling: Sampling) -> dict[str, Any]:
    """Return sampling options under vLLM's names."""
    return {
        "n": sampling.num_samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "repetition_penalty": 1.0,
    }


def _check_context(prompts: dict[int, list[int]], sampling: Sampling, max_length: int | None) -> None:
    longest = max(len(ids) for ids in prompts.values())
    if max_length is not None and longest + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with max_new_tokens={sampling.max_new_tokens} that is more "
            f"than the model's context of {max_length} tokens; lower max_new_tokens to at most {max_length - longest}."
        )

"""Completions of prompts that do not change meanwhile: by transformers, by vLLM in this process, by a vLLM server."""

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
    """How completions are drawn; a value outside its range is a `ValueError`."""

    num_samples: int = 1  # completions per prompt
    temperature: float = 1.0  # 0 decodes greedily, one completion per prompt
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 for all tokens
    max_new_tokens: int = 1024  # per completion
    seed: int = 0  # not negative

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
                "same: set num_samples=1, or a positive temperature."
            )


class PromptSampler(Protocol):
    """What draws completions for [`~trl_explore.evaluation.evaluate.evaluate`]."""

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        """Yield each prompt's position and its `num_samples` completions as soon as they are there, in any order;
        `prompts` are token ids by position in the data set."""
        ...


def seed_at(seed: int, position: int) -> int:
    """Seed of the batch that begins at a position, whatever was drawn before it."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1)[0])


@contextmanager
def undisturbed(model: nn.Module, *, seed: int) -> Iterator[None]:
    """`model` is `without_dropout` and the random generators start from `seed`; afterwards all is as before."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    accelerator = available_accelerator()
    devices = range(torch.accelerator.device_count())  # seeding reaches all, not only the one in use
    try:
        device_type = accelerator.type if accelerator else "cuda"
        with torch.random.fork_rng(devices, device_type=device_type), without_dropout(model):
            set_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class TransformersSampler:
    """Samples with `generate`, `batch_size` completions at once, at least one prompt's. Positions and seed decide the
    samples of a batch: a continued evaluation draws the same, but for the rest of a batch that was cut in two."""

    def __init__(
        self, model: "PreTrainedModel | PeftModel", tokenizer: "PreTrainedTokenizerBase", *, batch_size: int = 64
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.max_length = model.config.get_text_config().to_dict().get("max_position_embeddings")
        ends: Any = model.generation_config.eos_token_id
        known = ends if isinstance(ends, list) else [ends]
        self.eos_token_ids = sorted({end for end in [*known, tokenizer.eos_token_id] if end is not None})
        self.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def __call__(self, prompts: dict[int, list[int]], sampling: Sampling) -> Iterator[tuple[int, list[Continuation]]]:
        _check_context(prompts, sampling, self.max_length)
        draws = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        config = GenerationConfig(
            do_sample=sampling.temperature > 0,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            repetition_penalty=1.0,  # what is not named here comes from the model's own configuration
            disable_compile=True,
            **(draws if sampling.temperature > 0 else {}),
        )
        size = max(1, self.batch_size // sampling.num_samples)
        for number, members in groupby(sorted(prompts), key=lambda position: position // size):
            batch = list(members)
            rows = [prompts[position] for position in batch for _ in range(sampling.num_samples)]
            with (
                undisturbed(self.model, seed=seed_at(sampling.seed, number * size)),
                torch.no_grad(),
                few_threads(self.model),
            ):
                ids = complete(self.model, rows, config)
            done = iter([Continuation(row, finished=row[-1] in self.eos_token_ids) for row in ids])
            for position in batch:
                yield position, [next(done) for _ in range(sampling.num_samples)]


class VLLMSampler:
    """Samples with vLLM in this process, `batch_size` completions at a time; `adapter` is a folder. `options` are
    those of `vllm.LLM`, the seed among them. `ImportError` without vLLM."""

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
            options |= {"enable_lora": True, "max_lora_rank": PeftConfig.from_pretrained(adapter).r}
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
                yield (
                    position,
                    [
                        Continuation(list(sample.token_ids), finished=sample.finish_reason == "stop")
                        for sample in output.outputs
                    ],
                )


class ServerSampler:
    """Samples with a vLLM server, whose own seed decides: one per request is slower, and on CPUs ends its engine at a
    long prompt. `ConnectionError` if nothing answers, `ValueError` if the server does not list the model or
    adapter."""

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
        wanted = {"model": self.model, "prompt": prompt_ids, "return_token_ids": True}
        choices = self._ask("POST", "/v1/completions", json=wanted | _parameters(sampling))["choices"]
        return [Continuation(choice["token_ids"], finished=choice["finish_reason"] == "stop") for choice in choices]

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        import requests

        try:
            with requests.Session() as session:
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
    """Sampling options as vLLM calls them."""
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
            f"max_new_tokens={sampling.max_new_tokens} behind the longest prompt, of {longest} tokens, is more than "
            f"the {max_length} that the model takes; lower max_new_tokens to at most {max_length - longest}."
        )

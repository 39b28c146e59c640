"""A replacement for TRL's vLLM backend, with any number of samples and tokens per prefix and unrounded weights."""

import atexit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlparse

import requests
import torch
from accelerate.utils import is_peft_model
from requests.adapters import HTTPAdapter
from safetensors.torch import save_file
from transformers import AutoConfig, ProcessorMixin
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs
from trl.import_utils import is_vllm_available
from trl.trainer import grpo_trainer
from urllib3.util.retry import Retry

from trl_explore.saving.whole_files import whole_file
from trl_explore.serving.agreement import check_server, check_vocabulary, hold, serve_command, wait_until_healthy

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

MAX_CONCURRENT_REQUESTS = 64
WEIGHTS_FOLDER = "_vllm_weights"  # folders whose name starts with an underscore are not pushed to the Hub
RETRY_AT_ONCE = Retry(total=2, backoff_factor=0, allowed_methods=None)
NUM_COMPARED_TOKENS = 64  # tokens of the vocabulary with which two tokenizers are compared


class Request(NamedTuple):
    """A request for `num_samples` continuations of `prefix`, each with at most `max_new_tokens` tokens."""

    prefix: list[int]
    num_samples: int
    max_new_tokens: int


class Answer(NamedTuple):
    """One continuation of a request."""

    token_ids: list[int]
    logprobs: list[float | None]  # under vLLM's sampling distribution; None for tokens that vLLM could not score


class ServerClient(VLLMClient):
    """
    TRL's client, which can also send weights through files.

    TRL's client repeats a failed request for a minute. In this time a server could restart and answer with the weights
    on its disk. This client repeats a request immediately and at most twice, which helps if an idle connection was
    closed.

    Args:
        base_url (`str`):
            Address of the server.
        command (`str`):
            Command that starts the server, for messages.
        weight_sync (`str`):
            `"nccl"` or `"file"`.
        folder (`Path`):
            Folder for weight files.
        kwargs:
            Further arguments of TRL's client.
    """

    def __init__(self, base_url: str, *, command: str, weight_sync: str, folder: Path, **kwargs):
        self.command, self.weight_sync, self.folder = command, weight_sync, folder
        self._num_updates = 0
        super().__init__(base_url=base_url, **kwargs)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=RETRY_AT_ONCE, pool_maxsize=MAX_CONCURRENT_REQUESTS))

    def _post(self, url, **kwargs):
        try:
            return super()._post(url, **kwargs)
        except Exception as error:  # TRL raises a plain `Exception` if the server reports a failure
            failure = f"answered: {error}"
            if isinstance(error, requests.RequestException):
                failure = f"was lost ({type(error).__name__})"
            raise ConnectionError(
                f"the vLLM server at {self.base_url} {failure}. If it has ended, start it again with `{self.command}` "
                "and go on with `resume_from_checkpoint=True`; the checkpoints written so far are complete."
            ) from error

    def get_server_info(self):
        # TRL before 1.16 has no such method.
        response = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"})
        if response.status_code != 200:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} does not report how it was started ({response.status_code}): its "
                f"development endpoints, which take the weights, are off. Restart it with `{self.command}`."
            )
        return response.json()["vllm_config"]

    def init_communicator(self, device=0):
        if self.weight_sync == "nccl":
            return super().init_communicator(device)
        atexit.register(self.remove_files)
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def update_named_params(self, metadata, named_params):
        if self.weight_sync == "nccl":
            return super().update_named_params(metadata, named_params)
        # After the last tensor, TRL unmerges adapters, which changes the parameters. So copy each parameter now.
        weights = {name: param.detach().to("cpu", copy=True).contiguous() for name, param in named_params}
        # The server may still have the last file mapped into its memory, so write to the other of two files.
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"weights_{self._num_updates % 2}.safetensors"
        self._num_updates += 1
        with whole_file(path) as part:
            save_file(weights, part)
        self._start_weight_update()
        self._post(
            f"{self.base_url}/update_weights", json={"update_info": {"path": str(path), "names": list(weights)}}
        )
        self._finish_weight_update()

    def remove_files(self) -> None:
        """Remove the weight files."""
        for number in range(2):
            (self.folder / f"weights_{number}.safetensors").unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of tokens with the tokenizer of the server."""
        return self._post(f"{self.base_url}/detokenize", json={"model": self.model, "tokens": token_ids})["prompt"]


class ServedGeneration(VLLMGeneration):
    """
    TRL's vLLM backend, with a number of samples and a token budget per prompt.

    Every process has its own client. TRL has one client for all processes, which must then make the same number of
    calls with the same number of prompts. In a tool loop they do not.

    Args:
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            Way in which weights reach a server: `"nccl"`, `"file"`, or `"auto"`, which uses NCCL on a GPU.
        folder (`Path`, *optional*):
            Folder for weight files.
        args, kwargs:
            Arguments of TRL's backend.
    """

    vllm_client: ServerClient
    max_served_length: int | None = None

    def __init__(self, *args, weight_sync: str = "auto", folder: Path = Path(WEIGHTS_FOLDER), **kwargs):
        self.weight_sync, self.folder = weight_sync, folder
        self.budgets: dict[tuple[int, ...], int] = {}  # most new tokens of prompts for which TRL samples
        super().__init__(*args, **kwargs)

    def _init_vllm(self):
        if self.mode != "server":
            super()._init_vllm()
            self.max_served_length = self.llm.llm_engine.model_config.max_model_len
            return
        if not is_vllm_available():
            raise ImportError(
                "`use_vllm=True` needs vLLM, for a server's client too: `pip install trl-explore[vllm]`."
            )
        accelerator = self.accelerator
        backend = self.weight_sync
        if backend == "auto":
            backend = "nccl" if accelerator.device.type == "cuda" else "file"
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self.command = partial(
            serve_command,
            self.model.name_or_path or "MODEL",
            backend=backend,
            port=urlparse(url).port or self.server_port,
        )
        wait_until_healthy(url, seconds=self.server_timeout, command=self.command())
        self.vllm_client = ServerClient(
            url, command=self.command(), weight_sync=backend, folder=self.folder, group_port=self.group_port
        )
        info = self.vllm_client.get_server_info()
        served = None
        with suppress(OSError, ValueError):  # the model may be in a folder of another machine
            served = AutoConfig.from_pretrained(info["model_config"]["model"]).get_text_config().to_dict()
        trained = self.model.config.get_text_config().to_dict()
        check_server(info, served, trained, backend=backend, url=url, command=self.command())
        self._check_tokenizer(url)
        self.max_served_length = info["model_config"]["max_model_len"]
        if accelerator.is_main_process:
            hold(url)
            self.vllm_client.init_communicator(device=accelerator.device)
        accelerator.wait_for_everyone()

    def _check_tokenizer(self, url: str) -> None:
        """Raise a ValueError if the server decodes some tokens to another text."""
        tokenizer: Any = self.processing_class
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer.tokenizer
        special = set(tokenizer.all_special_ids)
        step = max(len(tokenizer) // NUM_COMPARED_TOKENS, 1)
        tokens = [token for token in range(0, len(tokenizer), step) if token not in special]
        ours, theirs = tokenizer.decode(tokens), self.vllm_client.text_of(tokens)
        check_vocabulary(ours, theirs, url=url, command=self.command())

    def _iter_named_params(self):
        if not is_peft_model(self.model):
            yield from super()._iter_named_params()
            return
        # Merging an adapter and unmerging it rounds twice. In bfloat16 the frozen weights would drift in every sync,
        # so restore them. Quantized weights are left out, because PEFT replaces them by new objects.
        kept = []
        for name, param in self.model.named_parameters():
            if ".base_layer." in name and param.is_floating_point():
                kept.append((param, param.detach().clone()))
        yield from super()._iter_named_params()
        with torch.no_grad():
            for param, values in kept:
                param.copy_(values)

    def sync_weights(self):
        super().sync_weights()
        if self.mode == "server":
            # No process may sample before the server has all weights.
            self.accelerator.wait_for_everyone()

    def generate(self, prompts, images, num_generations, profiler=None):
        if images is not None or self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        asked = []
        for prompt, run in groupby(prompts):  # TRL repeats a prompt once per completion
            budget = self.budgets.get(tuple(prompt), self.max_completion_length)
            asked.append(Request(prompt, len(list(run)), budget))
        token_ids, logprobs = [], []
        for answers in self.complete(asked):
            for answer in answers:
                token_ids.append(answer.token_ids)
                logprobs.append([[value] for value in answer.logprobs])
        return prompts, token_ids, logprobs, None

    def complete(self, asked: list[Request]) -> list[list[Answer]]:
        """
        Sample the continuations of this process's requests. The weights must have been synchronized.

        Args:
            asked (`list[Request]`):
                The requests; may be empty.

        Returns:
            `list[list[Answer]]`: Continuations `[R][num_samples_i]`.
        """
        if not asked:
            return []
        self.check_lengths(asked)
        if self.mode == "colocate":
            return self._complete_here(asked)
        return self._complete_there(asked)

    def check_lengths(self, asked: list[Request]) -> None:
        """Raise a ValueError if a prefix with its new tokens is longer than vLLM allows."""
        longest = max((len(request.prefix) + request.max_new_tokens for request in asked), default=0)
        if self.max_served_length is not None and longest > self.max_served_length:
            remedy = f"Set `vllm_max_model_length={longest}`"
            if self.mode == "server":
                remedy = f"Restart the server with `{self.command(max_model_len=longest)}`"
            raise ValueError(
                f"a prompt with the completion that it may get has {longest} tokens, but vLLM takes "
                f"{self.max_served_length}. {remedy}, or lower `max_completion_length`."
            )

    def _complete_there(self, asked: list[Request]) -> list[list[Answer]]:
        """Sample on a server."""

        def numbers(i: int) -> tuple[int, int]:
            return asked[i].num_samples, asked[i].max_new_tokens

        # Requests with the same numbers of samples and tokens go into one HTTP request. Sorted by prefix, neighbours
        # share tokens, which the server finds in its prefix cache.
        order = sorted(range(len(asked)), key=lambda i: (numbers(i), asked[i].prefix))
        batches = [list(batch) for _, batch in groupby(order, key=numbers)]
        alike = []
        for batch in batches:
            alike.append([asked[i] for i in batch])
        answers: list[list[Answer]] = [[] for _ in asked]
        with ThreadPoolExecutor(max_workers=min(MAX_CONCURRENT_REQUESTS, len(batches))) as executor:
            found = executor.map(self._post_requests, alike)
            for batch, answers_of_batch in zip(batches, found, strict=True):
                for place, i in enumerate(batch):
                    count = asked[i].num_samples
                    answers[i] = answers_of_batch[place * count : (place + 1) * count]
        return answers

    def _post_requests(self, alike: list[Request]) -> list[Answer]:
        """Send requests with the same numbers of samples and tokens as one HTTP request."""
        output = self.vllm_client.generate(
            [request.prefix for request in alike],
            n=alike[0].num_samples,
            max_tokens=alike[0].max_new_tokens,
            structured_outputs_regex=self.structured_outputs_regex,
            generation_kwargs=self.generation_kwargs,
            **self._distribution,
        )
        return _answers(output["completion_ids"], output["logprobs"])

    def _complete_here(self, asked: list[Request]) -> list[list[Answer]]:
        """Sample with vLLM in this process."""
        from vllm import SamplingParams

        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        prompts, sampling_params = [], []
        for request in asked:
            counts = {"n": request.num_samples, "max_tokens": request.max_new_tokens}
            prompts.append({"prompt_token_ids": request.prefix})
            # Later dictionaries win, so `generation_kwargs` may replace any option.
            sampling_params.append(SamplingParams(**(counts | self._distribution | self.generation_kwargs)))
        outputs = self.llm.generate(prompts, sampling_params=sampling_params, use_tqdm=False)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        answers = []
        for output in outputs:
            token_ids = [sample.token_ids for sample in output.outputs]
            answers.append(_answers(token_ids, extract_logprobs([output])[0]))
        return answers

    @property
    def _distribution(self) -> dict[str, Any]:
        """Options of vLLM that determine the distribution of tokens."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": 0,
        }


@contextmanager
def our_backend(args: "ExplorationConfig") -> Iterator[None]:
    """Replace TRL's vLLM backend by [`ServedGeneration`] inside the `with` block, in which TRL's trainer is created.
    TRL's constructor has no argument for another backend."""
    module: Any = grpo_trainer
    before = module.VLLMGeneration
    folder = Path(args.output_dir).resolve() / WEIGHTS_FOLDER
    module.VLLMGeneration = partial(ServedGeneration, weight_sync=args.vllm_weight_sync, folder=folder)
    try:
        yield
    finally:
        module.VLLMGeneration = before


def _answers(token_ids: list, logprobs: list) -> list[Answer]:
    """Return continuations `[n]` from token ids `[n][T_i]` and log-probabilities `[n][T_i][1]`."""
    answers = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        answers.append(Answer(list(ids), [of_token[0] for of_token in values]))
    return answers

"""vLLM behind TRL's own interface: any prefixes, any number of samples, weights that arrive exactly as they are."""

import atexit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
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

MAX_CONCURRENT_REQUESTS = 64
WEIGHTS_FOLDER = "_vllm_weights"  # the underscore keeps it out of what is pushed to the Hub
AT_ONCE = Retry(total=2, backoff_factor=0, allowed_methods=None)
SAMPLED_TOKENS = 64  # of the vocabulary, to compare two tokenizers


class Request(NamedTuple):
    """Continuations that are wanted: `num_samples` of up to `max_new_tokens` tokens behind `prefix`."""

    prefix: list[int]
    num_samples: int
    max_new_tokens: int


class Answer(NamedTuple):
    """One of them, with its log-probabilities under the sampler; `None` for a token that vLLM could not score."""

    token_ids: list[int]
    logprobs: list[float | None]


class ServerClient(VLLMClient):
    """TRL's client, with weights through files if asked to. TRL's repeats a request for a minute, when a restarted
    server would answer from the weights on its disk; here only what a closed idle connection broke is repeated."""

    def __init__(self, base_url: str, *, command: str, weight_sync: str, folder: Path, **kwargs):
        self.command, self.weight_sync, self.folder = command, weight_sync, folder
        self._num_updates = 0
        super().__init__(base_url=base_url, **kwargs)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=AT_ONCE, pool_maxsize=MAX_CONCURRENT_REQUESTS))

    def _post(self, url, **kwargs):
        try:
            return super()._post(url, **kwargs)
        except Exception as error:  # TRL raises no other for an answer that tells of a failure
            what = (
                f"was lost ({type(error).__name__})"
                if isinstance(error, requests.RequestException)
                else f"answered: {error}"
            )
            raise ConnectionError(
                f"the vLLM server at {self.base_url} {what}. If it has ended, start it again with `{self.command}` "
                "and go on with `resume_from_checkpoint=True`; the checkpoints written so far are whole."
            ) from error

    def get_server_info(self):
        # TRL's own is not there before 1.16.
        response = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"})
        if response.status_code != 200:
            raise RuntimeError(
                f"the vLLM server at {self.base_url} does not tell how it was started ({response.status_code}): its "
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
        # Merged adapters are taken out again behind the last tensor, so each is copied while it is there.
        weights = {name: param.detach().to("cpu", copy=True).contiguous() for name, param in named_params}
        # Never the file that the server may still have mapped, and under its name only once it is whole.
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
        """Remove the weights that were sent."""
        for number in range(2):
            (self.folder / f"weights_{number}.safetensors").unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def text_of(self, token_ids: list[int]) -> str:
        """What tokens mean to the server."""
        return self._post(f"{self.base_url}/detokenize", json={"model": self.model, "tokens": token_ids})["prompt"]


class ServedGeneration(VLLMGeneration):
    """TRL's vLLM backend with as many samples and tokens per prompt as asked, and a client on every process. TRL's one
    client needs equally many prompts and calls from all, which a tool loop does not have."""

    vllm_client: ServerClient
    max_served_length: int | None = None

    def __init__(self, *args, weight_sync: str = "auto", folder: Path = Path(WEIGHTS_FOLDER), **kwargs):
        self.weight_sync, self.folder = weight_sync, folder
        self.budgets: dict[tuple[int, ...], int] = {}
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
        on_gpu = accelerator.device.type == "cuda"
        backend = ("nccl" if on_gpu else "file") if self.weight_sync == "auto" else self.weight_sync
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
        with suppress(OSError, ValueError):  # a folder of the server's machine, say
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
        tokenizer: Any = self.processing_class
        tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
        special = set(tokenizer.all_special_ids)
        step = max(len(tokenizer) // SAMPLED_TOKENS, 1)
        some = [token for token in range(0, len(tokenizer), step) if token not in special]
        check_vocabulary(tokenizer.decode(some), self.vllm_client.text_of(some), url=url, command=self.command())

    def _iter_named_params(self):
        if not is_peft_model(self.model):
            yield from super()._iter_named_params()
            return
        # Adding an adapter and taking it out again rounds twice: in bfloat16 the frozen weights would drift from sync
        # to sync. Quantized ones are PEFT's own matter: it makes new ones of them.
        kept = [
            (param, param.detach().clone())
            for name, param in self.model.named_parameters()
            if ".base_layer." in name and param.is_floating_point()
        ]
        yield from super()._iter_named_params()
        with torch.no_grad():
            for param, values in kept:
                param.copy_(values)

    def sync_weights(self):
        super().sync_weights()
        if self.mode == "server":
            self.accelerator.wait_for_everyone()  # nobody asks a server that has only half of them

    def generate(self, prompts, images, num_generations, profiler=None):
        if images is not None or self.mode == "colocate":
            return super().generate(prompts, images, num_generations, profiler)
        runs = [list(run) for _, run in groupby(prompts)]
        answers = self.complete(
            [Request(run[0], len(run), self.budgets.get(tuple(run[0]), self.max_completion_length)) for run in runs]
        )
        flat = [answer for of_run in answers for answer in of_run]
        return prompts, [a.token_ids for a in flat], [[[p] for p in a.logprobs] for a in flat], None

    def complete(self, asked: list[Request]) -> list[list[Answer]]:
        """Continue this process's prefixes, maybe none: `[R][num_samples_i]`; weights must have been synchronised."""
        if not asked:
            return []
        self.check_lengths(asked)
        return self._complete_here(asked) if self.mode == "colocate" else self._complete_there(asked)

    def check_lengths(self, asked: list[Request]) -> None:
        """Raise where vLLM takes no sequence as long as one that is asked for."""
        longest = max((len(request.prefix) + request.max_new_tokens for request in asked), default=0)
        if self.max_served_length is not None and longest > self.max_served_length:
            remedy = (
                f"Restart the server with `{self.command(max_model_len=longest)}`"
                if self.mode == "server"
                else f"Set `vllm_max_model_length={longest}`"
            )
            raise ValueError(
                f"a prompt with the completion that it may get has {longest} tokens, but vLLM takes "
                f"{self.max_served_length}. {remedy}, or lower `max_completion_length`."
            )

    def _complete_there(self, asked: list[Request]) -> list[list[Answer]]:
        # One HTTP request for all that want as many samples of the same length; neighbours share prefixes, so that the
        # server finds them in its cache.
        order = sorted(range(len(asked)), key=lambda i: (asked[i].num_samples, asked[i].max_new_tokens, asked[i]))
        parts = [list(part) for _, part in groupby(order, key=lambda i: asked[i][1:])]
        answers: list[list[Answer]] = [[] for _ in asked]
        with ThreadPoolExecutor(max_workers=min(MAX_CONCURRENT_REQUESTS, len(parts))) as executor:
            found = executor.map(self._post_requests, [[asked[i] for i in part] for part in parts])
            for part, texts in zip(parts, found, strict=True):
                for place, i in enumerate(part):
                    answers[i] = texts[place * asked[i].num_samples : (place + 1) * asked[i].num_samples]
        return answers

    def _post_requests(self, alike: list[Request]) -> list[Answer]:
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
        from vllm import SamplingParams

        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        outputs = self.llm.generate(
            [{"prompt_token_ids": request.prefix} for request in asked],
            sampling_params=[
                SamplingParams(
                    **{
                        "n": request.num_samples,
                        "max_tokens": request.max_new_tokens,
                        **self._distribution,
                        **self.generation_kwargs,
                    }
                )
                for request in asked
            ],
            use_tqdm=False,
        )
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return [
            _answers([sample.token_ids for sample in output.outputs], extract_logprobs([output])[0])
            for output in outputs
        ]

    @property
    def _distribution(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": 0,
        }


@contextmanager
def our_backend(args: Any) -> Iterator[None]:
    """TRL makes its backend in its constructor and has no slot for another; the name is ours for that long."""
    before = grpo_trainer.VLLMGeneration
    folder = Path(args.output_dir).resolve() / WEIGHTS_FOLDER
    options = {"weight_sync": args.vllm_weight_sync, "folder": folder}
    vars(grpo_trainer)["VLLMGeneration"] = partial(ServedGeneration, **options)
    try:
        yield
    finally:
        vars(grpo_trainer)["VLLMGeneration"] = before


def _answers(token_ids: list, logprobs: list) -> list[Answer]:
    return [
        Answer(list(ids), [of_token[0] for of_token in values])
        for ids, values in zip(token_ids, logprobs, strict=True)
    ]

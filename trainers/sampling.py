"""Sampling from the current policy through TRL's own generation, for whatever prefixes a method asks for."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from trl_explore.rows.rollouts import Continuation, per_request
from trl_explore.rows.streams import kept_randomness
from trl_explore.sampling.generation import recorded

from .packing import PackedTrainer
from .vllm_backend import Request


class SamplingTrainer(PackedTrainer):
    """
    [`~trl.GRPOTrainer`] that can continue any token prefixes, as many times and as far as asked.

    `prefix_tokens_asked` and `prefix_tokens_encoded` count the tokens of the prefixes of all samples, and those that a
    forward pass was spent on.
    """

    sampling_batch_size: int | None = None
    prefix_tokens_asked = 0
    prefix_tokens_encoded = 0
    _generation_seconds: dict[str, float] = {}

    def sample(
        self,
        prefixes: list[list[int]],
        num_samples: int | Sequence[int],
        max_new_tokens: int | Sequence[int],
        *,
        main_stream: bool = False,
        entropies: bool = False,
        collective: bool = True,
    ) -> list[list[Continuation]]:
        """
        Sample continuations of token prefixes from the current policy, all in one batched call.

        Unless `collective=False`, every process must call it equally often; a process may have no prefix. Unless the
        samples are the main stream itself, the global random state is left as it was, so that the main stream draws
        the same rollouts with and without extra sampling. A prefix is encoded once, however many samples it gets.

        Args:
            prefixes (`list[list[int]]`):
                Token ids `[R][T_i]`, without an end-of-sequence token.
            num_samples (`int` or `Sequence[int]`):
                Continuations per prefix.
            max_new_tokens (`int` or `Sequence[int]`):
                Budget of new tokens per prefix.
            main_stream (`bool`, *optional*, defaults to `False`):
                Whether the samples become the main rows; they are then drawn from the global random state, as GRPO's.
            entropies (`bool`, *optional*, defaults to `False`):
                Whether to note the entropy of the distribution that each token was drawn from. vLLM reports none; its
                log-probabilities estimate their mean.
            collective (`bool`, *optional*, defaults to `True`):
                Whether all processes take part. In a tool loop they cannot: each has its own number of turns.

        Returns:
            `list[list[Continuation]]`: `[R][num_samples_i]`.

        Raises:
            ValueError: If vLLM does not take sequences of that length.
        """
        counts = per_request(num_samples, len(prefixes), name="num_samples")
        budgets = per_request(max_new_tokens, len(prefixes), name="max_new_tokens")
        if self.use_vllm:
            return self._sample_served(
                [Request(*request) for request in zip(prefixes, counts, budgets, strict=True)],
                main_stream=main_stream,
            )
        rows = [prefix for prefix, n in zip(prefixes, counts, strict=True) for _ in range(n)]
        row_budgets = [budget for budget, n in zip(budgets, counts, strict=True) for _ in range(n)]

        most_rows = self._max_over_processes(len(rows)) if collective else len(rows)
        if most_rows == 0:
            return [[] for _ in prefixes]
        chunk = self.sampling_batch_size or most_rows
        # Neighbours get similar budgets, so that a part of short ones need not wait for a long one.
        order = sorted(range(len(rows)), key=row_budgets.__getitem__)
        sampled: list[Continuation | None] = [None] * len(rows)
        start_time = time.perf_counter()
        with nullcontext() if main_stream else self._forked_randomness():
            for start in range(0, most_rows, chunk):
                # A process that has run out of rows still takes part: sharded models gather weights in `generate`.
                part = order[start : start + chunk]
                part_budgets = [row_budgets[i] for i in part] or [1]
                try:
                    ids, uncertainty = self._generate_tokens(
                        [rows[i] for i in part] or [[self.eos_token_ids[0]]], max(part_budgets), entropies=entropies
                    )
                except torch.OutOfMemoryError as error:
                    error.add_note(
                        f"while sampling {len(part)} extra rows in one call: set `sampling_batch_size` below that, or "
                        "sample fewer (DEEP-GRPO: `max_pivots_per_batch`; tree search: `expansion_width`)."
                    )
                    raise
                for place, i in enumerate(part):
                    tokens = ids[place][: row_budgets[i]]
                    sampled[i] = Continuation(
                        tokens,
                        finished=tokens[-1] in self.eos_token_ids,
                        entropies=None if uncertainty is None else uncertainty[place][: row_budgets[i]],
                    )
        self._note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        done = iter(sampled)
        return [[next(done) for _ in range(n)] for n in counts]  # type: ignore[misc]

    def _sample_served(self, asked: list[Request], *, main_stream: bool) -> list[list[Continuation]]:
        start_time = time.perf_counter()
        answers = self.complete(asked)
        self.prefix_tokens_asked += sum(len(request.prefix) * request.num_samples for request in asked)
        self.prefix_tokens_encoded += sum(len(request.prefix) for request in asked)
        self._note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        return [
            [
                Continuation(
                    answer.token_ids,
                    logprobs=answer.logprobs,
                    finished=answer.token_ids[-1] in self.eos_token_ids,
                )
                for answer in of_request
            ]
            for of_request in answers
        ]

    def _note_seconds(self, stream: str, seconds: float) -> None:
        """Time for sampling, added up over the calls of a generation batch, to be logged at its end."""
        spent = self._generation_seconds.get(stream, 0.0) + seconds
        self._generation_seconds = {**self._generation_seconds, stream: spent}

    def token_logprobs(self, prefixes: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """
        Log-probabilities of completions under the current policy; every process calls it with as many rows.

        Args:
            prefixes (`list[list[int]]`):
                Tokens that each completion is conditioned on, `[R][P_i]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[R][T_i]`.

        Returns:
            `list[list[float]]`: `[R][T_i]`, at the sampling temperature.
        """
        logprobs, _ = self._forward(prefixes, completion_ids)
        return [row[: len(ids)] for row, ids in zip(logprobs.tolist(), completion_ids, strict=True)]

    def encode_prompts(self, prompts: list) -> list[list[int]]:
        """
        Tokens of prompts, as TRL encodes those of the data set.

        Args:
            prompts (`list[str]` or `list[list[dict]]`):
                Plain prompts, or conversations.

        Returns:
            `list[list[int]]`: `[R][P_i]`.
        """
        return self._tokenize_prompts(prompts)[0] if prompts else []

    def _generate_tokens(
        self, prefixes: list[list[int]], max_new_tokens: int, *, entropies: bool
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        config = self.generation_config
        self.generation_config = copy.deepcopy(config)
        self.generation_config.max_new_tokens = max_new_tokens
        self.generation_config.prefill_chunk_size = None  # one forward pass per recorded token
        by_hooks = not self.use_transformers_continuous_batching  # which schedules forward passes of its own
        noted = entropies and (config.num_beams or 1) == 1  # beams change places from token to token
        model = self.accelerator.unwrap_model(self.model)
        recording = recorded(model, temperature=self.temperature, entropies=noted) if by_hooks else nullcontext()
        try:
            with recording as record:
                ids = super()._generate_single_turn(prefixes, None, {}, 1)[0]
        finally:
            self.generation_config = config
        if record is not None:
            self.prefix_tokens_asked += record.prefill_tokens
            self.prefix_tokens_encoded += record.encoded_tokens
            if noted:
                return ids, record.token_entropies([len(i) for i in ids])
        return ids, self._entropies(prefixes, ids) if entropies else None

    def _entropies(self, prefixes: list[list[int]], ids: list[list[int]]) -> list[list[float]]:
        """Entropies of the distributions that tokens were drawn from, by a forward pass over them."""
        _, entropies = self._forward(prefixes, ids)
        return [row[: len(i)] for row, i in zip(entropies.tolist(), ids, strict=True)]

    def _forward(self, prefixes: list[list[int]], ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of completions, `(R, T)`, meaningless on padding."""
        device, pad_id = self.accelerator.device, self._tokenizer.pad_token_id
        longest = max(len(i) for i in ids)
        left, right = max(len(p) for p in prefixes), [longest - len(i) for i in ids]
        rows = [
            [pad_id] * (left - len(p)) + p + i + [pad_id] * r for p, i, r in zip(prefixes, ids, right, strict=True)
        ]
        real = [
            [0] * (left - len(p)) + [1] * (len(p) + len(i)) + [0] * r
            for p, i, r in zip(prefixes, ids, right, strict=True)
        ]
        assert self.model is not None
        with torch.no_grad(), without_dropout(self.model):
            logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.tensor(rows, device=device),
                torch.tensor(real, device=device),
                longest,
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )
        return logprobs, entropies

    @contextmanager
    def _forked_randomness(self) -> Iterator[None]:
        seed = int(torch.randint(2**62, (1,), generator=self.exploration_generator))
        with kept_randomness(self.accelerator.device):
            torch.manual_seed(seed)
            yield


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """
    What is measured is the distribution that was sampled from: LoRA's dropout would blur it, and draw numbers.

    Args:
        model (`torch.nn.Module`):
            The model. All but its linear layers are in evaluation mode meanwhile.
    """
    # Linear layers know no dropout, and those of bitsandbytes repack their weights in evaluation mode: on a CPU they
    # cannot be trained any more then.
    modules = [module for module in model.modules() if module.training and not isinstance(module, torch.nn.Linear)]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True

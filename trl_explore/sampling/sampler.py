"""Sampling from the current policy through TRL's own generation, for whatever prefixes a method asks for."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from accelerate.utils import DistributedType

from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Part, per_request
from trl_explore.rows.streams import kept_randomness
from trl_explore.sampling.count import TokenCount
from trl_explore.sampling.generation import is_noisy_adapter, language_model, recorded
from trl_explore.sampling.paths import PathCache, effective_options, why_not
from trl_explore.serving.backend import Request

SEVERAL_TOKENS = ("prompt_lookup_num_tokens", "use_mtp")  # options of `generate` that check several tokens per pass
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)  # `generate` keeps step there


class Sampler:
    """
    Continues any token prefixes, as many times and as far as asked.

    `tokens` counts the tokens that were sampled in training, those of main rows that TRL samples included.
    `prefix_tokens_asked` and `prefix_tokens_encoded` count the tokens of the prefixes of all samples, and those that a
    forward pass was spent on; `metrics` are those of a generation batch: time for main rows and for extra ones, and
    the largest size of what a rollout kept.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tokens = TokenCount()
        self.prefix_tokens_asked = self.prefix_tokens_encoded = 0
        self.metrics: dict[str, float] = {}
        self.paths: PathCache | None = None
        self._left: ExitStack | None = None  # what ends the rollout that `paths` belongs to
        self._warned = False

    @property
    def batch_size(self) -> int | None:
        """Most rows of one sampling call; None for a single call."""
        return self.policy.args.sampling_batch_size

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """While it lasts, all samples are of one policy, and what that computed for a prefix is kept: see
        [`~trl_explore.sampling.paths.PathCache`]. Every process must enter."""
        args, kind = self.policy.args, self.policy.accelerator.distributed_type
        served = self.policy.serving is not None or args.use_transformers_continuous_batching
        with ExitStack() as self._left:
            if args.path_cache_tokens and not served and kind not in SHARDED:
                model, config = self._left.enter_context(self.policy.generating())
                options = effective_options(model, config)
                unfit = why_not(model, options, eos_token_ids=self.policy.eos_token_ids)
                if unfit is None:
                    self.paths = PathCache(model, options, args.path_cache_tokens)
                    self._left.callback(self._forget_paths)
                else:
                    self._without_paths(unfit)
            yield

    def _forget_paths(self) -> None:
        assert self.paths is not None
        megabytes = self.paths.num_bytes / 2**20
        self.metrics["cache_megabytes"] = max(megabytes, self.metrics.get("cache_megabytes", 0.0))
        self.paths = None

    def _without_paths(self, reason: str) -> None:
        """The rest of the rollout is sampled by `generate`, which encodes prefixes again."""
        assert self._left is not None
        self._left.close()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Prefixes are encoded again whenever they are continued, because of {reason}. To do so silently, set "
                "`path_cache_tokens=0`.",
                stacklevel=2,
            )

    def __call__(
        self,
        prefixes: list[list[int]],
        num_samples: int | Sequence[int],
        max_new_tokens: int | Sequence[int],
        begun: Sequence[int] | None = None,
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
            begun (`Sequence[int]`, *optional*):
                Number of tokens at the end of each prefix that already belong to the completion. The whole completion
                has at most `max_completion_length` tokens. Sampling options that count from the start of a completion
                (`min_new_tokens`, ...) then count these tokens, too. None if no sample is a part of a longer
                completion. vLLM and continuous batching count from the end of the prefix.
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
        _check_prefixes(prefixes, begun)
        if self.policy.serving is not None:
            asked = [Request(*request) for request in zip(prefixes, counts, budgets, strict=True)]
            return self._sample_served(asked, main_stream=main_stream)
        rows = [prefix for prefix, n in zip(prefixes, counts, strict=True) for _ in range(n)]
        row_budgets = [budget for budget, n in zip(budgets, counts, strict=True) for _ in range(n)]
        row_parts = [part for part, n in zip(self._parts(budgets, begun), counts, strict=True) for _ in range(n)]

        most_rows = self.policy.ranks.most(len(rows)) if collective else len(rows)
        if most_rows == 0:
            return [[] for _ in prefixes]
        chunk = self.batch_size or most_rows
        eos_token_ids = self.policy.eos_token_ids
        # Neighbours get similar budgets, so that a part of short ones need not wait for a long one.
        order = sorted(range(len(rows)), key=row_budgets.__getitem__)
        sampled: list[Continuation | None] = [None] * len(rows)
        start_time = time.perf_counter()
        with nullcontext() if main_stream else self.forked_randomness():
            for start in range(0, most_rows, chunk):
                # A process that has run out of rows still takes part: sharded models gather weights in `generate`.
                part = order[start : start + chunk]
                part_budgets = [row_budgets[i] for i in part] or [1]
                try:
                    ids, uncertainty = self._generate(
                        [rows[i] for i in part] or [[eos_token_ids[0]]],
                        part_budgets,
                        [row_parts[i] for i in part] or [Part()],
                        entropies=entropies,
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
                        finished=tokens[-1] in eos_token_ids,
                        entropies=None if uncertainty is None else uncertainty[place][: row_budgets[i]],
                    )
        self.note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        done = iter(sampled)
        found: list[list[Continuation]] = [[next(done) for _ in range(n)] for n in counts]  # type: ignore[misc]
        self._count(found)
        return found

    def token_logprobs(self, prefixes: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """Log-probabilities `[R][T_i]` of completions behind prefixes under the current policy, at the sampling
        temperature; every process calls it with as many rows."""
        logprobs, _ = self._forward(prefixes, completion_ids, entropies=False)
        return [row[: len(ids)] for row, ids in zip(logprobs.tolist(), completion_ids, strict=True)]

    def note_seconds(self, stream: str, seconds: float) -> None:
        """Time for sampling, added up over the calls of a generation batch, to be logged at its end."""
        name = f"{stream}_seconds"
        self.metrics[name] = self.metrics.get(name, 0.0) + seconds

    def _parts(self, budgets: list[int], begun: Sequence[int] | None) -> list[Part]:
        """Return the place of each request's new tokens in its completion."""
        if begun is None:
            return [Part(0, budget) for budget in budgets]
        most = self.policy.args.max_completion_length or 0
        return [Part(number, max(most, number + budget)) for number, budget in zip(begun, budgets, strict=True)]

    def _sample_served(self, asked: list[Request], *, main_stream: bool) -> list[list[Continuation]]:
        assert self.policy.serving is not None
        start_time = time.perf_counter()
        answers = self.policy.serving.complete(asked)
        self.prefix_tokens_asked += sum(len(request.prefix) * request.num_samples for request in asked)
        self.prefix_tokens_encoded += sum(len(request.prefix) for request in asked)
        self.note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        ends = self.policy.eos_token_ids
        found = [
            [Continuation(a.token_ids, logprobs=a.logprobs, finished=a.token_ids[-1] in ends) for a in of_request]
            for of_request in answers
        ]
        self._count(found)
        return found

    def _count(self, found: list[list[Continuation]]) -> None:
        """Count the tokens of new continuations. Samples of an evaluation are no cost of training."""
        if self.policy.model.training:
            for continuations in found:
                self.tokens.add([continuation.token_ids for continuation in continuations])

    def _generate(
        self, prefixes: list[list[int]], budgets: list[int], parts: list[Part], *, entropies: bool
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return a continuation of each prefix, and the entropies behind its tokens if they are asked for."""
        args = self.policy.args
        if self.paths is not None:
            reason = self.paths.why_not(prefixes, budgets)
            if reason is None:
                known = self.paths.encoded
                found = self.paths.complete(prefixes, budgets, entropies=args.temperature if entropies else None)
                assert found is not None
                self.prefix_tokens_asked += sum(map(len, prefixes))
                self.prefix_tokens_encoded += self.paths.encoded - known
                return found
            self._without_paths(reason)
        if args.use_transformers_continuous_batching:  # which schedules forward passes of its own
            ids = self.policy.generate(prefixes, max(budgets))
        else:
            model = self.policy.accelerator.unwrap_model(self.policy.model)
            noted = entropies and self._one_token_per_pass()
            with recorded(model, temperature=args.temperature, entropies=noted) as record:
                ids = self.policy.generate(prefixes, max(budgets), parts)
            self.prefix_tokens_asked += record.prefill_tokens
            self.prefix_tokens_encoded += record.encoded_tokens
            if noted:
                return ids, record.token_entropies([len(i) for i in ids])
        if not entropies:
            return ids, None
        _, uncertain = self._forward(prefixes, ids)
        return ids, [row[: len(i)] for row, i in zip(uncertain.tolist(), ids, strict=True)]

    def _one_token_per_pass(self) -> bool:
        """Return whether each forward pass of `generate` is followed by one token of each row, in the same place."""
        model = self.policy.accelerator.unwrap_model(self.policy.model)
        options = {**vars(language_model(model).generation_config), **(self.policy.args.generation_kwargs or {})}
        beams = options.get("num_beams") or 1  # beams change places from token to token
        return beams == 1 and not any(options.get(name) for name in SEVERAL_TOKENS)

    def _forward(
        self, prefixes: list[list[int]], ids: list[list[int]], *, entropies: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of completions, `(R, T)`, meaningless on padding."""
        device, pad_id = self.policy.accelerator.device, self.policy.tokenizer.pad_token_id
        longest = max(len(i) for i in ids)
        left, right = max(len(p) for p in prefixes), [longest - len(i) for i in ids]
        rows = [
            [pad_id] * (left - len(p)) + p + i + [pad_id] * r for p, i, r in zip(prefixes, ids, right, strict=True)
        ]
        real = [
            [0] * (left - len(p)) + [1] * (len(p) + len(i)) + [0] * r
            for p, i, r in zip(prefixes, ids, right, strict=True)
        ]
        model = self.policy.model
        with torch.no_grad(), without_dropout(model):
            return self.policy.forward(
                model,
                torch.tensor(rows, device=device),
                torch.tensor(real, device=device),
                longest,
                batch_size=self.policy.args.per_device_train_batch_size,
                compute_entropy=entropies,
            )

    @contextmanager
    def forked_randomness(self) -> Iterator[None]:
        """Draws that the main stream does not notice."""
        seed = int(torch.randint(2**62, (1,), generator=self.policy.exploration_generator))
        with kept_randomness(self.policy.accelerator.device, seed=seed):
            yield


def _check_prefixes(prefixes: list[list[int]], begun: Sequence[int] | None) -> None:
    if not all(prefixes):
        raise ValueError("A prefix is empty: begin with the tokens of the prompt.")
    if begun is not None and len(begun) != len(prefixes):
        raise ValueError(f"`begun` has {len(begun)} entries for {len(prefixes)} prefixes; pass one per prefix.")


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """All but linear layers in evaluation mode: LoRA's dropout would blur what was sampled from, and draw numbers."""
    # Module by module, since frozen parts may be in evaluation mode already.
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            # Linear layers know no dropout, and those of bitsandbytes repack their weights in evaluation mode: on a
            # CPU they cannot be trained any more then.
            module.training = isinstance(module, torch.nn.Linear) and not is_noisy_adapter(module)
        yield
    finally:
        for module, training in modes:
            module.training = training

"""`Sampler`, which samples continuations of any token prefixes from the current policy with TRL's own generation."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

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
# Sharded models gather weights in every forward pass, so all processes must make the same number of passes.
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

Entry = TypeVar("Entry")


class Sampler:
    """
    Samples continuations of token prefixes: any number of samples per prefix, and any number of tokens.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.

    Attributes:
        tokens ([`~trl_explore.sampling.count.TokenCount`]):
            Number of tokens sampled in training, including the main rows that TRL samples.
        prefix_tokens_asked (`int`):
            Number of prefix tokens of all samples.
        prefix_tokens_encoded (`int`):
            Number of prefix tokens that went through a forward pass.
        metrics (`dict[str, float]`):
            Metrics of the current generation batch: seconds for main rows and for extra rows, and the largest size of
            the path cache in megabytes.
        paths ([`~trl_explore.sampling.paths.PathCache`] or `None`):
            The path cache of the running rollout.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tokens = TokenCount()
        self.prefix_tokens_asked = self.prefix_tokens_encoded = 0
        self.metrics: dict[str, float] = {}
        self.paths: PathCache | None = None
        self._rollout: ExitStack | None = None  # closing it ends the rollout that `paths` belongs to
        self._warned = False

    @property
    def batch_size(self) -> int | None:
        """Most rows of one sampling call. None samples all rows in one call."""
        return self.policy.args.sampling_batch_size

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """
        Keep the keys and values of all samples inside the `with` block, where the weights must not change.

        See [`~trl_explore.sampling.paths.PathCache`]. If the model or a sampling option does not allow it, warn once,
        and sample without a cache. Every process must enter.
        """
        args, kind = self.policy.args, self.policy.accelerator.distributed_type
        served = self.policy.serving is not None or args.use_transformers_continuous_batching
        with ExitStack() as self._rollout:
            if args.path_cache_tokens and not served and kind not in SHARDED:
                model, config = self._rollout.enter_context(self.policy.generating())
                options = effective_options(model, config)
                reason = why_not(model, options, eos_token_ids=self.policy.eos_token_ids)
                if reason is None:
                    self.paths = PathCache(model, options, args.path_cache_tokens)
                    self._rollout.callback(self._forget_paths)
                else:
                    self._without_paths(reason)
            yield

    def _forget_paths(self) -> None:
        """Drop the path cache, and note its size."""
        assert self.paths is not None
        megabytes = self.paths.num_bytes / 2**20
        self.metrics["cache_megabytes"] = max(megabytes, self.metrics.get("cache_megabytes", 0.0))
        self.paths = None

    def _without_paths(self, reason: str) -> None:
        """Drop the path cache, so that `generate` samples the rest of the rollout. It encodes prefixes again, so warn
        once. `reason` is a noun for the warning."""
        assert self._rollout is not None
        self._rollout.close()
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
        Sample continuations of token prefixes from the current policy.

        A prefix with several samples is encoded once. Unless `collective=False`, every process must make the same
        number of calls; a process may pass no prefix. Extra samples (`main_stream=False`) do not change the global
        random state, so the main rows are the same with and without extra sampling.

        Args:
            prefixes (`list[list[int]]`):
                Token ids `[R][T_i]`, without an end-of-sequence token.
            num_samples (`int` or `Sequence[int]`):
                Number of continuations of every prefix, or of each prefix, `[R]`.
            max_new_tokens (`int` or `Sequence[int]`):
                Most new tokens of every continuation, or of the continuations of each prefix, `[R]`.
            begun (`Sequence[int]`, *optional*):
                Number of tokens at the end of each prefix that already belong to the completion, `[R]`. The whole
                completion has at most `max_completion_length` tokens. Sampling options that count from the start of a
                completion (`min_new_tokens`, ...) then also count these tokens. None if all completions start after
                the prefix. vLLM and continuous batching always count from the end of the prefix.
            main_stream (`bool`, *optional*, defaults to `False`):
                If `True`, the samples become main rows. Then they use the global random state, as GRPO does.
            entropies (`bool`, *optional*, defaults to `False`):
                If `True`, return the entropy of the distribution that each token was sampled from. vLLM does not
                report entropies; the mean of its negative log-probabilities estimates their mean.
            collective (`bool`, *optional*, defaults to `True`):
                If `True`, all processes make this call. Pass `False` in a tool loop, because each process has its own
                number of turns.

        Returns:
            `list[list[Continuation]]`: Continuations `[R][num_samples_i]`.

        Raises:
            ValueError: If a prefix is empty, if an argument has a wrong number of entries, or if a sequence is too
                long for vLLM.
        """
        counts = per_request(num_samples, len(prefixes), name="num_samples")
        budgets = per_request(max_new_tokens, len(prefixes), name="max_new_tokens")
        _check_prefixes(prefixes, begun)
        if self.policy.serving is not None:
            asked = [Request(*request) for request in zip(prefixes, counts, budgets, strict=True)]
            return self._sample_served(asked, main_stream=main_stream)
        rows = _repeated(prefixes, counts)
        row_budgets = _repeated(budgets, counts)
        row_parts = _repeated(self._parts(budgets, begun), counts)

        most_rows = len(rows)
        if collective:
            most_rows = self.policy.ranks.most(len(rows))
        if most_rows == 0:
            return [[] for _ in prefixes]
        batch_size = self.batch_size or most_rows
        eos_token_ids = self.policy.eos_token_ids
        # Sort by budget, so that a call with short budgets does not wait for a row with a long one.
        order = sorted(range(len(rows)), key=row_budgets.__getitem__)
        sampled: dict[int, Continuation] = {}
        start_time = time.perf_counter()
        with nullcontext() if main_stream else self.forked_randomness():
            for start in range(0, most_rows, batch_size):
                # If no rows are left on this process, it still makes the call with a filler row: sharded models gather
                # weights in `generate`.
                batch = order[start : start + batch_size]
                try:
                    ids, token_entropies = self._generate(
                        [rows[i] for i in batch] or [[eos_token_ids[0]]],
                        [row_budgets[i] for i in batch] or [1],
                        [row_parts[i] for i in batch] or [Part()],
                        entropies=entropies,
                    )
                except torch.OutOfMemoryError as error:
                    error.add_note(
                        f"while sampling {len(batch)} extra rows in one call: set `sampling_batch_size` below that, "
                        "or sample fewer (DEEP-GRPO: `max_pivots_per_batch`; tree search: `expansion_width`)."
                    )
                    raise
                for place, i in enumerate(batch):
                    tokens = ids[place][: row_budgets[i]]
                    cut = None
                    if token_entropies is not None:
                        cut = token_entropies[place][: row_budgets[i]]
                    sampled[i] = Continuation(tokens, finished=tokens[-1] in eos_token_ids, entropies=cut)
        self.note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        found: list[list[Continuation]] = []
        first = 0
        for count in counts:
            found.append([sampled[i] for i in range(first, first + count)])
            first += count
        self._count(found)
        return found

    def token_logprobs(self, prefixes: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """
        Return log-probabilities of completions under the current policy, at the sampling temperature.

        Every process must make this call with the same number of rows.

        Args:
            prefixes (`list[list[int]]`):
                Token ids before each completion, `[R][P_i]`.
            completion_ids (`list[list[int]]`):
                Token ids `[R][T_i]`.

        Returns:
            `list[list[float]]`: Log-probabilities `[R][T_i]`.
        """
        logprobs, _ = self._forward(prefixes, completion_ids, entropies=False)
        return [row[: len(ids)] for row, ids in zip(logprobs.tolist(), completion_ids, strict=True)]

    def note_seconds(self, stream: str, seconds: float) -> None:
        """Add to the sampling time of the generation batch, for `stream` "main" or "extra"."""
        name = f"{stream}_seconds"
        self.metrics[name] = self.metrics.get(name, 0.0) + seconds

    def _parts(self, budgets: list[int], begun: Sequence[int] | None) -> list[Part]:
        """Return the position of each request's new tokens in its completion, `[R]`. A budget may exceed
        `max_completion_length`; then the completion ends where the budget ends."""
        if begun is None:
            return [Part(0, budget) for budget in budgets]
        most = self.policy.args.max_completion_length or 0
        return [Part(number, max(most, number + budget)) for number, budget in zip(begun, budgets, strict=True)]

    def _sample_served(self, asked: list[Request], *, main_stream: bool) -> list[list[Continuation]]:
        """Sample with vLLM. Return the continuations of each request."""
        assert self.policy.serving is not None
        start_time = time.perf_counter()
        answers = self.policy.serving.complete(asked)
        for request in asked:
            self.prefix_tokens_asked += len(request.prefix) * request.num_samples
            self.prefix_tokens_encoded += len(request.prefix)
        self.note_seconds("main" if main_stream else "extra", time.perf_counter() - start_time)
        ends = self.policy.eos_token_ids
        found: list[list[Continuation]] = []
        for answers_of_request in answers:
            continuations = []
            for answer in answers_of_request:
                finished = answer.token_ids[-1] in ends
                continuations.append(Continuation(answer.token_ids, logprobs=answer.logprobs, finished=finished))
            found.append(continuations)
        self._count(found)
        return found

    def _count(self, found: list[list[Continuation]]) -> None:
        """Count the tokens of new continuations, unless they are sampled in an evaluation."""
        if self.policy.model.training:
            for continuations in found:
                self.tokens.add([continuation.token_ids for continuation in continuations])

    def _generate(
        self, prefixes: list[list[int]], budgets: list[int], parts: list[Part], *, entropies: bool
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """
        Sample one continuation of each prefix, from the path cache or with `generate`.

        Returns:
            `tuple`: Continuations `[R][T_i]`, which may be longer than their budgets. With `entropies=True`, entropies
            in nats of the distributions that the tokens were sampled from, `[R][T_i]`; otherwise None.
        """
        args = self.policy.args
        if self.paths is not None:
            reason = self.paths.why_not(prefixes, budgets)
            if reason is None:
                encoded_before = self.paths.encoded
                temperature = args.temperature if entropies else None
                found = self.paths.complete(prefixes, budgets, entropies=temperature)
                assert found is not None
                self.prefix_tokens_asked += sum(map(len, prefixes))
                self.prefix_tokens_encoded += self.paths.encoded - encoded_before
                return found
            self._without_paths(reason)
        if args.use_transformers_continuous_batching:  # its forward passes mix rows, so hooks cannot record them
            ids = self.policy.generate(prefixes, max(budgets))
        else:
            model = self.policy.accelerator.unwrap_model(self.policy.model)
            record_entropies = entropies and self._one_token_per_pass()
            with recorded(model, temperature=args.temperature, entropies=record_entropies) as record:
                ids = self.policy.generate(prefixes, max(budgets), parts)
            self.prefix_tokens_asked += record.prefill_tokens
            self.prefix_tokens_encoded += record.encoded_tokens
            if record_entropies:
                return ids, record.token_entropies(list(map(len, ids)))
        if not entropies:
            return ids, None
        _, padded = self._forward(prefixes, ids)
        return ids, [row[: len(tokens)] for row, tokens in zip(padded.tolist(), ids, strict=True)]

    def _one_token_per_pass(self) -> bool:
        """Return whether each forward pass of `generate` yields one token per row, and rows keep their places."""
        model = self.policy.accelerator.unwrap_model(self.policy.model)
        options = {**vars(language_model(model).generation_config), **(self.policy.args.generation_kwargs or {})}
        num_beams = options.get("num_beams") or 1  # beams change their places after every token
        return num_beams == 1 and not any(options.get(name) for name in SEVERAL_TOKENS)

    def _forward(
        self, prefixes: list[list[int]], ids: list[list[int]], *, entropies: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of completions `ids`, both `(R, T)`. Entries on padding have no
        meaning."""
        device, pad_id = self.policy.accelerator.device, self.policy.tokenizer.pad_token_id
        longest_prefix, longest = max(map(len, prefixes)), max(map(len, ids))
        rows, real = [], []
        for prefix, tokens in zip(prefixes, ids, strict=True):
            left, right = longest_prefix - len(prefix), longest - len(tokens)
            rows.append([pad_id] * left + prefix + tokens + [pad_id] * right)
            real.append([0] * left + [1] * (len(prefix) + len(tokens)) + [0] * right)
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
        """Seed the global random state from the exploration generator, and restore it at the end of the block."""
        seed = int(torch.randint(2**62, (1,), generator=self.policy.exploration_generator))
        with kept_randomness(self.policy.accelerator.device, seed=seed):
            yield


def _repeated(entries: Sequence[Entry], counts: Sequence[int]) -> list[Entry]:
    """Repeat each entry, such as a prefix, once per sample."""
    repeated: list[Entry] = []
    for entry, count in zip(entries, counts, strict=True):
        repeated += [entry] * count
    return repeated


def _check_prefixes(prefixes: list[list[int]], begun: Sequence[int] | None) -> None:
    """Raise a ValueError if a prefix is empty or `begun` has another number of entries."""
    if not all(prefixes):
        raise ValueError("A prefix is empty: begin with the tokens of the prompt.")
    if begun is not None and len(begun) != len(prefixes):
        raise ValueError(f"`begun` has {len(begun)} entries for {len(prefixes)} prefixes; pass one per prefix.")


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """
    Put linear layers into training mode and all other layers into evaluation mode, and restore their modes at the end
    of the block.

    Otherwise dropout, also LoRA's, would change log-probabilities and consume random numbers.
    """
    # Some modules may be in evaluation mode already, such as frozen ones. So restore the mode of each module.
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            # Linear layers have no dropout, except PVeRA's, which add noise. In evaluation mode, linear layers of
            # bitsandbytes repack their weights, and then cannot be trained on a CPU any more.
            module.training = isinstance(module, torch.nn.Linear) and not is_noisy_adapter(module)
        yield
    finally:
        for module, training in modes:
            module.training = training

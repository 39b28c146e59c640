"""Keys and values of sampled paths, kept while a rollout grows from them: nothing is encoded twice.

A search asks for continuations of what it has just sampled. `generate` would encode the whole path again with every
call, and take longer to be set up than a tiny model takes to answer. A [`PathCache`] keeps what the model computed for
every token, found by the tokens before it, and decodes in a loop of its own with transformers' logits processors.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from trl_explore.sampling.generation import (
    cache_argument,
    has_dropout,
    language_model,
    row_entropies,
    whole_row_adapter,
)
from trl_explore.sampling.positions import fixed_rotary_length

FIRST_SLOTS = 1024
# What the loop below does as `generate` does; with anything else that is set, `generate` samples.
OPTIONS = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length"}
OPTIONS |= {
    "_from_model_config",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "disable_compile",
    "use_cache",
    "transformers_version",
}
ONE_IS_NONE = {"num_beams", "num_return_sequences", "length_penalty", "typical_p", "guidance_scale"}
INPUTS = {"input_ids", "attention_mask", "position_ids", "use_cache"}


def effective_options(model: Any, config: GenerationConfig) -> GenerationConfig:
    """A configuration with the model's own where it says nothing, as `generate` reads it."""
    options = copy.deepcopy(config)
    options.update(**language_model(model).generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    if options.top_k is None:
        options.top_k = 50  # of the defaults of `generate` the one that does something
    return options


def why_not(model: Any, options: GenerationConfig, *, eos_token_ids: Sequence[int] | None = None) -> str | None:
    """
    Return why a [`PathCache`] cannot sample from a model as `generate` does, or None if it can.

    Args:
        model (`Any`):
            Model as `generate` is called on it, with adapters.
        options ([`~transformers.GenerationConfig`]):
            Options from [`effective_options`].
        eos_token_ids (`Sequence[int]`, *optional*):
            Tokens at which TRL cuts a completion. If `generate` ends rows at others, it pads them, and TRL keeps the
            padding.
    """
    inner = language_model(model)
    config = inner.config
    missing = (INPUTS | {cache_argument(inner)}) - set(inspect.signature(inner.forward).parameters)
    given = {
        name for name, value in options.to_diff_dict().items() if value and not (name in ONE_IS_NONE and value == 1)
    }
    unknown = sorted(given - OPTIONS)
    devices = {parameter.device for parameter in inner.parameters()}
    if eos_token_ids is not None and _end_tokens(options) != set(eos_token_ids):
        unknown.append("eos_token_id")
    if unknown:
        return f"the sampling options {', '.join(unknown)}"
    if (adapter := whole_row_adapter(model)) is not None:
        return adapter
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config or missing:
        return f"the inputs of {type(inner).__name__}"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return f"layers of {type(inner).__name__} that keep less, or more, than all keys and values"
    if has_dropout(model):
        return "dropout while sampling: set it to 0"
    return "a model on several devices" if len(devices) > 1 else None


def _end_tokens(options: GenerationConfig) -> set[int | None]:
    """Return the tokens at which `generate` ends a row."""
    ends: Any = options.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Attention by kernels that take any shape. On an H100, torch 2.11 asks cuDNN first, which prepares itself for a
    batch size and length that is new to it, as most are here, and takes three steps' time for that."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class _Node:
    """A token behind the tokens above it."""

    __slots__ = ("children", "slot", "used")

    def __init__(self, slot: int, used: int) -> None:
        self.children: dict[int, _Node] = {}
        self.slot, self.used = slot, used


class PathCache:
    """
    Keys and values of the tokens that the model has seen behind each other, up to `limit` tokens; those that were used
    longest ago make room. It belongs to one rollout: the weights must not change.

    `asked` and `encoded` count prefix tokens: those of all rows, and those that the model was given.
    """

    def __init__(self, model: Any, options: GenerationConfig, limit: int) -> None:
        self.model, self.options, self.limit = model, options, limit
        self.device = next(model.parameters()).device
        self.asked = self.encoded = 0
        self._root, self._now = _Node(-1, 0), 0
        self._pool: torch.Tensor | None = None  # `(slots, all keys and values of a token)`
        self._shapes: list[tuple[int, int]] = []  # heads and their size, of keys and values of each layer in turn
        self._free: list[int] = []
        self._ends = _end_tokens(options)
        self._pad = options.pad_token_id
        takes = inspect.signature(language_model(model).forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._cache_argument = cache_argument(model)
        config = language_model(model).config
        self.longest = fixed_rotary_length(config)
        # Alibi's positions are made of the usual mask.
        self._sdpa = config._attn_implementation == "sdpa" and not config.to_dict().get("alibi")
        self.warpers = _processors(options)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return (0 if self._pool is None else len(self._pool)) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache."""
        return 0 if self._pool is None else self._pool.nbytes

    def why_not(self, rows: Sequence[Sequence[int]], budgets: Sequence[int]) -> str | None:
        """Return why [`complete`] cannot continue these rows, or None if it can."""
        if sum(map(len, {tuple(row) for row in rows})) > self.limit:
            return f"`path_cache_tokens={self.limit}`, fewer than one call's prefixes have"
        # The last token of a row is sampled, but the model never reads it.
        longest = max(map(len, rows)) + max(budgets) - 1
        if self.longest is not None and longest > self.longest:
            name = type(language_model(self.model)).__name__
            return f"rotary factors of {name} that change for rows of more than {self.longest} tokens"
        return None

    @torch.no_grad()
    @without_cudnn_attention()
    def complete(
        self, rows: Sequence[list[int]], budgets: Sequence[int], *, entropies: float | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """
        One continuation of each row, up to the first end token, which is included, or the largest budget: the draws
        are those of `generate`. `None` if [`why_not`] has a reason.

        Args:
            rows (`Sequence[list[int]]`):
                Token ids `[B][P_i]`, at least one each. Equal ones are encoded once.
            budgets (`Sequence[int]`):
                Most new tokens of each row that may be continued later.
            entropies (`float`, *optional*):
                Temperature at which the entropy behind each token is noted.
        """
        paths: dict[tuple[int, ...], int] = {}
        of_row = [paths.setdefault(tuple(row), len(paths)) for row in rows]
        prefixes = list(paths)
        if self.why_not(rows, budgets) is not None:
            return None
        self._now += 1
        self.asked += sum(map(len, rows))
        tips, cache, logits, mask = self._encode(prefixes)
        length = mask.shape[1]
        history = None
        if any(isinstance(warper, RepetitionPenaltyLogitsProcessor) for warper in self.warpers):
            # `generate` does not count padding as said.
            history = torch.tensor([[row[0]] * (length - len(row)) + row for row in rows], device=self.device)
        completions: list[list[int]] = [[] for _ in rows]
        noted: list[list[float]] = [[] for _ in rows]
        positions = mask.sum(1, keepdim=True)
        going = list(range(len(rows)))  # what each row of `logits` and `history` continues
        uncertain = row_entropies(logits, temperature=entropies) if entropies is not None else None
        drawn, picked = logits, None  # `picked`: rows of the cache that those come from, if they are others
        if len(prefixes) < len(rows):
            picked = torch.tensor(of_row, device=self.device)
            logits, uncertain = logits[picked], None if uncertain is None else uncertain[picked]
        for step in range(max(budgets)):
            if step:
                still = [place for place, row in enumerate(going) if completions[row][-1] not in self._ends]
                if not still:
                    break
                if 4 * len(still) <= 3 * len(going):  # a cache is copied a few times, and not for a row or two
                    kept = torch.tensor(still, device=self.device)
                    going, drawn = [going[place] for place in still], drawn[kept]
                    history = None if history is None else history[kept]
                    picked = kept if picked is None else picked[kept]
                if picked is not None:
                    cache.reorder_cache(picked)  # type: ignore[arg-type]
                    mask, positions, picked = mask[picked], positions[picked], None
                mask = torch.cat([mask, mask.new_ones(len(going), 1)], dim=1)
                logits = self._forward(drawn[:, None], mask, positions + step - 1, cache)
                uncertain = row_entropies(logits, temperature=entropies) if entropies is not None else None
            drawn = self._drawn(self.warpers(history, logits.float()), going, len(rows))  # type: ignore[arg-type]
            history = None if history is None else torch.cat([history, drawn[:, None]], dim=1)
            values = [0.0] * len(going) if uncertain is None else uncertain.tolist()
            for row, token, value in zip(going, drawn.tolist(), values, strict=True):
                if not completions[row] or completions[row][-1] not in self._ends:
                    completions[row].append(token)
                    noted[row].append(value)
        fed = [(place, row, completions[row]) for place, row in enumerate(going)]
        self._keep(
            cache,
            [(tips[of_row[row]], place, length, ids[: min(budgets[row], len(ids) - 1)]) for place, row, ids in fed
             if ids[-1] not in self._ends],  # what has ended is not continued
        )  # fmt: skip
        return completions, None if entropies is None else noted

    def _drawn(self, scores: torch.Tensor, going: list[int], num_rows: int) -> torch.Tensor:
        """A token for each row that goes on, from as many random numbers as all rows would take."""
        if not self.options.do_sample:
            return scores.argmax(-1)
        probs = scores.softmax(-1)
        if len(going) == num_rows:
            return torch.multinomial(probs, 1).squeeze(1)
        rows = torch.tensor(going, device=self.device)
        of_all = probs.new_ones(num_rows, probs.shape[1]).index_copy_(0, rows, probs)
        return torch.multinomial(of_all, 1).squeeze(1)[rows]

    def _encode(self, prefixes: list[tuple[int, ...]]) -> tuple[list[_Node], DynamicCache, torch.Tensor, torch.Tensor]:
        """The node of each prefix, and the model's answer to its last token: cache, logits `(U, V)`, mask `(U, L)`."""
        known = [self._find(prefix) for prefix in prefixes]
        short = [i for i, path in enumerate(known) if len(path) < len(prefixes[i]) - 1]
        if 0 < len(short) < len(prefixes):  # the others would be encoded again with them
            self._encode_behind([(prefixes[i][:-1], known[i]) for i in short])
            known = [self._find(prefix) for prefix in prefixes]
        return self._encode_behind(list(zip(prefixes, known, strict=True)))

    def _encode_behind(
        self, asked: list[tuple[tuple[int, ...], list[_Node]]]
    ) -> tuple[list[_Node], DynamicCache, torch.Tensor, torch.Tensor]:
        """Encode what is not kept of token sequences, at least the last token; all get as many new tokens as the one
        that lacks most."""
        new = max(max(1, len(ids) - len(path)) for ids, path in asked)
        paths = [path[: max(0, len(ids) - new)] for ids, path in asked]
        old = max(map(len, paths))
        fresh = [ids[len(path) :] for (ids, _), path in zip(asked, paths, strict=True)]
        inputs = torch.tensor([[self._pad] * (new - len(ids)) + list(ids) for ids in fresh], device=self.device)
        lengths = torch.tensor([len(ids) for ids, _ in asked], device=self.device)[:, None]
        mask = (torch.arange(old + new, device=self.device) >= old + new - lengths).long()
        positions = lengths - 1 if new == 1 else (mask.cumsum(1) - 1).clamp(min=0)[:, old:]
        cache = self._gathered(paths, old)
        logits = self._forward(inputs, mask, positions, cache)
        self.encoded += sum(map(len, fresh))
        ends = [path[-1] if path else self._root for path in paths]
        self._keep(cache, [(ends[i], i, old + new - len(ids), list(ids)) for i, ids in enumerate(fresh)])
        return [self._below(end, ids) for end, ids in zip(ends, fresh, strict=True)], cache, logits, mask

    def _below(self, node: _Node, ids: Iterable[int]) -> _Node:
        """The node at the end of tokens below a node; one without a place where they are not kept."""
        for token in ids:
            found = node.children.get(token)
            if found is None:
                return _Node(-1, self._now)
            node = found
        return node

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits `(B, V)` behind the last tokens; `cache` grows."""
        # Of a single token the mask is known, and making it would take a tiny model an eighth of its time.
        ready = mask[:, None, None].bool() if self._sdpa and ids.shape[1] == 1 else mask
        output = self.model(
            input_ids=ids,
            attention_mask=ready,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._last_logits,
        )
        return output.logits[:, -1]

    def _find(self, ids: Iterable[int]) -> list[_Node]:
        """The nodes of the longest beginning that is kept, which is used now."""
        node, path = self._root, []
        for token in ids:
            found = node.children.get(token)
            if found is None:
                break
            node = found
            node.used = self._now
            path.append(node)
        return path

    # ---------------------------------------------------------------------------------------------------- the tensors

    def _gathered(self, paths: list[list[_Node]], width: int) -> DynamicCache:
        """A cache with a row per path, padded on the left."""
        cache = DynamicCache()
        if width == 0:
            return cache
        assert self._pool is not None
        slots = [[0] * (width - len(path)) + [node.slot for node in path] for path in paths]
        flat = self._pool[torch.tensor(slots, device=self.device).flatten()].view(len(paths), width, -1)
        parts = flat.split([heads * size for heads, size in self._shapes], dim=-1)
        states = [
            part.view(len(paths), width, heads, size).transpose(1, 2)
            for part, (heads, size) in zip(parts, self._shapes, strict=True)
        ]
        for keys, values in zip(states[::2], states[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them once more
            cache.layers.append(layer)
        return cache

    def _keep(self, cache: DynamicCache, runs: list[tuple[_Node, int, int, list[int]]]) -> None:
        """Put tokens below their nodes: node, row of the cache, place of the first token there, tokens."""
        wanted = sum(len(ids) for *_, ids in runs)
        if not wanted:
            return
        if self._pool is None:
            states = _states(cache)
            self._shapes = [(state.shape[1], state.shape[3]) for state in states]
            self._pool = states[0].new_empty(0, sum(heads * size for heads, size in self._shapes))
        if len(self._free) < wanted:
            self._make_room(wanted)
        rows, places, slots = [], [], []
        for node, row, place, ids in runs:
            if node.slot < 0 and node is not self._root:  # above it something was not kept
                continue
            for offset, token in enumerate(ids):
                child = node.children.get(token)
                if child is None:
                    if not self._free:
                        break
                    child = node.children[token] = _Node(self._free.pop(), self._now)
                    rows.append(row)
                    places.append(place + offset)
                    slots.append(child.slot)
                child.used = self._now
                node = child
        if not slots:
            return
        row_index, place_index, slot_index = torch.tensor([rows, places, slots], device=self.device)
        new = [state[row_index, :, place_index].flatten(1) for state in _states(cache)]
        assert self._pool is not None
        # In mixed precision, keys with rotary positions are float32 and others are not.
        self._pool[slot_index] = torch.cat(new, dim=1).to(self._pool.dtype)

    def _make_room(self, wanted: int) -> None:
        assert self._pool is not None
        have = len(self._pool)
        if have < self.limit:
            size = min(self.limit, max(FIRST_SLOTS, 2 * have, have - len(self._free) + wanted))
            self._pool = torch.cat([self._pool, self._pool.new_zeros(size - have, self._pool.shape[1])])
            self._free += range(have, size)
        if len(self._free) < wanted:
            self._evict(max(wanted - len(self._free), self.limit // 4))

    def _evict(self, number: int) -> None:
        """Forget so many tokens, if there are as many that are not used now: those used longest ago, ends first."""
        found, open_nodes = [], [(self._root, 0)]
        while open_nodes:
            node, depth = open_nodes.pop()
            for token, child in node.children.items():
                if child.used < self._now:
                    found.append((child.used, -depth, token, node))
                open_nodes.append((child, depth + 1))
        # A node is used whenever one below it is, so that ends come first.
        for _, _, token, parent in sorted(found, key=lambda entry: entry[:2])[:number]:
            self._free.append(parent.children.pop(token).slot)


def _states(cache: DynamicCache) -> list[Any]:
    """Keys and values of each layer in turn, `(B, heads, L, size)`."""
    return [state for layer in cache.layers if isinstance(layer, DynamicLayer) for state in (layer.keys, layer.values)]


def _processors(options: GenerationConfig) -> LogitsProcessorList:
    """transformers' processors for the options, in the order of `generate`."""
    processors = LogitsProcessorList()
    if options.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=options.repetition_penalty))
    if not options.do_sample:
        return processors
    if options.temperature not in (None, 1.0):
        processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(top_k=options.top_k))
    if options.top_p is not None and options.top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p=options.top_p))
    if options.min_p is not None:
        processors.append(MinPLogitsWarper(min_p=options.min_p))
    return processors

"""A cache of keys and values for all tokens of a rollout, so that no prefix is encoded twice.

A tree search continues the completions that it has just sampled. `generate` would encode the whole prefix again in
every call, and its set-up takes longer than the forward passes of a tiny model. A [`PathCache`] keeps the keys and
values of every token and finds them by the tokens before it. It samples in its own loop, with the logits processors of
transformers.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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

FIRST_SLOTS = 1024  # minimum number of tokens of the first allocation of memory

# Options that the loop below follows exactly as `generate` does. If another option is set, `generate` samples.
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
OFF_AT_ONE = {"num_beams", "num_return_sequences", "length_penalty", "typical_p", "guidance_scale"}  # 1: no effect
INPUTS = {"input_ids", "attention_mask", "position_ids", "use_cache"}  # arguments that the model must have


def effective_options(model: Any, config: GenerationConfig) -> GenerationConfig:
    """Return a copy of `config` in which the model's own options and `generate`'s defaults fill the missing ones."""
    options = copy.deepcopy(config)
    options.update(**language_model(model).generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    if options.top_k is None:
        options.top_k = 50  # the only default of `generate` that has an effect
    return options


def why_not(model: Any, options: GenerationConfig, *, eos_token_ids: Sequence[int] | None = None) -> str | None:
    """
    Return why a [`PathCache`] cannot sample from a model as `generate` does, or None if it can.

    Args:
        model (`Any`):
            Model on which `generate` is called, with its adapters.
        options ([`~transformers.GenerationConfig`]):
            Options from [`effective_options`].
        eos_token_ids (`Sequence[int]`, *optional*):
            Tokens at which TRL cuts a completion. If `generate` ends rows at other tokens, it pads them, and TRL keeps
            the padding.

    Returns:
        `str` or `None`: Noun for messages, such as "the sampling options num_beams".
    """
    inner = language_model(model)
    config = inner.config
    unknown = []
    for name, value in options.to_diff_dict().items():
        switched_off = not value or (name in OFF_AT_ONE and value == 1)
        if not switched_off and name not in OPTIONS:
            unknown.append(name)
    unknown.sort()
    if eos_token_ids is not None and _end_tokens(options) != set(eos_token_ids):
        unknown.append("eos_token_id")
    if unknown:
        return f"the sampling options {', '.join(unknown)}"
    if (adapter := whole_row_adapter(model)) is not None:
        return adapter
    missing = (INPUTS | {cache_argument(inner)}) - set(inspect.signature(inner.forward).parameters)
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config or missing:
        return f"the inputs of {type(inner).__name__}"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return f"layers of {type(inner).__name__} that keep less, or more, than all keys and values"
    if has_dropout(model):
        return "dropout while sampling: set it to 0"
    devices = {parameter.device for parameter in inner.parameters()}
    if len(devices) > 1:
        return "a model on several devices"
    return None


def _end_tokens(options: GenerationConfig) -> set[int | None]:
    """Return the tokens at which `generate` ends a row."""
    ends: Any = options.eos_token_id
    if isinstance(ends, list):
        return set(ends)
    return {ends}


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """
    Switch off cuDNN's attention kernels inside the `with` block.

    On an H100, torch 2.11 prefers cuDNN. cuDNN prepares itself for every new batch size and length, and almost every
    forward pass of the loop has a new one. The preparation takes as long as three sampling steps.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class _Node:
    """A token in the tree of encoded tokens. The tokens on the way from the root to the node are its prefix."""

    __slots__ = ("children", "slot", "used")

    def __init__(self, slot: int, used: int) -> None:
        self.children: dict[int, _Node] = {}  # by token id
        self.slot = slot  # row of the pool with keys and values; -1 for the root, and if they are not kept
        self.used = used  # number of the last call that used the node


class _Encoded(NamedTuple):
    """Result of encoding prefixes."""

    tips: list[_Node]  # node of the last token of each prefix, `[U]`
    cache: DynamicCache  # keys and values of all prefixes, padded on the left
    logits: torch.Tensor  # after the last token, `(U, V)`
    mask: torch.Tensor  # 1 for tokens, 0 for padding, `(U, L)`


class _Run(NamedTuple):
    """Consecutive tokens whose keys and values are in a cache, and which are to be kept."""

    parent: _Node  # node before the first token
    row: int  # row of the cache
    column: int  # position of the first token in that row
    ids: list[int]


class PathCache:
    """
    Keys and values of the tokens of one rollout, and a sampling loop that uses them.

    If the cache is full, it forgets the tokens that were used longest ago. A cache is valid for one rollout only: the
    weights must not change.

    Args:
        model (`Any`):
            Model on which `generate` would be called, with its adapters. [`why_not`] must return None for it.
        options ([`~transformers.GenerationConfig`]):
            Options from [`effective_options`].
        limit (`int`):
            Most tokens to keep.

    Attributes:
        asked (`int`):
            Number of prefix tokens of all rows of all calls.
        encoded (`int`):
            Number of prefix tokens that the model has encoded.
        longest (`int` or `None`):
            Most tokens of a row; see [`~trl_explore.sampling.positions.fixed_rotary_length`].
    """

    def __init__(self, model: Any, options: GenerationConfig, limit: int) -> None:
        self.model, self.options, self.limit = model, options, limit
        self.device = next(model.parameters()).device
        self.asked = self.encoded = 0
        self._root, self._now = _Node(-1, 0), 0
        self._pool: torch.Tensor | None = None  # `(slots, all keys and values of a token)`
        self._shapes: list[tuple[int, int]] = []  # heads and head size of the keys and values of each layer
        self._free: list[int] = []  # unused slots
        self._ends = _end_tokens(options)
        self._pad = options.pad_token_id
        inner = language_model(model)
        self._extra_inputs: dict[str, Any] = {}
        if "logits_to_keep" in inspect.signature(inner.forward).parameters:
            self._extra_inputs["logits_to_keep"] = 1
        self._cache_argument = cache_argument(model)
        self.longest = fixed_rotary_length(inner.config)
        # ALiBi computes its position biases from a two-dimensional mask.
        self._sdpa = inner.config._attn_implementation == "sdpa" and not inner.config.to_dict().get("alibi")
        self.warpers = _processors(options)

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys and values are kept."""
        if self._pool is None:
            return 0
        return len(self._pool) - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache in bytes."""
        if self._pool is None:
            return 0
        return self._pool.nbytes

    def why_not(self, rows: Sequence[Sequence[int]], budgets: Sequence[int]) -> str | None:
        """
        Return why [`complete`] cannot continue these rows, or None if it can.

        Args:
            rows (`Sequence[Sequence[int]]`):
                Token ids `[B][P_i]`.
            budgets (`Sequence[int]`):
                Most new tokens of each row, `[B]`.

        Returns:
            `str` or `None`: Noun for messages.
        """
        distinct = {tuple(row) for row in rows}
        if sum(map(len, distinct)) > self.limit:
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
        Sample one continuation of each row, with the same random numbers and the same result as `generate`.

        Args:
            rows (`Sequence[list[int]]`):
                Token ids `[B][P_i]`, at least one per row. Equal rows are encoded once.
            budgets (`Sequence[int]`):
                Most new tokens of each row that the caller uses, `[B]`. All rows are sampled up to the largest budget,
                as `generate` does, and the caller cuts them. Only tokens within a row's budget are kept in the cache.
            entropies (`float`, *optional*):
                Temperature of the distributions whose entropies are returned. None for no entropies.

        Returns:
            `tuple` or `None`: Continuations `[B][T_i]` up to the first end token, which is included. Entropies in nats
            of the distributions that their tokens were sampled from `[B][T_i]`, or None. None instead of both if
            [`why_not`] returns a reason.
        """
        if self.why_not(rows, budgets) is not None:
            return None
        number_of: dict[tuple[int, ...], int] = {}  # distinct prefixes, numbered
        prefix_of = []  # number of the prefix of each row
        for ids in rows:
            prefix_of.append(number_of.setdefault(tuple(ids), len(number_of)))
        prefixes = list(number_of)
        self._now += 1
        self.asked += sum(map(len, rows))
        tips, cache, logits, mask = self._encode(prefixes)
        length = mask.shape[1]
        history = None
        if any(isinstance(warper, RepetitionPenaltyLogitsProcessor) for warper in self.warpers):
            # The penalty must ignore padding, as it does in `generate`. So pad each row with a token that it contains.
            padded = [[row[0]] * (length - len(row)) + row for row in rows]
            history = torch.tensor(padded, device=self.device)
        completions: list[list[int]] = [[] for _ in rows]
        token_entropies: list[list[float]] = [[] for _ in rows]
        positions = mask.sum(1, keepdim=True)  # number of tokens of each prefix
        active = list(range(len(rows)))  # numbers of the rows in `logits`, `history` and `sampled`
        step_entropies = _entropies(logits, entropies)
        selected = None  # rows that the cache must select before the next forward pass
        if len(prefixes) < len(rows):
            selected = torch.tensor(prefix_of, device=self.device)
            logits = logits[selected]
            step_entropies = _select(step_entropies, selected)
        sampled = positions.new_empty(0)  # tokens of the previous step
        for step in range(max(budgets)):
            if step:
                unfinished = [place for place, row in enumerate(active) if not self._has_ended(completions[row])]
                if not unfinished:
                    break
                # Dropping rows copies the cache, so do it only if at least a quarter of the rows has ended.
                if 4 * len(unfinished) <= 3 * len(active):
                    kept = torch.tensor(unfinished, device=self.device)
                    active, sampled = [active[place] for place in unfinished], sampled[kept]
                    history = _select(history, kept)
                    selected = kept if selected is None else selected[kept]
                if selected is not None:
                    cache.reorder_cache(selected)  # type: ignore[arg-type]
                    mask, positions, selected = mask[selected], positions[selected], None
                mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
                logits = self._forward(sampled[:, None], mask, positions + step - 1, cache)
                step_entropies = _entropies(logits, entropies)
            scores = self.warpers(history, logits.float())  # type: ignore[arg-type]
            sampled = self._sample(scores, active, len(rows))
            if history is not None:
                history = torch.cat([history, sampled[:, None]], dim=1)
            values = [0.0] * len(active) if step_entropies is None else step_entropies.tolist()
            for row, token, value in zip(active, sampled.tolist(), values, strict=True):
                if not self._has_ended(completions[row]):
                    completions[row].append(token)
                    token_entropies[row].append(value)
        runs = []
        for place, row in enumerate(active):
            ids = completions[row]
            if not self._has_ended(ids):  # nobody continues a completion that has ended
                num_read = min(budgets[row], len(ids) - 1)  # the model has not read the last token
                runs.append(_Run(tips[prefix_of[row]], place, length, ids[:num_read]))
        self._keep(cache, runs)
        if entropies is None:
            return completions, None
        return completions, token_entropies

    def _has_ended(self, ids: list[int]) -> bool:
        """Return whether a completion has an end token."""
        return bool(ids) and ids[-1] in self._ends

    def _sample(self, scores: torch.Tensor, active: list[int], num_rows: int) -> torch.Tensor:
        """Sample a token `(A,)` for each active row from `scores` `(A, V)`. Consume the random numbers of all
        `num_rows` rows, because `generate` keeps rows that have ended."""
        if not self.options.do_sample:
            return scores.argmax(-1)
        probs = scores.softmax(-1)
        if len(active) == num_rows:
            return torch.multinomial(probs, 1).squeeze(1)
        rows = torch.tensor(active, device=self.device)
        of_all = probs.new_ones(num_rows, probs.shape[1]).index_copy_(0, rows, probs)
        return torch.multinomial(of_all, 1).squeeze(1)[rows]

    def _encode(self, prefixes: list[tuple[int, ...]]) -> _Encoded:
        """Encode distinct prefixes: the tokens that are not kept yet, and at least the last token of each prefix,
        whose logits are needed."""
        known = [self._find(prefix) for prefix in prefixes]
        incomplete = [i for i, path in enumerate(known) if len(path) < len(prefixes[i]) - 1]
        # In one forward pass all rows get the same number of new tokens. So first complete the prefixes with several
        # missing tokens; otherwise the other prefixes would be encoded again with them.
        if 0 < len(incomplete) < len(prefixes):
            self._encode_after([(prefixes[i][:-1], known[i]) for i in incomplete])
            known = [self._find(prefix) for prefix in prefixes]
        return self._encode_after(list(zip(prefixes, known, strict=True)))

    def _encode_after(self, asked: list[tuple[tuple[int, ...], list[_Node]]]) -> _Encoded:
        """
        Encode token sequences in one forward pass.

        All rows get the same number of new tokens: the number that the row with most missing tokens needs, at least 1.

        Args:
            asked (`list[tuple]`):
                Token ids of each row, and the kept nodes of its first tokens.
        """
        new = max(max(1, len(ids) - len(path)) for ids, path in asked)
        paths, fresh, padded = [], [], []
        for ids, path in asked:
            path = path[: max(0, len(ids) - new)]  # a row with fewer missing tokens encodes kept tokens again
            rest = list(ids[len(path) :])
            paths.append(path)
            fresh.append(rest)
            padded.append([self._pad] * (new - len(rest)) + rest)
        old = max(map(len, paths))
        inputs = torch.tensor(padded, device=self.device)
        lengths = torch.tensor([len(ids) for ids, _ in asked], device=self.device)[:, None]
        mask = (torch.arange(old + new, device=self.device) >= old + new - lengths).long()
        if new == 1:
            positions = lengths - 1
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, old:]
        cache = self._gathered(paths, old)
        logits = self._forward(inputs, mask, positions, cache)
        self.encoded += sum(map(len, fresh))
        parents = [path[-1] if path else self._root for path in paths]
        runs = []
        for row, (parent, rest) in enumerate(zip(parents, fresh, strict=True)):
            runs.append(_Run(parent, row, old + new - len(rest), rest))
        self._keep(cache, runs)
        tips = [self._below(run.parent, run.ids) for run in runs]
        return _Encoded(tips, cache, logits, mask)

    def _below(self, node: _Node, ids: Iterable[int]) -> _Node:
        """Return the node that is reached from `node` along tokens. If one is not kept, return a node without slot."""
        for token in ids:
            found = node.children.get(token)
            if found is None:
                return _Node(-1, self._now)
            node = found
        return node

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Return the logits `(B, V)` after the last tokens, and add the keys and values of `ids` to `cache`."""
        # The attention mask of a single token is `mask` itself. If transformers made it, that would take an eighth of
        # the time of a tiny model's forward pass.
        ready = mask
        if self._sdpa and ids.shape[1] == 1:
            ready = mask[:, None, None].bool()
        output = self.model(
            input_ids=ids,
            attention_mask=ready,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._extra_inputs,
        )
        return output.logits[:, -1]

    def _find(self, ids: Iterable[int]) -> list[_Node]:
        """Return the nodes of the longest kept prefix of `ids`, and mark them as used."""
        node, path = self._root, []
        for token in ids:
            found = node.children.get(token)
            if found is None:
                break
            node = found
            node.used = self._now
            path.append(node)
        return path

    # ------------------------------------------------------------------------------------- tensors of keys and values

    def _gathered(self, paths: list[list[_Node]], width: int) -> DynamicCache:
        """Return a cache with one row per path, padded on the left to `width` tokens."""
        cache = DynamicCache()
        if width == 0:
            return cache
        assert self._pool is not None
        slots = []
        for path in paths:
            slots += [0] * (width - len(path))  # any slot, because the attention mask hides padding
            slots += [node.slot for node in path]
        flat = self._pool[torch.tensor(slots, device=self.device)].view(len(paths), width, -1)
        parts = flat.split([heads * size for heads, size in self._shapes], dim=-1)
        states = []
        for part, (heads, size) in zip(parts, self._shapes, strict=True):
            states.append(part.view(len(paths), width, heads, size).transpose(1, 2))
        for keys, values in zip(states[::2], states[1::2], strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them once more
            cache.layers.append(layer)
        return cache

    def _keep(self, cache: DynamicCache, runs: list[_Run]) -> None:
        """Add tokens to the tree, and copy their keys and values from `cache` to the pool."""
        wanted = sum(len(run.ids) for run in runs)
        if not wanted:
            return
        if self._pool is None:
            states = _states(cache)
            self._shapes = [(state.shape[1], state.shape[3]) for state in states]
            self._pool = states[0].new_empty(0, sum(heads * size for heads, size in self._shapes))
        if len(self._free) < wanted:
            self._make_room(wanted)
        rows, columns, slots = [], [], []
        for run in runs:
            node = run.parent
            if node.slot < 0 and node is not self._root:  # a token before the run is not kept, so nobody can find it
                continue
            for offset, token in enumerate(run.ids):
                child = node.children.get(token)
                if child is None:
                    if not self._free:
                        break
                    child = node.children[token] = _Node(self._free.pop(), self._now)
                    rows.append(run.row)
                    columns.append(run.column + offset)
                    slots.append(child.slot)
                child.used = self._now
                node = child
        if not slots:
            return
        row_index, column_index, slot_index = torch.tensor([rows, columns, slots], device=self.device)
        new = [state[row_index, :, column_index].flatten(1) for state in _states(cache)]
        assert self._pool is not None
        # In mixed precision, keys with rotary positions are float32 and the others are not.
        self._pool[slot_index] = torch.cat(new, dim=1).to(self._pool.dtype)

    def _make_room(self, wanted: int) -> None:
        """Enlarge the pool, and forget tokens if the limit is reached, so that `wanted` tokens fit if possible."""
        assert self._pool is not None
        have = len(self._pool)
        if have < self.limit:
            size = min(self.limit, max(FIRST_SLOTS, 2 * have, have - len(self._free) + wanted))
            self._pool = torch.cat([self._pool, self._pool.new_zeros(size - have, self._pool.shape[1])])
            self._free += range(have, size)
        if len(self._free) < wanted:
            self._evict(max(wanted - len(self._free), self.limit // 4))

    def _evict(self, number: int) -> None:
        """Forget `number` tokens that the current call does not use, or all such tokens if there are fewer. Tokens
        that were used longest ago go first; among these, the deepest tokens go first."""
        found, open_nodes = [], [(self._root, 0)]
        while open_nodes:
            node, depth = open_nodes.pop()
            for token, child in node.children.items():
                if child.used < self._now:
                    found.append((child.used, -depth, token, node))
                open_nodes.append((child, depth + 1))
        # A call that uses a node also uses its ancestors. So in this order a node goes only after all its descendants.
        for _, _, token, parent in sorted(found, key=lambda entry: entry[:2])[:number]:
            self._free.append(parent.children.pop(token).slot)


def _entropies(logits: torch.Tensor, temperature: float | None) -> torch.Tensor | None:
    """Return the entropies `(B,)` at a temperature, or None if it is None."""
    if temperature is None:
        return None
    return row_entropies(logits, temperature=temperature)


def _select(values: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Return rows of `values`, or None if `values` is None."""
    if values is None:
        return None
    return values[rows]


def _states(cache: DynamicCache) -> list[Any]:
    """Return keys and values of the first layer, of the second layer and so on, each `(B, heads, L, size)`."""
    states: list[Any] = []
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            states += [layer.keys, layer.values]
    return states


def _processors(options: GenerationConfig) -> LogitsProcessorList:
    """Return transformers' logits processors for the options, in the order of `generate`."""
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

"""Options of `generate` that count from the start of a completion, for prefixes that end inside one.

`generate` takes all tokens that it is given for the prompt. If a prefix already holds a part of the completion, an
option such as `min_new_tokens` would count anew from the end of the prefix, and the rest of the completion would come
from another distribution than a whole completion.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from trl_explore.rows.rollouts import Part
from trl_explore.sampling.generation import language_model
from trl_explore.sampling.paths import effective_options

# Options that read the prompt, or count tokens from its end, with the values that do nothing.
COUNTED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None, []),
}
GUIDANCE: dict[str, tuple[Any, ...]] = {"guidance_scale": (None, 1, 1.0)}


def options_from_the_start(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options in effect that count from the start of a completion."""
    return [name for name, neutral in (COUNTED | GUIDANCE).items() if options.get(name) not in neutral]


@contextmanager
def counted_from_the_start(model: Any, prefixes: Sequence[list[int]], parts: Sequence[Part]) -> Iterator[None]:
    """
    Let `model.generate` count options from the start of each row's completion.

    Rows of the call must be `prefixes`, padded on the left. Processors of transformers do the work, one for each row
    and told where its prompt ends. Where no option counts, `generate` is left as it is.
    """
    own = model.generate

    def generate(**inputs: Any) -> torch.Tensor:
        config = inputs.pop("generation_config")
        options = effective_options(model, config)
        names = options_from_the_start(vars(options))
        if not any(part.begun for part in parts) and "forced_eos_token_id" not in names:
            names = []  # `generate` counts from the start already
        counted = {name: vars(options)[name] for name in COUNTED if name in names}
        if counted:
            rows = _OfEachRow(prefixes, parts, counted, options, input_ids=inputs["input_ids"])
            inputs["logits_processor"] = LogitsProcessorList([rows])
        if "guidance_scale" in names:
            inputs |= _unguided(prefixes, parts, pad_id=options.pad_token_id, device=inputs["input_ids"].device)
        with _unset(config, counted), _unset(model.generation_config, counted):
            with _unset(language_model(model).generation_config, counted):
                return own(**inputs, generation_config=config)

    before = vars(model).get("generate")  # None: the method of its class
    vars(model)["generate"] = generate
    try:
        yield
    finally:
        if before is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = before


class _OfEachRow(LogitsProcessor):
    """Processors of each row, which count from the start of its completion."""

    def __init__(
        self,
        prefixes: Sequence[list[int]],
        parts: Sequence[Part],
        counted: dict[str, Any],
        options: GenerationConfig,
        *,
        input_ids: torch.Tensor,
    ) -> None:
        self.of_rows = [
            _processors(prefix, part, counted, options, width=input_ids.shape[1], device=input_ids.device)
            for prefix, part in zip(prefixes, parts, strict=True)
        ]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        copies = len(scores) // len(self.of_rows)  # beams of a row stand next to each other
        processed: list[Any] = []
        for row in range(len(scores)):
            own: Any = self.of_rows[row // copies]
            processed.append(own(input_ids[row : row + 1], scores[row : row + 1]))
        found: Any = torch.cat(processed)
        return found


def _processors(
    prefix: list[int], part: Part, counted: dict[str, Any], options: GenerationConfig, *, width: int, device: Any
) -> LogitsProcessorList:
    """Return the processors of one row, in the order of `generate`. `width` is that of the padded rows."""
    start = width - part.begun  # the column in which the completion begins
    prompt: Any = torch.tensor([prefix[: len(prefix) - part.begun]], device=device)
    ends: Any = torch.tensor(options.eos_token_id, device=device).flatten()
    processors = LogitsProcessorList()
    if "encoder_repetition_penalty" in counted:
        processors.append(EncoderRepetitionPenaltyLogitsProcessor(counted["encoder_repetition_penalty"], prompt))
    if "encoder_no_repeat_ngram_size" in counted:
        processors.append(EncoderNoRepeatNGramLogitsProcessor(counted["encoder_no_repeat_ngram_size"], prompt))
    if "min_new_tokens" in counted:
        processors.append(MinNewTokensLengthLogitsProcessor(start, counted["min_new_tokens"], ends, device=device))
    if "forced_eos_token_id" in counted:
        limit = part.limit or options.max_new_tokens
        processors.append(ForcedEOSTokenLogitsProcessor(start + limit, counted["forced_eos_token_id"], device=device))
    if "exponential_decay_length_penalty" in counted:
        processors.append(ExponentialDecayLengthPenalty(counted["exponential_decay_length_penalty"], ends, start))
    if "begin_suppress_tokens" in counted:
        processors.append(SuppressTokensAtBeginLogitsProcessor(counted["begin_suppress_tokens"], start, device=device))
    return processors


def _unguided(prefixes: Sequence[list[int]], parts: Sequence[Part], *, pad_id: int, device: Any) -> dict[str, Any]:
    """Return the rows that `guidance_scale` compares with: the last token of each prompt and the completion so far."""
    rows = [prefix[-part.begun - 1 :] for prefix, part in zip(prefixes, parts, strict=True)]
    width = max(map(len, rows))
    ids = [[pad_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "negative_prompt_ids": torch.tensor(ids, device=device),
        "negative_prompt_attention_mask": torch.tensor(mask, device=device),
    }


@contextmanager
def _unset(config: GenerationConfig, names: Iterable[str]) -> Iterator[None]:
    """Take options out of a configuration for a while."""
    before = {name: vars(config)[name] for name in names}
    vars(config).update(dict.fromkeys(before))
    try:
        yield
    finally:
        vars(config).update(before)

"""Options of `generate` that count from the start of a completion, for prefixes that end inside a completion.

`generate` treats all its input tokens as the prompt. If a prefix already contains the beginning of a completion,
options such as `min_new_tokens` would start to count at the end of the prefix. The rest of the completion would then
come from another distribution than a completion that is sampled in one piece.
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

# Options that read the prompt or count tokens from its end. The values listed here switch the option off.
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
    """Return the names of the active options that count from the start of a completion."""
    return [name for name, neutral in (COUNTED | GUIDANCE).items() if options.get(name) not in neutral]


@contextmanager
def counted_from_the_start(model: Any, prefixes: Sequence[list[int]], parts: Sequence[Part]) -> Iterator[None]:
    """
    Replace `model.generate`, so that options count from the start of each row's completion.

    The replacement gives each row its own logits processors of transformers, which know where the prompt of the row
    ends. If no such option is active, it calls the original `generate` with the same arguments.

    Args:
        model (`Any`):
            Model on which TRL calls `generate`.
        prefixes (`Sequence[list[int]]`):
            Rows `[R][T_i]` of the call, which TRL pads on the left.
        parts (`Sequence[Part]`):
            Position of each row's new tokens in its completion, `[R]`.
    """
    original = model.generate

    def generate(**inputs: Any) -> torch.Tensor:
        config = inputs.pop("generation_config")
        options = effective_options(model, config)
        names = options_from_the_start(vars(options))
        # If every prefix is only a prompt, `generate` itself counts correctly. An exception is `forced_eos_token_id`,
        # which needs the limit of each row: `generate` knows only one limit for all rows.
        if not any(part.begun for part in parts) and "forced_eos_token_id" not in names:
            names = []
        counted = {name: getattr(options, name) for name in names if name in COUNTED}
        if counted:
            per_row = _ProcessorsPerRow(prefixes, parts, counted, options, input_ids=inputs["input_ids"])
            inputs["logits_processor"] = LogitsProcessorList([per_row])
        if "guidance_scale" in names:
            inputs |= _unguided(prefixes, parts, pad_id=options.pad_token_id, device=inputs["input_ids"].device)
        with _unset(config, counted), _unset(model.generation_config, counted):
            with _unset(language_model(model).generation_config, counted):
                return original(**inputs, generation_config=config)

    was_replaced = "generate" in vars(model)  # False: `generate` is a method of the class
    model.generate = generate
    try:
        yield
    finally:
        if was_replaced:
            model.generate = original
        else:
            del model.generate


class _ProcessorsPerRow(LogitsProcessor):
    """Logits processors that differ from row to row, because each row's completion starts in another column."""

    def __init__(
        self,
        prefixes: Sequence[list[int]],
        parts: Sequence[Part],
        counted: dict[str, Any],
        options: GenerationConfig,
        *,
        input_ids: torch.Tensor,
    ) -> None:
        width, device = input_ids.shape[1], input_ids.device
        self.processors: list[LogitsProcessorList] = []  # one list per row
        for prefix, part in zip(prefixes, parts, strict=True):
            self.processors.append(_processors(prefix, part, counted, options, width=width, device=device))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        num_beams = len(scores) // len(self.processors)  # the beams of a row are neighbours
        processed: list[Any] = []
        for row in range(len(scores)):
            processors: Any = self.processors[row // num_beams]
            processed.append(processors(input_ids[row : row + 1], scores[row : row + 1]))
        found: Any = torch.cat(processed)
        return found


def _processors(
    prefix: list[int], part: Part, counted: dict[str, Any], options: GenerationConfig, *, width: int, device: Any
) -> LogitsProcessorList:
    """Return the logits processors of one row, in the order in which `generate` applies them. `width` is the number of
    columns of the padded rows, after which the new tokens begin."""
    start = width - part.begun  # the column in which the completion starts
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
    """Return the unconditional rows that `guidance_scale` compares with. Each has the last token of the prompt and
    the completion so far, as `generate` builds them for a completion that is sampled in one piece."""
    rows = [prefix[-part.begun - 1 :] for prefix, part in zip(prefixes, parts, strict=True)]
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        num_padding = width - len(row)
        ids.append([pad_id] * num_padding + row)
        mask.append([0] * num_padding + [1] * len(row))
    return {
        "negative_prompt_ids": torch.tensor(ids, device=device),
        "negative_prompt_attention_mask": torch.tensor(mask, device=device),
    }


@contextmanager
def _unset(config: GenerationConfig, names: Iterable[str]) -> Iterator[None]:
    """Set options of `config` to None inside the `with` block."""
    before = {name: getattr(config, name) for name in names}
    for name in before:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)

"""Gradient features of the main rows, where possible out of forward passes that are made anyway."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather
from trl.trainer.utils import maybe_gather_lm_head_ctx, pad

from trl_explore.gradients.features import lm_head_of, sequence_features
from trl_explore.packing.forward import unwrapped
from trl_explore.rows.policy import tokenizer_of
from trl_explore.rows.streams import kept_randomness
from trl_explore.sampling.generation import has_dropout, whole_row_adapter
from trl_explore.sampling.paths import effective_options
from trl_explore.sampling.positions import fixed_rotary_length
from trl_explore.sampling.sampler import SHARDED, without_dropout

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class FeatureRows:
    """Rows of a generation batch, of this process, whose features are wanted."""

    prompt_ids: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # `[B][T_i]`
    loss_mask: list[list[int]]  # `[B][T_i]`
    features: list[torch.Tensor] = field(default_factory=list)  # so far, in parts `(b, D)`


@dataclass
class Generated:
    """What the backbone showed while rows were sampled."""

    contexts: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # `[B][T_i]`
    states: list[torch.Tensor]  # that token t was drawn from, `[T](B, D)`


class FeaturePass:
    """Gradient features of a trainer's rows, by a hook on the backbone that sees the hidden states: while `generate`
    samples the rows, in TRL's pass for old log-probabilities, or else in one more pass without gradients. Neither of
    the first two with dropout."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seconds = 0.0
        self._rows: FeatureRows | None = None
        self._generated: Generated | None = None
        self._old_logprobs_follow = False

    def check_head(self) -> None:
        """Raise where the model has no LM head that features could be taken from."""
        lm_head_of(unwrapped(self.trainer, self.trainer.model), temperature=self.trainer.args.temperature)

    def sampled(self, sample: Callable[[list[list[int]]], Any], contexts: list[list[int]]) -> Any:
        """What `sample`, TRL's own sampling, makes of contexts; the states that tokens are drawn from are noted."""
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        if args.use_vllm or args.use_transformers_continuous_batching or accelerator.distributed_type in SHARDED:
            return sample(contexts)
        model = unwrapped(trainer, trainer.model)
        if self._differs_from_loss(model):
            return sample(contexts)
        states: list[torch.Tensor] = []

        def note(module: Any, args: Any, output: Any) -> None:
            hidden = output.last_hidden_state
            if hidden.shape[1] > 1:  # the prompts, in one part or several
                states.clear()
            states.append(hidden[:, -1].clone())

        handle = model.base_model.register_forward_hook(note)
        try:
            result = sample(contexts)
        finally:
            handle.remove()
        self._generated = Generated(contexts, result[0], states)
        return result

    def _differs_from_loss(self, model: Any) -> bool:
        """Return whether `generate` computes other hidden states than the loss, or not one state per row and token."""
        trainer, precision = self.trainer, self.trainer.accelerator.mixed_precision
        options = effective_options(model, trainer.generation_config)
        if (options.num_beams or 1) > 1 or options.cache_implementation:
            return True
        if (options.guidance_scale or 1) != 1:  # its logits processor runs the model on other rows
            return True
        if precision != "no" and model.dtype != PRECISIONS.get(precision):  # `generate` knows no autocast
            return True
        return has_dropout(model) or whole_row_adapter(trainer.accelerator.unwrap_model(trainer.model)) is not None

    def begin(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], mask: Any) -> None:
        """A generation batch was sampled: its rows, and which of their tokens are trained where not all are."""
        args = self.trainer.args
        loss_mask = mask or [[1] * len(ids) for ids in completion_ids]
        if args.mask_truncated_completions:
            ends = {*self.trainer.eos_token_ids, tokenizer_of(self.trainer).pad_token_id}
            loss_mask = [
                m if ids[-1] in ends else [0] * len(m) for m, ids in zip(loss_mask, completion_ids, strict=True)
            ]
        self._rows = FeatureRows(prompt_ids, completion_ids, loss_mask)
        self.seconds = 0.0
        seen, self._generated = self._generated, None
        if (
            mask is None
            and seen is not None
            and (seen.contexts, seen.completion_ids) == (prompt_ids, completion_ids)
            and not self._changes_positions(prompt_ids, completion_ids)
            and len(seen.states) == max(map(len, completion_ids))
            and len(seen.states[0]) == len(completion_ids)  # not where rows were sampled in several calls
        ):
            self._add(self._rows, torch.stack(seen.states, dim=1))
        # As in `_generate_and_score_completions`: old log-probabilities, where steps and rollouts do not align.
        every = args.steps_per_generation * args.num_iterations
        self._old_logprobs_follow = args.gradient_accumulation_steps % every != 0 or (
            args.use_vllm and args.vllm_importance_sampling_correction
        )

    def _changes_positions(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> bool:
        """Return whether rows are so long that the loss computes other rotary factors than single steps of `generate`.
        The loss counts positions from the first column of padded rows."""
        longest = fixed_rotary_length(unwrapped(self.trainer, self.trainer.model).config)
        return longest is not None and max(map(len, prompt_ids)) + max(map(len, completion_ids)) > longest

    @property
    def waits(self) -> bool:
        """Whether the next log-probabilities that TRL computes are the old ones of the rows."""
        return self._rows is not None and not self._rows.features and self._old_logprobs_follow

    def watched(self, own_pass: Callable[[], Any], width: int) -> Any:
        """What TRL's pass over the rows returns; features are taken on the way."""
        assert self._rows is not None
        self._old_logprobs_follow = False
        before = random_state(self.trainer.accelerator.device)
        with self.watching(self._rows, width):
            result = own_pass()
        if not torch.equal(random_state(self.trainer.accelerator.device), before):
            # Drawn was dropout: TRL's log-probabilities have it, but equal completions must have equal features.
            self._rows.features.clear()
        return result

    def of_batch(self) -> torch.Tensor:
        """Features `(N, D)` of the main rows of all processes; once per batch, from [`shape_rewards`]."""
        rows, self._rows = self._rows, None
        assert rows is not None
        return self.gathered(rows)

    def gathered(self, rows: FeatureRows) -> torch.Tensor:
        """Float32 features `(N, D)` of all processes' rows, as many on each; NaN for rows without a token in the loss.
        Runs the backbone unless it was watched before."""
        if not rows.features:
            self.run(rows)
        features = torch.cat(rows.features)
        empty = torch.tensor([not any(mask) for mask in rows.loss_mask], device=features.device)
        return gather(features.masked_fill(empty.unsqueeze(1), torch.nan))

    def run(self, rows: FeatureRows) -> None:
        """Send rows through the backbone without dropout; the LM head scores one position only."""
        start = time.perf_counter()
        trainer = self.trainer
        device, pad_id = trainer.accelerator.device, tokenizer_of(trainer).pad_token_id

        def padded(values: list[list[int]], value: int, side: str) -> torch.Tensor:
            return pad([torch.tensor(ids) for ids in values], padding_value=value, padding_side=side).to(device)

        ones = [[[1] * len(ids) for ids in part] for part in (rows.prompt_ids, rows.completion_ids)]
        ids = torch.cat([padded(rows.prompt_ids, pad_id, "left"), padded(rows.completion_ids, pad_id, "right")], dim=1)
        mask = torch.cat([padded(ones[0], 0, "left"), padded(ones[1], 0, "right")], dim=1)
        width = max(map(len, rows.completion_ids))
        batch = trainer.args.per_device_train_batch_size
        with (
            torch.no_grad(),
            kept_randomness(device),
            without_dropout(trainer.model),
            self.watching(rows, width),
            trainer.accelerator.autocast(),
        ):
            for part, part_mask in zip(ids.split(batch), mask.split(batch), strict=True):
                trainer.model(input_ids=part, attention_mask=part_mask, use_cache=False, logits_to_keep=1)
        self.seconds = time.perf_counter() - start

    @contextmanager
    def watching(self, rows: FeatureRows, width: int) -> Iterator[None]:
        """Turn the hidden states of every forward pass into features of the next rows, and forget them. Completions
        take `width` columns at the end of a batch."""

        def record(module: Any, args: Any, output: Any) -> None:
            self._add(rows, output.last_hidden_state[:, -width - 1 : -1])  # the position before a token drew it

        handle = unwrapped(self.trainer, self.trainer.model).base_model.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def _add(self, rows: FeatureRows, hidden: torch.Tensor) -> None:
        """Features of the next rows, from the hidden states `(b, T, D)` that their tokens were drawn from."""
        start = time.perf_counter()
        trainer, model = self.trainer, unwrapped(self.trainer, self.trainer.model)
        in_fp32 = trainer.args.cast_lm_head_to_fp32
        hidden = hidden.float() if in_fp32 else hidden
        first, width = sum(map(len, rows.features)), hidden.shape[1]
        part = slice(first, first + len(hidden))
        ids, mask = (
            torch.tensor([row + [0] * (width - len(row)) for row in values[part]], device=hidden.device)
            for values in (rows.completion_ids, rows.loss_mask)
        )
        layer = model.get_output_embeddings()
        bias = [layer.bias] if getattr(layer, "bias", None) is not None else []
        precision = torch.autocast(hidden.device.type, enabled=False) if in_fp32 else nullcontext()
        with torch.no_grad(), precision, maybe_gather_lm_head_ctx(layer.weight, *bias):
            head = lm_head_of(model, temperature=trainer.args.temperature)
            found = sequence_features(hidden, ids, mask, head)
        rows.features.append(found.features.to(trainer.accelerator.device))
        self.seconds += time.perf_counter() - start


def random_state(device: torch.device) -> torch.Tensor:
    """Bytes of the generators that a forward pass draws from; others after every draw."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return torch.cat(states)

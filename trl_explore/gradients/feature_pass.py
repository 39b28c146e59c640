"""Gradient features of the main rows. If possible, they come from forward passes that TRL makes anyway."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather
from trl.trainer.utils import maybe_gather_lm_head_ctx, pad

from trl_explore.gradients.features import lm_head_of, sequence_features
from trl_explore.packing.forward import unwrapped
from trl_explore.rows.policy import tokenizer_of
from trl_explore.rows.streams import kept_randomness
from trl_explore.rows.truncation import is_trained
from trl_explore.sampling.generation import has_dropout, whole_row_adapter
from trl_explore.sampling.paths import effective_options
from trl_explore.sampling.positions import fixed_rotary_length
from trl_explore.sampling.sampler import SHARDED, without_dropout

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class FeatureRows:
    """Rows of a generation batch on this process, with the features that are already computed."""

    prompt_ids: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # `[B][T_i]`
    loss_mask: list[list[int]]  # `[B][T_i]`
    features: list[torch.Tensor] = field(default_factory=list)  # features of the first rows, in tensors `(b, D)`


@dataclass
class Generated:
    """Hidden states that a hook recorded while `generate` sampled rows."""

    contexts: list[list[int]]  # `[B][P_i]`
    completion_ids: list[list[int]]  # `[B][T_i]`
    states: list[torch.Tensor]  # state from which token t of each row was sampled, `[T](B, D)`


class FeaturePass:
    """
    Computes gradient features of a trainer's rows from the hidden states of the backbone.

    A forward hook reads the hidden states in one of three places: while `generate` samples the rows, in TRL's pass for
    old log-probabilities, or in an extra pass without gradients. With dropout only the extra pass is used, because
    equal completions must have equal features.

    Args:
        trainer (`Any`):
            The trainer.

    Attributes:
        seconds (`float`):
            Time spent on the features of the current generation batch.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.args: ExplorationConfig = trainer.args
        self.seconds = 0.0
        self._rows: FeatureRows | None = None
        self._generated: Generated | None = None
        self._old_logprobs_follow = False

    def check_head(self) -> None:
        """Raise a ValueError if the LM head of the model does not allow gradient features."""
        lm_head_of(unwrapped(self.trainer, self.trainer.model), temperature=self.args.temperature)

    def sampled(self, sample: Callable[[list[list[int]]], Any], contexts: list[list[int]]) -> Any:
        """
        Call `sample(contexts)`, and record the hidden states from which tokens are sampled.

        Args:
            sample (`Callable`):
                TRL's sampling function. The first entry of its result holds the token ids of the completions.
            contexts (`list[list[int]]`):
                Token ids of the prompts, `[B][P_i]`.

        Returns:
            `Any`: Result of `sample`.
        """
        trainer, args, accelerator = self.trainer, self.args, self.trainer.accelerator
        if args.use_vllm or args.use_transformers_continuous_batching or accelerator.distributed_type in SHARDED:
            return sample(contexts)
        model = unwrapped(trainer, trainer.model)
        if self._differs_from_loss(model):
            return sample(contexts)
        states: list[torch.Tensor] = []

        def note(module: Any, args: Any, output: Any) -> None:
            hidden = output.last_hidden_state
            # A pass over several tokens reads the prompt. If `generate` reads the prompt in several passes, the first
            # token is sampled from the state of the last of them.
            if hidden.shape[1] > 1:
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
        """Return whether `generate` computes other hidden states than the loss does. This includes beam search, which
        computes several states per sampled token."""
        trainer, precision = self.trainer, self.trainer.accelerator.mixed_precision
        options = effective_options(model, trainer.generation_config)
        if (options.num_beams or 1) > 1 or options.cache_implementation:
            return True
        if (options.guidance_scale or 1) != 1:  # its logits processor makes forward passes over other rows
            return True
        if precision != "no" and model.dtype != PRECISIONS.get(precision):  # `generate` does not use autocast
            return True
        # With a whole-row adapter, the state of a token depends on the other tokens of the pass. `generate` passes one
        # token at a time, and the loss passes whole rows.
        return has_dropout(model) or whole_row_adapter(trainer.accelerator.unwrap_model(trainer.model)) is not None

    def begin(self, prompt_ids: list[list[int]], completion_ids: list[list[int]], mask: Any) -> None:
        """
        Register the rows of a new generation batch, and compute their features if `generate` recorded their states.

        Args:
            prompt_ids (`list[list[int]]`):
                Token ids of the prompts, `[B][P_i]`.
            completion_ids (`list[list[int]]`):
                Token ids of the completions, `[B][T_i]`.
            mask (`list[list[int]]`, *optional*):
                1 for tokens that are trained, `[B][T_i]`. None if all tokens are trained.
        """
        args = self.args
        loss_mask = mask or [[1] * len(ids) for ids in completion_ids]
        trained_mask = []
        for row_mask, ids in zip(loss_mask, completion_ids, strict=True):
            trained_mask.append(row_mask if is_trained(self.trainer, ids) else [0] * len(row_mask))
        self._rows = FeatureRows(prompt_ids, completion_ids, trained_mask)
        self.seconds = 0.0
        seen, self._generated = self._generated, None
        # With a mask, some tokens are not from this `generate` call, for example answers of tools.
        if mask is None and seen is not None and self._has_states(seen, prompt_ids, completion_ids):
            self._add(self._rows, torch.stack(seen.states, dim=1))
        # The same condition as in TRL's `_generate_and_score_completions`: TRL computes old log-probabilities if an
        # optimizer step can separate sampling and loss, or for vLLM's importance sampling correction.
        steps = args.steps_per_generation * args.num_iterations
        corrects_sampling = args.use_vllm and args.vllm_importance_sampling_correction
        self._old_logprobs_follow = args.gradient_accumulation_steps % steps != 0 or corrects_sampling

    def _has_states(self, seen: Generated, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> bool:
        """Return whether `seen` has the hidden states of exactly these rows, as the loss computes them."""
        if (seen.contexts, seen.completion_ids) != (prompt_ids, completion_ids):
            return False
        if self._changes_positions(prompt_ids, completion_ids):
            return False
        num_tokens = max(map(len, completion_ids))
        # If the rows were sampled in several `generate` calls, `seen` has more states, or states of fewer rows.
        return len(seen.states) == num_tokens and len(seen.states[0]) == len(completion_ids)

    def _changes_positions(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> bool:
        """Return whether rows are so long that the loss and `generate` use different rotary factors. The loss computes
        the factors for whole padded rows, `generate` for each step."""
        longest = fixed_rotary_length(unwrapped(self.trainer, self.trainer.model).config)
        return longest is not None and max(map(len, prompt_ids)) + max(map(len, completion_ids)) > longest

    @property
    def waits(self) -> bool:
        """True if TRL's next pass for log-probabilities is the pass for old ones, and features are still needed."""
        return self._rows is not None and not self._rows.features and self._old_logprobs_follow

    def watched(self, own_pass: Callable[[], Any], width: int) -> Any:
        """
        Call `own_pass`, TRL's pass for old log-probabilities, and compute features from its hidden states.

        Args:
            own_pass (`Callable`):
                TRL's pass over the rows of [`begin`].
            width (`int`):
                Number of completion tokens in the padded rows.

        Returns:
            `Any`: Result of `own_pass`.
        """
        assert self._rows is not None
        self._old_logprobs_follow = False
        before = random_state(self.trainer.accelerator.device)
        with self.watching(self._rows, width):
            result = own_pass()
        if not torch.equal(random_state(self.trainer.accelerator.device), before):
            # The pass used random numbers, so dropout was active. Equal completions must have equal features, so drop
            # these features and make an extra pass later.
            self._rows.features.clear()
        return result

    def of_batch(self) -> torch.Tensor:
        """Return the features `(N, D)` of the main rows of all processes. Call this once per generation batch."""
        rows, self._rows = self._rows, None
        assert rows is not None
        return self.gathered(rows)

    def gathered(self, rows: FeatureRows) -> torch.Tensor:
        """
        Return the features of the rows of all processes. Run the backbone if there are no features yet.

        Every process must call this method, with the same number of rows.

        Args:
            rows ([`FeatureRows`]):
                Rows of this process.

        Returns:
            `torch.Tensor`: Float32 features `(N, D)`; NaN for rows without a token in the loss.
        """
        if not rows.features:
            self.run(rows)
        features = torch.cat(rows.features)
        empty = torch.tensor([not any(mask) for mask in rows.loss_mask], device=features.device)
        return gather(features.masked_fill(empty.unsqueeze(1), torch.nan))

    def run(self, rows: FeatureRows) -> None:
        """Compute the features of `rows` in an extra forward pass without dropout."""
        start = time.perf_counter()
        trainer = self.trainer
        device, pad_id = trainer.accelerator.device, tokenizer_of(trainer).pad_token_id

        def padded(token_ids: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            tensors = [torch.tensor(row) for row in token_ids]
            ids = pad(tensors, padding_value=pad_id, padding_side=side).to(device)
            mask = pad([torch.ones_like(row) for row in tensors], padding_value=0, padding_side=side).to(device)
            return ids, mask

        prompts, prompt_mask = padded(rows.prompt_ids, "left")
        completions, completion_mask = padded(rows.completion_ids, "right")
        ids = torch.cat([prompts, completions], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        width = max(map(len, rows.completion_ids))
        batch = self.args.per_device_train_batch_size
        with (
            torch.no_grad(),
            kept_randomness(device),
            without_dropout(trainer.model),
            self.watching(rows, width),
            trainer.accelerator.autocast(),
        ):
            for part, part_mask in zip(ids.split(batch), mask.split(batch), strict=True):
                # The hook needs hidden states only, so let the LM head score a single position.
                trainer.model(input_ids=part, attention_mask=part_mask, use_cache=False, logits_to_keep=1)
        # Assign instead of adding, because `_add` has already counted its part of this time.
        self.seconds = time.perf_counter() - start

    @contextmanager
    def watching(self, rows: FeatureRows, width: int) -> Iterator[None]:
        """
        Compute features from the hidden states of every forward pass inside the `with` block.

        Args:
            rows ([`FeatureRows`]):
                Rows that the forward passes process in this order. Their features are added to it.
            width (`int`):
                Number of completion tokens in the padded rows.
        """

        def record(module: Any, args: Any, output: Any) -> None:
            # Token t was sampled from the hidden state of the position before it.
            self._add(rows, output.last_hidden_state[:, -width - 1 : -1])

        handle = unwrapped(self.trainer, self.trainer.model).base_model.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def _add(self, rows: FeatureRows, hidden: torch.Tensor) -> None:
        """Compute the features of the next rows from the hidden states `(b, T, D)` that tokens were sampled from."""
        start = time.perf_counter()
        trainer, model = self.trainer, unwrapped(self.trainer, self.trainer.model)
        precision: AbstractContextManager[Any] = nullcontext()
        if self.args.cast_lm_head_to_fp32:
            hidden = hidden.float()
            precision = torch.autocast(hidden.device.type, enabled=False)
        first, width = sum(map(len, rows.features)), hidden.shape[1]
        last = first + len(hidden)
        ids, mask = [], []
        for row, row_mask in zip(rows.completion_ids[first:last], rows.loss_mask[first:last], strict=True):
            padding = [0] * (width - len(row))
            ids.append(row + padding)
            mask.append(row_mask + padding)
        layer = model.get_output_embeddings()
        parameters = [layer.weight]
        if getattr(layer, "bias", None) is not None:
            parameters.append(layer.bias)
        with torch.no_grad(), precision, maybe_gather_lm_head_ctx(*parameters):
            head = lm_head_of(model, temperature=self.args.temperature)
            ids_of_rows, mask_of_rows = torch.tensor([ids, mask], device=hidden.device)
            found = sequence_features(hidden, ids_of_rows, mask_of_rows, head)
        rows.features.append(found.features.to(trainer.accelerator.device))
        self.seconds += time.perf_counter() - start


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the random generators that a forward pass uses. Every random number changes it."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return torch.cat(states)

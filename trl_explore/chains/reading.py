"""Attention is read in a pass of its own: eager, one map at a time, without gradients."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from trl_explore.chains.influence import StepSpan, forward_influence, step_attention
from trl_explore.packing.forward import unwrapped
from trl_explore.rows.policy import Policy
from trl_explore.sampling.sampler import SHARDED, without_dropout

NAME = "attention_that_is_read"


class AttentionReader:
    """Influence of the steps of rows by what layers `layers` attend to, all for `None`."""

    def __init__(self, policy: Policy, *, distance: int, layers: Sequence[int] | None) -> None:
        self.policy, self.distance = policy, distance
        self.layers = range(sys.maxsize) if layers is None else range(*layers)

    def check(self) -> None:
        """ValueError if the model's attention cannot be read, with the reason."""
        model = unwrapped(self.policy, self.policy.model)
        depth = model.config.get_text_config().num_hidden_layers
        if self.layers.start >= depth:
            raise ValueError(
                f"`attention_layers={[self.layers.start, self.layers.stop]}` begins behind the {depth} layers of "
                f"{type(model).__name__}: choose others, or leave it out for all."
            )
        if self.policy.accelerator.distributed_type in SHARDED:  # whose weights are not in one piece yet
            return
        training = self.policy.model.training
        self.policy.model.train()  # as in a run; for layers of bitsandbytes, see `without_dropout`
        with self._reading([(0, 4), (4, 8)], num_tokens=8) as found:
            self._pass([*range(8)])
        self.policy.model.train(training)
        if not found:
            raise ValueError(
                f"{type(model).__name__} shows no attention in the layers that are read, by which AttnRL chooses "
                "where to fork: it has layers without attention, or does not use the attention interface of "
                "transformers. Choose other `attention_layers` or another model, or use TreeRLTrainer, which forks by "
                "probabilities."
            )

    def influence(self, rows: list[list[int]], steps: list[list[StepSpan]]) -> list[list[float]]:
        """Influence `[R][S_i]` of the steps of rows of tokens; every process calls it."""
        # Without a step so far behind another but the first, nothing is read.
        read = [i for i, own in enumerate(steps) if len(own) > self.distance + 1]
        found = [[0.0] * len(own) for own in steps]
        number, filler = self.policy.ranks.most(len(read)), [self.policy.eos_token_ids[0]]
        for place in range(number):
            real = place < len(read)
            row = rows[read[place]] if real else filler
            with self._reading(steps[read[place]] if real else [(0, 1)], num_tokens=len(row)) as layers:
                self._pass(row)
            if real:
                found[read[place]] = torch.stack(layers).amax(dim=0).tolist()
        return found

    def _pass(self, ids: list[int]) -> None:
        model: Any = self.policy.model
        row = torch.tensor([ids], device=self.policy.accelerator.device)
        with torch.no_grad(), without_dropout(model), self.policy.accelerator.autocast():
            model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, logits_to_keep=1)

    @contextmanager
    def _reading(self, steps: Sequence[StepSpan], *, num_tokens: int) -> Iterator[list[torch.Tensor]]:
        """While it lasts, attention is eager, and each layer notes the influence of the steps of a row of that many
        tokens. Virtual tokens of an adapter come before the row and belong to no step."""
        model = unwrapped(self.policy, self.policy.model)
        found: list[torch.Tensor] = []
        layers, distance = self.layers, self.distance  # transformers keeps `attend`, which must not keep the trainer

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, weights = vars(sys.modules[type(module).__module__])["eager_attention_forward"](
                module, *args, **kwargs
            )
            if module.layer_idx in layers:
                alpha = step_attention(weights[0, :, -num_tokens:, -num_tokens:], steps)
                found.append(forward_influence(alpha, distance=distance).cpu())  # layers may be on other devices
            return output, weights

        before = model.config._attn_implementation
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)
        try:
            yield found
        finally:
            model.set_attn_implementation(before)

"""Read the attention of the policy in a separate forward pass: with eager attention, layer by layer, without
gradients."""

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
    """
    Computes the influence of steps from the attention of the policy.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        distance (`int`):
            Minimum number of steps between a step and the later steps whose attention to it counts.
        layers (`Sequence[int]`, *optional*):
            First layer and end (exclusive) of the layers that are read. None: all layers.
    """

    def __init__(self, policy: Policy, *, distance: int, layers: Sequence[int] | None) -> None:
        self.policy, self.distance = policy, distance
        self.layers = range(sys.maxsize)
        if layers is not None:
            self.layers = range(*layers)

    def check(self) -> None:
        """Raise ValueError if the attention of the model cannot be read. The message says why."""
        model = unwrapped(self.policy, self.policy.model)
        depth = model.config.get_text_config().num_hidden_layers
        if self.layers.start >= depth:
            raise ValueError(
                f"`attention_layers={[self.layers.start, self.layers.stop]}` begins after the {depth} layers of "
                f"{type(model).__name__}: choose others, or leave it out for all."
            )
        if self.policy.accelerator.distributed_type in SHARDED:
            return  # the weights are still in parts, so a forward pass is not possible yet
        training = self.policy.model.training
        self.policy.model.train()  # a run reads in training mode, see `without_dropout`
        # Any tokens and steps suffice, because the check only needs to know whether a layer shows its attention.
        try:
            with self._reading([(0, 4), (4, 8)], num_tokens=8) as found:
                self._pass([*range(8)])
        finally:
            self.policy.model.train(training)
        if not found:
            raise ValueError(
                f"{type(model).__name__} shows no attention in the layers that are read, by which AttnRL chooses "
                "where to fork: it has layers without attention, or does not use the attention interface of "
                "transformers. Choose other `attention_layers` or another model, or use TreeRLTrainer, which forks by "
                "probabilities."
            )

    def influence(self, rows: list[list[int]], steps: list[list[StepSpan]]) -> list[list[float]]:
        """
        Return the influence of each step of each row, `[R][S_i]`: its largest value over the layers that are read.
        Every process must call this method.

        Args:
            rows (`list[list[int]]`):
                Tokens of prompts and completions, `[R][T_i]`.
            steps (`list[list[tuple[int, int]]]`):
                First token and end of the steps of each row, `[R][S_i]`.
        """
        influence = [[0.0] * len(row_steps) for row_steps in steps]
        # The first step is never forked. In a row with at most `distance + 1` steps, all other steps have influence 0.
        long_rows = [i for i, row_steps in enumerate(steps) if len(row_steps) > self.distance + 1]
        # Every process must run the same number of forward passes.
        num_fillers = self.policy.ranks.most(len(long_rows)) - len(long_rows)
        for i in long_rows:
            with self._reading(steps[i], num_tokens=len(rows[i])) as found:  # `(S,)` of each layer
                self._pass(rows[i])
            influence[i] = torch.stack(found).amax(dim=0).tolist()
        for _ in range(num_fillers):
            with self._reading([(0, 1)], num_tokens=1):
                self._pass([self.policy.eos_token_ids[0]])
        return influence

    def _pass(self, ids: list[int]) -> None:
        model: Any = self.policy.model
        row = torch.tensor([ids], device=self.policy.accelerator.device)
        with torch.no_grad(), without_dropout(model), self.policy.accelerator.autocast():
            model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, logits_to_keep=1)

    @contextmanager
    def _reading(self, steps: Sequence[StepSpan], *, num_tokens: int) -> Iterator[list[torch.Tensor]]:
        """
        Use eager attention, and collect the influence of the steps of a row of `num_tokens` tokens from every layer.

        Virtual tokens of an adapter come before the row and belong to no step.
        """
        model = unwrapped(self.policy, self.policy.model)
        found: list[torch.Tensor] = []
        # transformers keeps `attend`, so `attend` must not refer to the trainer.
        layers, distance = self.layers, self.distance

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            modeling: Any = sys.modules[type(module).__module__]  # the file of transformers that defines the model
            output, weights = modeling.eager_attention_forward(module, *args, **kwargs)
            if module.layer_idx in layers:
                alpha = step_attention(weights[0, :, -num_tokens:, -num_tokens:], steps)
                found.append(forward_influence(alpha, distance=distance).cpu())  # layers may be on several devices
            return output, weights

        before = model.config._attn_implementation
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)
        try:
            yield found
        finally:
            model.set_attn_implementation(before)

"""Rows beside the main ones are trained by TRL's own loss, each stream by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.streams import RowDict, StreamTotals, loss_mask, split_stream, stream_scale

from .scoring import ScoredRows, ScoringTrainer


class StreamTrainer(ScoringTrainer):
    """
    [`~trl.GRPOTrainer`] that can train further streams of rows, each with a normaliser of its own.

    What `_stream_steps` holds is trained beside the main micro-batch of the same index. Nothing that TRL logs, counts
    or regularises there touches the main stream.
    """

    # Class-level defaults: objects made without `__init__` behave as plain GRPO.
    drop_zero_advantage = False
    trees_stay_together = False  # whether rows of one prompt go to one micro-batch
    pools_streams = False  # whether all streams are one mean together, as if their rows were one batch
    _stream_steps: dict[str, tuple[float, StreamTotals, list[list[RowDict]]]] = {}
    _main_totals: StreamTotals | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self._is_training or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        extra = self._backward_streams(model)
        scale = 1.0
        if self._main_totals is not None:
            scale = stream_scale(self.loss_type, inputs, self._main_totals, num_slots=self._num_slots)
            inputs = {**inputs, "advantages": inputs["advantages"] * scale}
        with self._scaled_kl(scale):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if extra is None else loss + extra

    @contextmanager
    def _scaled_kl(self, scale: float) -> Iterator[None]:
        # With the advantages this scales what TRL sums over tokens, and neither entropy bonus nor router loss.
        beta = self.beta
        self.beta = beta * scale
        try:
            yield
        finally:
            self.beta = beta

    def _backward_streams(self, model) -> torch.Tensor | None:
        # Each part's graph is freed before the next is built, so that peak memory stays that of one micro-batch. The
        # main stream's backward, which comes last, synchronises the gradients of all.
        step = self._step % self.args.steps_per_generation
        total = None
        for name, (weight, totals, steps) in self._stream_steps.items():
            stream_loss = torch.zeros((), device=self.accelerator.device)
            for rows in steps[step]:
                scale = stream_scale(self.loss_type, rows, totals, num_slots=self._num_slots)
                with self._stream_scope(name), self._deferred_sync(model):
                    loss = self._compute_loss(model, rows) * scale
                    self.accelerator.backward(loss * weight, **self._backward_kwargs)
                stream_loss = stream_loss + loss.detach()
            self.log_metric(
                f"{name}/loss", gather(stream_loss).mean().item() * self.current_gradient_accumulation_steps
            )
            total = stream_loss * weight if total is None else total + stream_loss * weight
        return total

    def _prepare_stream(self, name: str, scored: ScoredRows, weight: float, totals: StreamTotals | None):
        rows, keep = scored.rows, self._kept(scored)
        totals = totals or self._totals(rows, keep)
        rows["num_items_in_batch"] = torch.full_like(rows["num_items_in_batch"], totals.num_tokens)
        # Rows without advantage count in the averages above, but where neither a KL term nor an entropy quantile looks
        # at them their gradient is exactly 0, and their forward pass can be saved.
        if self.beta == 0.0 and self.top_entropy_quantile >= 1.0:
            keep = keep & has_signal(rows["advantages"])
        rows_of_all = self.summed({"computed": int(keep.sum()), "real": int(scored.real.sum())})
        self.log_metric(f"{name}/computed_fraction", rows_of_all["computed"] / rows_of_all["real"])
        num_rows = self._max_over_processes(int(keep.sum()))
        steps = split_stream(
            rows,
            keep,
            num_rows=num_rows,
            num_steps=self.args.steps_per_generation,
            max_rows=self.args.per_device_train_batch_size,
            together=self.trees_stay_together,
        )
        return weight, totals, steps

    def _kept(self, scored: ScoredRows) -> torch.Tensor:
        """Rows of a stream that its mean is taken over, `(B,)`."""
        return scored.real & has_signal(scored.rows["advantages"]) if self.drop_zero_advantage else scored.real

    def _pool(self, output: RowDict, streams: list[ScoredRows]) -> StreamTotals:
        """What main rows and streams are averaged over together; the main rows' loss is told."""
        main = self._main_totals or self._totals(output, torch.ones_like(output["completion_mask"][:, 0]).bool())
        parts = [main, *(self._totals(scored.rows, self._kept(scored)) for scored in streams)]
        pooled = StreamTotals(sum(part.num_rows for part in parts), sum(part.num_tokens for part in parts))
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], pooled.num_tokens)
        self._main_totals = pooled
        return pooled

    def _totals(self, rows: RowDict, keep: torch.Tensor) -> StreamTotals:
        local = torch.stack([keep.sum(), (loss_mask(rows) * keep.unsqueeze(1)).sum()])
        num_rows, num_tokens = gather(local.unsqueeze(0)).sum(dim=0).tolist()
        return StreamTotals(num_rows=num_rows, num_tokens=num_tokens)

    @property
    def _num_slots(self) -> int:
        return self.args.steps_per_generation * self.accelerator.num_processes

    @property
    def _backward_kwargs(self) -> dict[str, Any]:
        return {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}

    @contextmanager
    def _deferred_sync(self, model) -> Iterator[None]:
        # DeepSpeed steps its optimiser inside `backward` whenever gradients are due to be synchronised.
        state = self.accelerator.gradient_state
        due = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(due)

    def rollout_state(self) -> dict[str, Any]:
        return {
            "streams": [[name, w, vars(totals), steps] for name, (w, totals, steps) in self._stream_steps.items()],
            "main_totals": vars(self._main_totals) if self._main_totals else None,
        }

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        self._stream_steps = {name: (w, StreamTotals(**totals), steps) for name, w, totals, steps in state["streams"]}
        self._main_totals = StreamTotals(**state["main_totals"]) if state["main_totals"] else None

"""Train the rows of streams by TRL's own loss, in addition to the main rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import DistributedType

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.policy import Pass, Policy
from trl_explore.rows.scorer import ScoredRows, Streams
from trl_explore.rows.streams import (
    LOSS_NORMALISERS,
    RowDict,
    StreamTotals,
    loss_mask,
    mask_rows,
    split_stream,
    stream_scale,
)


class PreparedStream(NamedTuple):
    """A stream of the current generation batch, distributed over the micro-batches of the main rows."""

    weight: float  # factor of the stream's loss
    totals: StreamTotals  # rows and tokens that the mean of the loss includes
    micro_batches: list[list[RowDict]]  # for each micro-batch of the main rows, the stream's rows in one or more parts


class StreamTraining:
    """
    Trains streams (see [`~trl_explore.rows.streams`]), and removes rows from the loss of the main rows.

    Args:
        policy ([`Policy`]):
            The trainer.
        together (`bool`):
            If True, rows of one prompt go to the same micro-batch.
        window (`int`, *optional*):
            Number of consecutive micro-batches that may exchange rows with `together`; None for all.
        trim_up_to (`int`, *optional*):
            Largest width (prompt and completion, in tokens) of rows whose padding may be removed. None: any width. In
            wider rows, rotary factors depend on the width (see
            [`~trl_explore.sampling.positions.fixed_rotary_length`]).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        together: bool,
        window: int | None = None,
        trim_up_to: int | None = None,
    ) -> None:
        self.policy, self.together = policy, together
        self.window, self.trim_up_to = window, trim_up_to
        self.prepared: dict[str, PreparedStream] = {}  # streams of the current generation batch, by name
        self.main_totals: StreamTotals | None = None  # None: TRL averages over the main rows

    def train_only(self, output: RowDict, keep: torch.Tensor) -> RowDict:
        """Return the main rows. Only the rows that are True in `keep`, `(B,)`, are in the loss and in its mean."""
        self.main_totals = self._totals(output, keep)
        if LOSS_NORMALISERS[self.policy.args.loss_type] == "tokens":
            # TRL divides by the tokens of a micro-batch. To correct that, `main_scale` needs the number of tokens
            # before rows are dropped.
            output["num_tokens"] = loss_mask(output).sum(dim=1)
            self.main_totals.num_batch_tokens = self._totals(output, torch.ones_like(keep)).num_tokens
        output = mask_rows(output, keep)
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], self.main_totals.num_tokens)
        return output

    def prepare(self, output: RowDict, streams: Streams) -> None:
        """Distribute the rows of every stream over the micro-batches of the main rows. Streams with the weight None
        share one mean with the main rows. Streams with the weight 0 are not trained. Every process calls this method.
        """
        joined = [scored for scored, weight in streams.values() if weight is None]
        pooled = self._pool(output, joined) if joined else None
        self.prepared = {}
        for name, (scored, weight) in streams.items():
            if weight is None:
                self.prepared[name] = PreparedStream(1.0, *self._dealt(name, scored, pooled))
            elif weight > 0:
                self.prepared[name] = PreparedStream(weight, *self._dealt(name, scored, None))

    def backward(self, model: Any, step: int, *, num_accumulated: int) -> torch.Tensor | None:
        """
        Run the backward passes of all streams for the micro-batch `step`. Return the weighted sum of their losses, or
        None without streams.

        Each graph is freed before the next one is built, so that peak memory does not grow. The backward pass of the
        main rows comes afterwards and synchronizes the gradients.
        """
        policy, total = self.policy, None
        for name, (weight, totals, micro_batches) in self.prepared.items():
            stream_loss = torch.zeros((), device=policy.accelerator.device)
            for rows in micro_batches[step]:
                scale = stream_scale(policy.args.loss_type, rows, totals, num_slots=self._num_slots)
                with policy.running(Pass(name)), self._deferred_sync(model):
                    loss = policy.loss(model, rows) * scale
                    policy.accelerator.backward(loss * weight, **self._backward_options)
                stream_loss = stream_loss + loss.detach()
            # The loss of a step is the sum over its micro-batches, but TRL logs their mean. So multiply by the number.
            policy.log_metric(f"{name}/loss", policy.ranks.gather(stream_loss).mean().item() * num_accumulated)
            weighted = stream_loss * weight
            total = weighted if total is None else total + weighted
        return total

    def main_scale(self, rows: RowDict) -> float:
        """Return the factor for the loss of a micro-batch of main rows."""
        if self.main_totals is None:
            return 1.0
        return stream_scale(self.policy.args.loss_type, rows, self.main_totals, num_slots=self._num_slots)

    def state(self) -> dict[str, Any]:
        """Return the streams of the current generation batch, for a checkpoint."""
        saved = []
        for name, (weight, totals, micro_batches) in self.prepared.items():
            saved.append([name, weight, vars(totals), micro_batches])
        return {"streams": saved, "main_totals": vars(self.main_totals) if self.main_totals else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.prepared = {}
        for name, weight, totals, micro_batches in state["streams"]:
            self.prepared[name] = PreparedStream(weight, StreamTotals(**totals), micro_batches)
        self.main_totals = StreamTotals(**state["main_totals"]) if state["main_totals"] else None

    def _dealt(
        self, name: str, scored: ScoredRows, totals: StreamTotals | None
    ) -> tuple[StreamTotals, list[list[RowDict]]]:
        """Distribute the rows of a stream over micro-batches. Return the totals for the mean of its loss, and the
        parts of each micro-batch. If `totals` is given, the mean includes other rows too, and `totals` is returned
        unchanged."""
        args, ranks = self.policy.args, self.policy.ranks
        rows, keep = scored.rows, self._kept(scored)
        totals = totals or self._totals(rows, keep)
        rows["num_items_in_batch"] = torch.full_like(rows["num_items_in_batch"], totals.num_tokens)
        # Rows with advantage 0 count in the totals. But without a KL term and an entropy quantile, their gradient is
        # exactly 0, so do not compute their forward pass.
        if args.beta == 0.0 and args.top_entropy_quantile >= 1.0:
            keep = keep & has_signal(rows["advantages"])
        counts = ranks.summed({"computed": int(keep.sum()), "real": int(scored.real.sum())})
        self.policy.log_metric(f"{name}/computed_fraction", counts["computed"] / counts["real"])
        width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
        steps = split_stream(
            rows,
            keep,
            num_rows=ranks.most(int(keep.sum())),
            num_steps=args.steps_per_generation,
            max_rows=args.per_device_train_batch_size,
            together=self.together,
            window=self.window,
            trim=self.trim_up_to is None or width <= self.trim_up_to,
        )
        return totals, steps

    def _kept(self, scored: ScoredRows) -> torch.Tensor:
        """Return the mask of the rows that the mean of a stream includes, `(B,)`."""
        if self.policy.args.drop_zero_advantage:
            return scored.real & has_signal(scored.rows["advantages"])
        return scored.real

    def _pool(self, output: RowDict, streams: list[ScoredRows]) -> StreamTotals:
        """Return the totals of main rows and streams together. The loss of the main rows uses these totals from now
        on."""
        all_rows = torch.ones_like(output["completion_mask"][:, 0]).bool()
        main = self.main_totals or self._totals(output, all_rows)
        parts = [main, *(self._totals(scored.rows, self._kept(scored)) for scored in streams)]
        pooled = StreamTotals(sum(part.num_rows for part in parts), sum(part.num_tokens for part in parts))
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], pooled.num_tokens)
        self.main_totals = pooled
        return pooled

    def _totals(self, rows: RowDict, keep: torch.Tensor) -> StreamTotals:
        """Return the totals of the rows `keep`, `(B,)`, over all processes."""
        local = torch.stack([keep.sum(), (loss_mask(rows) * keep.unsqueeze(1)).sum()])
        num_rows, num_tokens = self.policy.ranks.gather(local.unsqueeze(0)).sum(dim=0).tolist()
        return StreamTotals(num_rows=num_rows, num_tokens=num_tokens)

    @property
    def _num_slots(self) -> int:
        """Number of micro-batches of a generation batch, over all processes."""
        return self.policy.args.steps_per_generation * self.policy.ranks.number

    @property
    def _backward_options(self) -> dict[str, Any]:
        """Options of `backward`, as in transformers' Trainer: DeepSpeed must not divide by the accumulation steps."""
        if self.policy.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return {"scale_wrt_gas": False}
        return {}

    @contextmanager
    def _deferred_sync(self, model: Any) -> Iterator[None]:
        """Do not synchronize gradients inside the block. DeepSpeed would run an optimizer step in `backward` whenever
        gradients are due to be synchronized."""
        state = self.policy.accelerator.gradient_state
        due = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.policy.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(due)

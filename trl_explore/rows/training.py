"""Rows beside the main ones are trained by TRL's own loss, each stream by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import DistributedType

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.policy import Pass, Policy
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import (
    LOSS_NORMALISERS,
    RowDict,
    StreamTotals,
    loss_mask,
    mask_rows,
    split_stream,
    stream_scale,
)


class StreamTraining:
    """
    Trains further streams of rows, each with its own normaliser, or, `pooled`, all as one mean with the main rows.

    With `together`, rows of one prompt go to one micro-batch, within `window` consecutive ones; None for all. Parts of
    rows that are wider than `longest` keep their width: positions depend on it (see
    [`~trl_explore.sampling.positions.fixed_rotary_length`]).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        pooled: bool,
        together: bool,
        window: int | None = None,
        longest: int | None = None,
    ) -> None:
        self.policy, self.pooled, self.together = policy, pooled, together
        self.window, self.longest = window, longest
        self.steps: dict[str, tuple[float, StreamTotals, list[list[RowDict]]]] = {}
        self.main_totals: StreamTotals | None = None  # `None`: the main rows are averaged as TRL does

    def drop(self, output: RowDict, keep: torch.Tensor) -> RowDict:
        """Main rows of `keep`, `(B,)`; the others leave the average as well."""
        self.main_totals = self._totals(output, keep)
        if LOSS_NORMALISERS[self.policy.args.loss_type] == "tokens":
            output["num_tokens"] = loss_mask(output).sum(dim=1)
            self.main_totals.num_batch_tokens = self._totals(output, torch.ones_like(keep)).num_tokens
        output = mask_rows(output, keep)
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], self.main_totals.num_tokens)
        return output

    def prepare(self, output: RowDict, streams: dict[str, tuple[ScoredRows, float]]) -> None:
        """Deal the rows of every stream out to the micro-batches of the main rows; all processes call it."""
        streams = {name: (scored, weight) for name, (scored, weight) in streams.items() if weight > 0}
        pooled = self._pool(output, [scored for scored, _ in streams.values()]) if self.pooled and streams else None
        self.steps = {name: (weight, *self._dealt(name, scored, pooled)) for name, (scored, weight) in streams.items()}

    def backward(self, model: Any, step: int, *, num_accumulated: int) -> torch.Tensor | None:
        """Backward passes of all streams' parts of a micro-batch, each graph freed before the next is built, so that
        peak memory stays that of one. The main stream's comes last and synchronises the gradients of all."""
        policy, total = self.policy, None
        for name, (weight, totals, steps) in self.steps.items():
            stream_loss = torch.zeros((), device=policy.accelerator.device)
            for rows in steps[step]:
                scale = stream_scale(policy.args.loss_type, rows, totals, num_slots=self._num_slots)
                with policy.running(Pass(name)), self._deferred_sync(model):
                    loss = policy.loss(model, rows) * scale
                    policy.accelerator.backward(loss * weight, **self._backward_options)
                stream_loss = stream_loss + loss.detach()
            policy.log_metric(f"{name}/loss", policy.ranks.gather(stream_loss).mean().item() * num_accumulated)
            total = stream_loss * weight if total is None else total + stream_loss * weight
        return total

    def main_scale(self, rows: RowDict) -> float:
        """What the loss of a main micro-batch is scaled by."""
        if self.main_totals is None:
            return 1.0
        return stream_scale(self.policy.args.loss_type, rows, self.main_totals, num_slots=self._num_slots)

    def state(self) -> dict[str, Any]:
        """Rows of the current generation batch beside TRL's own, for a checkpoint."""
        return {
            "streams": [[name, w, vars(totals), steps] for name, (w, totals, steps) in self.steps.items()],
            "main_totals": vars(self.main_totals) if self.main_totals else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.steps = {name: (w, StreamTotals(**totals), steps) for name, w, totals, steps in state["streams"]}
        self.main_totals = StreamTotals(**state["main_totals"]) if state["main_totals"] else None

    def _dealt(
        self, name: str, scored: ScoredRows, totals: StreamTotals | None
    ) -> tuple[StreamTotals, list[list[RowDict]]]:
        args, ranks = self.policy.args, self.policy.ranks
        rows, keep = scored.rows, self._kept(scored)
        totals = totals or self._totals(rows, keep)
        rows["num_items_in_batch"] = torch.full_like(rows["num_items_in_batch"], totals.num_tokens)
        # Rows without advantage count in the averages above, but where neither a KL term nor an entropy quantile looks
        # at them their gradient is exactly 0, and their forward pass can be saved.
        if args.beta == 0.0 and args.top_entropy_quantile >= 1.0:
            keep = keep & has_signal(rows["advantages"])
        rows_of_all = ranks.summed({"computed": int(keep.sum()), "real": int(scored.real.sum())})
        self.policy.log_metric(f"{name}/computed_fraction", rows_of_all["computed"] / rows_of_all["real"])
        width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
        steps = split_stream(
            rows,
            keep,
            num_rows=ranks.most(int(keep.sum())),
            num_steps=args.steps_per_generation,
            max_rows=args.per_device_train_batch_size,
            together=self.together,
            window=self.window,
            trim=self.longest is None or width <= self.longest,
        )
        return totals, steps

    def _kept(self, scored: ScoredRows) -> torch.Tensor:
        """Rows of a stream that its mean is taken over, `(B,)`."""
        drops = self.policy.args.drop_zero_advantage
        return scored.real & has_signal(scored.rows["advantages"]) if drops else scored.real

    def _pool(self, output: RowDict, streams: list[ScoredRows]) -> StreamTotals:
        """What main rows and streams are averaged over together; the main rows' loss is told."""
        main = self.main_totals or self._totals(output, torch.ones_like(output["completion_mask"][:, 0]).bool())
        parts = [main, *(self._totals(scored.rows, self._kept(scored)) for scored in streams)]
        pooled = StreamTotals(sum(part.num_rows for part in parts), sum(part.num_tokens for part in parts))
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], pooled.num_tokens)
        self.main_totals = pooled
        return pooled

    def _totals(self, rows: RowDict, keep: torch.Tensor) -> StreamTotals:
        local = torch.stack([keep.sum(), (loss_mask(rows) * keep.unsqueeze(1)).sum()])
        num_rows, num_tokens = self.policy.ranks.gather(local.unsqueeze(0)).sum(dim=0).tolist()
        return StreamTotals(num_rows=num_rows, num_tokens=num_tokens)

    @property
    def _num_slots(self) -> int:
        return self.policy.args.steps_per_generation * self.policy.ranks.number

    @property
    def _backward_options(self) -> dict[str, Any]:
        deepspeed = self.policy.accelerator.distributed_type == DistributedType.DEEPSPEED
        return {"scale_wrt_gas": False} if deepspeed else {}

    @contextmanager
    def _deferred_sync(self, model: Any) -> Iterator[None]:
        # DeepSpeed steps its optimiser inside `backward` whenever gradients are due to be synchronised.
        state = self.policy.accelerator.gradient_state
        due = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.policy.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(due)

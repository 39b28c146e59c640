"""A generation batch of a trainer: from what TRL samples and scores to rows that are ready to be trained."""

from collections.abc import Callable
from typing import Any

import torch

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.copies import own_copy
from trl_explore.rows.printed import SHARED
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict
from trl_explore.selection.need import Need

Chooser = Callable[[list[list[int]]], Rollout]


class Batch:
    """Asks a trainer's hooks and parts, each in its turn; `trainer` is an
    [`~trl_explore.trainers.ExplorationTrainer`]."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.given: list[dict[str, Any]] = []  # rows as TRL has them: environments and reward functions change these

    @property
    def need(self) -> Need | None:
        """What chooses the prompts whose main rows the method samples itself; `None`: it does all."""
        return self.trainer.need if self.trainer.requires.main_rows else None

    def run(
        self,
        inputs: list[dict[str, Any]],
        own: Callable[[list[dict[str, Any]]], RowDict],
        logs: dict[str, Any],
        metrics: dict[str, list[Any]],
    ) -> RowDict:
        """Main rows of a generation batch; further streams are dealt out beside them. `own` is TRL's sampling and
        scoring, `logs` and `metrics` are what it writes to."""
        trainer = self.trainer
        trainer.streams.main_totals, trainer.sample.metrics = None, {}

        def play(examples: list[dict[str, Any]]) -> tuple[RowDict, dict[str, tuple[ScoredRows, float]]]:
            return self._round(examples, own, logs, metrics)

        output, streams, keep = (*play(inputs), None) if trainer.rounds is None else trainer.rounds.batch(inputs, play)
        if trainer.args.drop_zero_advantage:
            signal = has_signal(output["advantages"])
            keep = signal if keep is None else keep & signal
        elif keep is not None and trainer.ranks.gather(keep).all():
            keep = None
        output = output if keep is None else trainer.streams.drop(output, keep)
        trainer.credit.temper(output)
        if trainer.log_completions and trainer.rounds is None:
            trainer.table.show_advantages(logs, output)
        trainer.streams.prepare(output, streams)
        for name, value in trainer.sample.metrics.items():
            trainer.log_metric(f"generation/{name}", value)
        # A total is not averaged over the logging interval: the newest value stands, as in TRL's `num_tokens`.
        metrics["generation/sampled_tokens"] = [float(trainer.sample.tokens.sum_up(trainer.ranks))]
        if trainer.changed_hooks:
            trainer.log_metric("method/changed_hooks", len(trainer.changed_hooks))
        return output

    def rolled_out(self, contexts: list[list[int]], plain: Chooser) -> Rollout:
        """What the method samples for the main rows; `plain` is GRPO's own sampling."""
        trainer = self.trainer
        if self.need is None:
            return trainer.rollout(contexts, plain)

        def explored(rows: list[int], again: Chooser) -> Rollout:
            trainer.main_examples = [trainer.main_examples[row] for row in rows]
            return trainer.rollout([contexts[row] for row in rows], again)

        return self.need.rollout(contexts, trainer.main_examples, plain, explored)

    def _round(
        self, inputs: list[dict[str, Any]], own: Any, logs: dict[str, Any], metrics: dict[str, list[Any]]
    ) -> tuple[RowDict, dict[str, tuple[ScoredRows, float]]]:
        """Main rows with their advantages, and the streams beside them."""
        trainer, need = self.trainer, self.need
        # Environments and reward functions may change lists of `inputs`; further rows begin with those of the data.
        self.given = inputs
        examples = [own_copy(dict(example)) for example in inputs]
        trainer.main_examples, trainer.scorer.any_example = examples, examples[0]
        output = own(inputs)
        trainer.table.one_reward_per_name(logs, len(inputs))
        shaped = trainer.shaped_rewards
        if trainer.scorer.were_shaped(shaped):
            trainer.scorer.show_raw(metrics, logs["rewards"])
        if trainer.serving is not None:
            trainer.serving.watch_correction(output)
        if trainer.args.drop_zero_advantage:
            level = trainer.scorer.level(shaped, group_size=trainer.num_generations or 1)
            output["advantages"] = output["advantages"].masked_fill(level, 0.0)
        output["advantages"] = trainer.credit.assigned(output, shaped)
        if trainer.rounds is not None:
            output["advantages"] = trainer.rounds.advantages(output["advantages"], shaped)
        trainer.search(output)
        if need is None:
            output["advantages"] = trainer.assign_advantages(output)
        else:
            output["advantages"] = need.credit(output, trainer.main_completion_ids, self._credit)
        streams = trainer.extra_streams(output, [own_copy(row) for row in examples], trainer.scorer.totals())
        streams |= {} if need is None else need.streams(self._credit)
        if trainer.log_completions:
            rows = {name: scored for name, (scored, _) in streams.items()}
            beside = trainer.requires.extra_rows or (need is not None and need.adds)
            origins = ["parent", "prefix_tokens", SHARED] if beside else []
            trainer.table.add(logs, output, self._columns(len(inputs)), rows, of_streams=origins)
        return output, streams

    def _credit(self, rows: RowDict, completion_ids: list[list[int]], deciding: torch.Tensor) -> torch.Tensor:
        """The method's own advantages of rows that it sampled itself."""
        self.trainer.main_completion_ids, self.trainer.scorer.deciding = completion_ids, deciding
        return self.trainer.assign_advantages(rows)

    def _columns(self, num_rows: int) -> dict[str, list[Any]]:
        trainer = self.trainer
        columns = trainer.completion_columns()
        columns = columns if self.need is None else self.need.columns(columns, trainer.plain_columns, num_rows)
        return columns if trainer.rounds is None else {**columns, **trainer.rounds.columns()}

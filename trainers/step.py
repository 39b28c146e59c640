"""One generation batch: from the prompts that TRL hands over to rows that are ready to be trained.

This module conducts a step. It calls the trainer's hooks and parts in the order in which they stand here.
"""

from collections.abc import Callable
from typing import Any

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.copies import own_copy
from trl_explore.rows.printed import SHARED
from trl_explore.rows.scorer import ScoredRows
from trl_explore.rows.streams import RowDict

from .hooks import Hooks

Streams = dict[str, tuple[ScoredRows, float]]
# TRL's sampling and scoring of data-set rows.
SampleAndScore = Callable[[list[dict[str, Any]]], RowDict]


class Step:
    """
    Makes the rows of a generation batch, in one round or, with dynamic sampling, in several.

    Args:
        trainer ([`~trl_explore.trainers.ExplorationTrainer`]):
            The trainer, whose hooks and parts are called.
        sample_and_score (`Callable[[list[dict]], dict]`):
            TRL's `_generate_and_score_completions`.
        logs (`dict`):
            The completions table that TRL writes to.
        metrics (`dict[str, list]`):
            The metrics that TRL writes to.
    """

    def __init__(
        self,
        trainer: Hooks,
        sample_and_score: SampleAndScore,
        logs: dict[str, Any],
        metrics: dict[str, list[Any]],
    ) -> None:
        self.trainer, self.sample_and_score = trainer, sample_and_score
        self.logs, self.metrics = logs, metrics

    def run(self, inputs: list[dict[str, Any]]) -> RowDict:
        """
        Return the main rows of the generation batch. The rows of further streams go to `trainer.streams`.

        Args:
            inputs (`list[dict]`):
                Rows of the data set, `[B]`; `num_generations` consecutive rows have the same prompt.
        """
        trainer = self.trainer
        trainer.streams.main_totals, trainer.sample.metrics = None, {}
        keep = None  # mask `(B,)` of the main rows that are trained; None: all are
        if trainer.rounds is None:
            output, streams = self._round(inputs)
        else:
            output, streams, keep = trainer.rounds.batch(inputs, self._round)
        if trainer.args.drop_zero_advantage:
            signal = has_signal(output["advantages"])
            keep = signal if keep is None else keep & signal
        elif keep is not None and trainer.ranks.gather(keep).all():
            keep = None
        if keep is not None:
            output = trainer.streams.drop(output, keep)
        trainer.credit.temper(output)
        if trainer.log_completions and trainer.rounds is None:
            trainer.table.show_advantages(self.logs, output)
        trainer.streams.prepare(output, streams)
        self._log_generation()
        return output

    def _round(self, inputs: list[dict[str, Any]]) -> tuple[RowDict, Streams]:
        """Return main rows with their advantages, and the streams of further rows."""
        trainer = self.trainer
        # Environments and reward functions may change `inputs`. Explorers and hooks get copies from before that.
        trainer.given_examples = inputs
        trainer.main_examples = [own_copy(dict(example)) for example in inputs]
        trainer.scorer.any_example = trainer.main_examples[0]
        output = self.sample_and_score(inputs)
        trainer.table.one_reward_per_name(self.logs, len(inputs))
        shaped = trainer.shaped_rewards
        if trainer.scorer.were_shaped(shaped):
            trainer.scorer.show_raw(self.metrics, self.logs["rewards"])
        if trainer.serving is not None:
            trainer.serving.watch_correction(output)
        if trainer.args.drop_zero_advantage:
            level = trainer.scorer.level(shaped, group_size=trainer.num_generations or 1)
            output["advantages"] = output["advantages"].masked_fill(level, 0.0)
        output["advantages"] = trainer.credit.assigned(output, shaped)
        if trainer.rounds is not None:
            output["advantages"] = trainer.rounds.advantages(output["advantages"], shaped)
        trainer.search(output)
        output["advantages"] = trainer.assign_advantages(output)
        examples = [own_copy(row) for row in trainer.main_examples]
        streams = trainer.extra_streams(output, examples, trainer.scorer.totals())
        if trainer.exploration is not None:
            streams |= trainer.exploration.streams()
        if trainer.log_completions:
            self._add_to_table(output, streams)
        return output, streams

    def _add_to_table(self, output: RowDict, streams: Streams) -> None:
        trainer = self.trainer
        columns = trainer.completion_columns()
        if trainer.rounds is not None:
            columns = {**columns, **trainer.rounds.columns()}
        origins: list[str] = []
        if trainer.trains_further_rows:
            origins = ["parent", "prefix_tokens", SHARED]
        rows = {name: scored for name, (scored, _) in streams.items()}
        trainer.table.add(self.logs, output, columns, rows, of_streams=origins)

    def _log_generation(self) -> None:
        trainer = self.trainer
        for name, value in trainer.sample.metrics.items():
            trainer.log_metric(f"generation/{name}", value)
        # The logged total is the newest one, not an average over the logging interval, as TRL's `num_tokens`.
        self.metrics["generation/sampled_tokens"] = [float(trainer.sample.tokens.sum_up(trainer.ranks))]
        if trainer.changed_hooks:
            trainer.log_metric("method/changed_hooks", len(trainer.changed_hooks))

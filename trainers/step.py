"""One generation batch: from the data-set rows that TRL passes to rows that are ready to be trained.

Read this file from top to bottom to see in which order the hooks and parts of a trainer are called.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from trl_explore.rows.advantages import has_signal
from trl_explore.rows.copies import own_copy
from trl_explore.rows.printed import SHARED
from trl_explore.rows.scorer import Streams
from trl_explore.rows.streams import RowDict, loss_mask, select_rows
from trl_explore.selection.variance import TRAINED, check_trained_generations, largest_variance

from .hooks import Hooks

# TRL's method that samples and scores completions for data-set rows.
SampleAndScore = Callable[[list[dict[str, Any]]], RowDict]


class Step:
    """
    Makes the training rows of a generation batch. With dynamic sampling, it may take several rounds of sampling.

    Args:
        trainer ([`~trl_explore.trainers.ExplorationTrainer`]):
            The trainer. Its hooks and parts are called.
        sample_and_score (`Callable[[list[dict]], dict]`):
            TRL's `_generate_and_score_completions`.
        logs (`dict`):
            The completions table into which TRL writes.
        metrics (`dict[str, list]`):
            The metrics into which TRL writes.
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
        self._num_rounds = 0  # rounds of sampling in this generation batch

    def run(self, inputs: list[dict[str, Any]]) -> RowDict:
        """
        Return the main rows of the generation batch. The rows of streams go to `trainer.stream_training`.

        Args:
            inputs (`list[dict]`):
                Rows of the data set, `[B]`; `num_generations` consecutive rows have the same prompt.
        """
        trainer = self.trainer
        trainer.stream_training.main_totals = None
        trainer.sample.metrics = {}
        if trainer.branching is not None:
            trainer.branching.begin_batch()
        keep = None  # mask `(B,)` of the main rows to train; None: train all
        if trainer.rounds is None:
            output, streams = self._round(inputs)
        else:
            output, streams, keep = trainer.rounds.batch(inputs, self._round)
        if trainer.branching is not None:
            streams = trainer.branching.end_batch(streams)
        if TRAINED in output:
            if trainer.log_completions and trainer.rounds is None:
                trainer.table.show_advantages(self.logs, output)  # of all rows, before some are left out
            index = output.pop(TRAINED).nonzero().squeeze(1)
            output = self._selected(output, index)
            keep = None if keep is None else keep[index]
        if trainer.args.drop_zero_advantage:
            signal = has_signal(output["advantages"])
            keep = signal if keep is None else keep & signal
        elif keep is not None and trainer.ranks.gather(keep).all():
            keep = None  # no process drops a row, so the batch is GRPO's bit for bit
        if keep is not None:
            output = trainer.stream_training.train_only(output, keep)
        trainer.credit.apply_clip_cov_and_kl_cov(output)
        # With rounds or `trained_generations`, the table already has the advantages, from `table.add` or from the call
        # above.
        if trainer.log_completions and trainer.rounds is None and not trainer.args.trains_some:
            trainer.table.show_advantages(self.logs, output)
        trainer.stream_training.prepare(output, streams)
        self._log_generation()
        return output

    def _selected(self, output: RowDict, index: torch.Tensor) -> RowDict:
        """Return the main rows `index`, `(M,)`, of this process, and log how many tokens were sampled for them."""
        ranks = self.trainer.ranks
        selected = select_rows(output, index)
        total = ranks.summed({"sampled": int(loss_mask(output).sum()), "trained": int(loss_mask(selected).sum())})
        selected["num_items_in_batch"] = torch.full_like(selected["num_items_in_batch"], total["trained"])
        self.trainer.log_metric("selection/trained_tokens", total["trained"])
        self.trainer.log_metric("selection/untrained_tokens", total["sampled"] - total["trained"])
        return selected

    def _choose_trained(self, shaped: torch.Tensor, output: RowDict) -> torch.Tensor:
        """Choose the rows to train by `trained_generations`, and store their mask in `output[TRAINED]`. Return the
        rewards `(N, F)`, with NaN for all other rows."""
        trainer, args = self.trainer, self.trainer.args
        check_trained_generations(args)  # a callback may have changed the fields
        assert args.trained_generations is not None
        # All processes use the same seed and the same rewards, so they choose the same rows.
        random = Random(f"{args.seed} {trainer.state.global_step} {self._num_rounds}")
        self._num_rounds += 1
        rewards = trainer.scorer.totals(shaped).view(-1, args.num_generations)
        chosen = largest_variance(rewards, args.trained_generations, random=random).flatten()  # (N,)
        output[TRAINED] = trainer.ranks.local(chosen)
        return shaped.masked_fill(~chosen.unsqueeze(1), torch.nan)

    def _round(self, inputs: list[dict[str, Any]]) -> tuple[RowDict, Streams]:
        """Sample and credit one round. Return the main rows with their advantages, and the streams."""
        trainer = self.trainer
        # Environments and reward functions may change `inputs`, so explorers and hooks get copies that are made now.
        trainer.given_examples = inputs
        trainer.main_examples = [own_copy(dict(example)) for example in inputs]
        trainer.scorer.any_example = trainer.main_examples[0]
        if trainer.branching is not None:
            trainer.branching.begin(0 if trainer.rounds is None else trainer.rounds.num_fillers)
        output = self.sample_and_score(inputs)
        trainer.table.one_reward_per_name(self.logs, len(inputs))
        shaped = trainer.shaped_rewards
        if trainer.scorer.were_shaped(shaped):
            trainer.scorer.show_raw(self.metrics, self.logs["rewards"])
        if trainer.serving is not None:
            trainer.serving.watch_correction(output)
        if trainer.args.drop_zero_advantage:
            # Rounding leaves tiny advantages in a group of equal rewards. Make them 0, so that the rows are dropped.
            equal = trainer.scorer.equal_reward_rows(shaped, group_size=trainer.num_generations or 1)
            output["advantages"] = output["advantages"].masked_fill(equal, 0.0)
        rewards = shaped
        if trainer.args.trains_some:
            rewards = self._choose_trained(shaped, output)
        output["advantages"] = trainer.credit.assigned(output, rewards, trainer.main_examples)
        if trainer.rounds is not None:
            output["advantages"] = trainer.rounds.advantages(output["advantages"], shaped)
        trainer.search(output)
        output["advantages"] = trainer.assign_advantages(output)
        if trainer.rounds is not None and trainer.branching is not None:
            trainer.rounds.credited = trainer.branching.credited(output["completion_mask"].any(dim=1))
        examples = [own_copy(row) for row in trainer.main_examples]
        streams = trainer.extra_streams(output, examples, trainer.scorer.totals())
        if trainer.exploration is not None:
            streams |= trainer.exploration.streams()
        if trainer.log_completions:
            self._add_to_table(output, streams)
        return output, streams

    def _add_to_table(self, output: RowDict, streams: Streams) -> None:
        """Add the main rows and the rows of streams to the completions table."""
        trainer = self.trainer
        columns = trainer.completion_columns()
        if trainer.rounds is not None:
            columns = {**columns, **trainer.rounds.columns()}
        stream_columns: list[str] = []  # columns that only the rows of streams have
        if trainer.trains_further_rows:
            stream_columns = ["parent", "prefix_tokens", SHARED]
        rows = {name: scored for name, (scored, _) in streams.items()}
        trainer.table.add(self.logs, output, columns, rows, of_streams=stream_columns)

    def _log_generation(self) -> None:
        """Log the times and sizes of sampling, the number of sampled tokens, and the number of changed hooks."""
        trainer = self.trainer
        for name, value in trainer.sample.metrics.items():
            trainer.log_metric(f"generation/{name}", value)
        # Log the newest total instead of an average over the logging interval, as TRL does for `num_tokens`.
        self.metrics["generation/sampled_tokens"] = [float(trainer.sample.tokens.sum_up(trainer.ranks))]
        if trainer.changed_hooks:
            trainer.log_metric("method/changed_hooks", len(trainer.changed_hooks))

"""Dynamic sampling: remove groups with equal rewards from the batch, and sample other prompts in their place."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from trl.trainer.utils import nanstd

from trl_explore.rewards.success import succeeded
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import ScoredRows, Scorer, Streams
from trl_explore.rows.streams import RowDict, loss_mask, merge_rows, select_rows
from trl_explore.selection.budget import allocate, unequal_advantages
from trl_explore.selection.order import PromptOrder
from trl_explore.selection.solved import SuccessRates

# Samples and scores rows of this process: main rows with their advantages, and further streams.
Round = Callable[[list[dict[str, Any]]], tuple[RowDict, Streams]]


class Rounds:
    """
    Chooses the prompts of generation batches, and samples in rounds until enough groups have contrast.

    A group has contrast if its rewards differ, or if an explorer gave one of its rows an advantage other than 0. Every
    process runs the same number of rounds, with the same number of rows in a round.

    Args:
        policy ([`Policy`]):
            The trainer.
        scorer ([`Scorer`]):
            Scorer of the trainer.
        order ([`PromptOrder`], *optional*):
            Order of the prompts. None if the data loader chooses the prompts.
    """

    def __init__(self, policy: Policy, scorer: Scorer, order: PromptOrder | None) -> None:
        self.policy, self.scorer, self.order, self.args = policy, scorer, order, policy.args
        self.solved = SuccessRates()
        self.counts = {"prompts_seen": 0, "discarded_tokens": 0, "skipped_prompts": 0}  # sums over the run
        self.rows_of: list[int] = []  # rows of each prompt of this process; empty if all prompts have `size` rows
        # Mask of the newest round's main rows that an explorer credited, `(B,)`; None without a branch explorer.
        self.credited: torch.Tensor | None = None
        self.num_fillers = 0  # prompts of this process in the newest round whose main rows are dropped
        self._before_step = self._now()  # the values of `state`, from before the current step
        self._warned = False

    @property
    def size(self) -> int:
        """Number of rows of a prompt, unless a budget changes it."""
        return self.args.num_generations

    def begin_run(self, data: Any, *, shuffle: bool, seed: int) -> None:
        """Start with the first prompt of `data`. TRL makes its data loader for the same data at the same time."""
        if self.order is not None:
            self.order = PromptOrder(data, shuffle=shuffle, seed=seed)

    def begin_step(self) -> None:
        """Keep the state before an optimizer step, so that `state` can return it if the step fails."""
        self._before_step = self._now()

    def forget_data(self) -> None:
        """Drop all success rates, because the data was replaced."""
        self.solved = SuccessRates()

    def batch(self, inputs: list[dict[str, Any]], play: Round) -> tuple[RowDict, Streams, torch.Tensor | None]:
        """
        Sample a generation batch.

        Args:
            inputs (`list[dict]`):
                Rows of the data loader. They are ignored if `order` chooses the prompts.
            play (`Callable`):
                Samples and scores rows.

        Returns:
            `tuple`: The main rows, the streams, and the mask `(B,)` of the main rows to train, None for all.
        """
        number = len(inputs) // self.size  # prompts of this process in a batch
        places: list[int] = []
        if self.order is not None:
            places = self._taken([number] * self.policy.ranks.number)
            self.rows_of = self._allocated(places)
            inputs = self._rows(places)
        fillers: list[dict[str, Any]] = []
        if self.args.dynamic_sampling == "refill":
            # Later rounds need filler rows. Reward functions may change their arguments, so copy the rows now.
            fillers = [own_copy(dict(row)) for row in inputs]
        self.num_fillers = 0
        output, streams = play(inputs)
        self._note(places, number)
        if self.args.dynamic_sampling == "off":
            self._log({})
            return output, streams, None
        keep = self.contrast()
        tokens = self._tokens(output)  # sampled in all rounds
        sampled = len(keep)  # rows of all rounds, without fillers
        rounds, missing = 1, 0
        if self.args.dynamic_sampling == "refill":
            num_found = int(keep.sum()) // self.size  # groups with contrast
            outputs, streams_of_rounds = [output], [streams]
            while True:
                missing = number - num_found
                most = self.policy.ranks.most(missing)
                if not most or rounds >= self.args.max_sampling_rounds:
                    break
                places = self._taken(self.policy.ranks.objects([missing]))
                # All processes must score the same number of rows. Filler rows are dropped afterwards.
                self.num_fillers = most - missing
                filling = fillers[: self.num_fillers * self.size]
                more, more_streams = play(self._rows(places) + [own_copy(row) for row in filling])
                self._note(places, missing)
                is_filler = torch.arange(most * self.size, device=keep.device) >= missing * self.size
                good = self.contrast() & ~is_filler
                outputs.append(select_rows(more, good.nonzero().squeeze(1)))
                streams_of_rounds.append(more_streams)
                num_found += int(good.sum()) // self.size
                sampled += missing * self.size
                tokens += self._tokens(more)
                rounds += 1
            if rounds > 1:
                output, keep = self._refilled(outputs, keep)
                streams = self._joined(streams_of_rounds)
        # Count rows instead of groups, because a group may span processes with "filter".
        own = {"kept": int(keep.sum()), "sampled": sampled, "missing": missing}
        total = self.policy.ranks.summed({**own, "tokens": tokens, "discarded": tokens - self._tokens(output, keep)})
        self.counts["discarded_tokens"] += int(total["discarded"])
        self._log(
            {
                "rounds": rounds,
                "kept_groups": total["kept"] / total["sampled"],
                "missing_groups": total["missing"],
                "sampled_tokens": total["tokens"],
            }
        )
        self._warn_of(int(total["missing"]), rounds)
        return output, streams, keep

    def state(self, *, before_step: bool = False) -> dict[str, Any]:
        """Return the state for a checkpoint. With `before_step=True`, return the state before the current optimizer
        step, so that a resumed run takes the prompts of this step again."""
        values = self._before_step if before_step else self._now()
        return {
            "taken": values["taken"],
            "data": None if self.order is None else self.order.fingerprint(),
            "rates": [[place, rate] for place, rate in values["rates"].items()],
            "counts": values["counts"],
        }

    def _now(self) -> dict[str, Any]:
        """Return copies of the values that change during a step."""
        taken = None if self.order is None else self.order.taken
        return {"taken": taken, "rates": dict(self.solved.rates), "counts": dict(self.counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        if self.order is not None and state["taken"] is not None:
            self.order.begin(state["taken"])
        self.solved.rates = {int(place): rate for place, rate in state["rates"]}
        before = state.get("data")  # older checkpoints have no fingerprint
        if self.order is not None and before is not None and before != self.order.fingerprint():
            self.forget_data()
            warnings.warn(
                "The checkpoint was written with other training data, so the success rates of its prompts are "
                "dropped: every prompt is sampled as a new one.",
                stacklevel=2,
            )
        self.counts = dict(state["counts"])

    def _taken(self, needs: list[int]) -> list[int]:
        """Return the places of this process's next prompts. `needs` are the numbers of prompts that all processes
        need."""
        assert self.order is not None
        before = self.order.taken
        passed_over: Callable[[int], bool] | None = None
        if self.args.explore_threshold is not None:
            passed_over = partial(self.solved.passes_over, threshold=self.args.explore_threshold)
        dealt = self.order.take(needs, passed_over)
        self.counts["prompts_seen"] += sum(needs)
        self.counts["skipped_prompts"] += self.order.taken - before - sum(needs)
        return dealt[self.policy.ranks.index]

    def _rows(self, places: list[int]) -> list[dict[str, Any]]:
        """Return the rows of prompts: one copy of the data-set row for each completion."""
        assert self.order is not None
        counts = self.rows_of or [self.size] * len(places)
        rows: list[dict[str, Any]] = []
        for place, count in zip(places, counts, strict=True):
            for _ in range(count):
                rows.append(dict(self.order.data[place]))  # a transform may make another row each time
        return rows

    def _allocated(self, places: list[int]) -> list[int]:
        """Return the number of rows of each prompt by `budget`. The list is empty if all have `size` rows."""
        args, size = self.args, self.size
        if args.budget == "uniform":
            return []
        rates = [self.solved.rates.get(place) for place in places]
        high = args.max_generations or 2 * size
        counts = allocate(rates, kind=args.budget, usual=size, low=args.min_generations, high=high)
        moved = self.policy.ranks.summed({"rows": sum(max(n - size, 0) for n in counts), "all": size * len(places)})
        self.policy.log_metric("selection/moved_rows", moved["rows"] / moved["all"])
        return counts

    def advantages(self, of_grpo: torch.Tensor, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Return the advantages `(B,)` of the main rows. If prompts have different numbers of rows, compute them from
        the rewards `(N, F)` of all processes. Otherwise, return GRPO's advantages `of_grpo`."""
        if not self.rows_of:
            return of_grpo
        totals = self.scorer.totals(rewards_per_func)
        return unequal_advantages(
            self.policy.ranks.local(totals),
            self.rows_of,
            scale=self.args.scale_rewards,
            usual=self.size,
            deviation=nanstd(totals).item(),
        )

    def contrast(self) -> torch.Tensor:
        """Return the mask `(B,)` of this process's rows in groups with different raw rewards, or with a row that an
        explorer credited. Every process must call it."""
        assert self.scorer.rewards_per_func is not None
        contrast = ~self.scorer.equal_reward_rows(self.scorer.rewards_per_func, group_size=self.size)
        if self.credited is not None:
            # With "filter", a group may span processes, so look at the rows of all processes.
            is_credited = self.policy.ranks.gather(self.credited).view(-1, self.size).any(dim=1)
            contrast = contrast | self.policy.ranks.local(is_credited.repeat_interleave(self.size))
        return contrast

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of the completions table for the main rows of a round."""
        if self.args.dynamic_sampling == "off":
            return {}
        return {"contrast": self.contrast().tolist()}

    def _tokens(self, rows: RowDict, keep: torch.Tensor | None = None) -> int:
        """Return the number of sampled tokens of rows. Answers of tools were not sampled."""
        mask = loss_mask(rows)
        if keep is not None:
            mask = mask[keep]
        return int(mask.sum())

    def _note(self, places: list[int], number: int) -> None:
        """Update the success rates by the prompts of a round."""
        if self.args.explore_threshold is None and self.args.budget == "uniform":
            return
        counts = self.rows_of or [self.size] * number
        deciding = self.policy.ranks.local(self.scorer.success())[: sum(counts)].split(counts)
        threshold = self.args.resolved_success_threshold
        own = []  # place and share of successes of each prompt with a reward
        for place, group in zip(places, deciding, strict=True):
            known = group[~group.isnan()]
            if len(known):
                own.append((place, succeeded(known, threshold=threshold).float().mean().item()))
        self.solved.note(self.policy.ranks.objects(own))

    def _refilled(self, outputs: list[RowDict], keep: torch.Tensor) -> tuple[RowDict, torch.Tensor]:
        """Return the rows of the first round. Groups of later rounds replace groups without contrast, as far as there
        are any. Also return the mask of the rows to train, `(B,)`. `outputs` are all rows of the first round and
        the rows with contrast of later rounds. `keep` is the mask of the rows of the first round with contrast."""
        output = merge_rows(outputs, pad_id=self.policy.tokenizer.pad_token_id)
        num_later = len(output["completion_ids"]) - len(keep)
        free = (~keep).nonzero().squeeze(1)[:num_later]
        index = torch.arange(len(keep), device=keep.device)  # for each row of the result, its index in `output`
        index[free] = len(keep) + torch.arange(len(free), device=keep.device)
        output = select_rows(output, index)
        tokens = self.policy.ranks.gather(loss_mask(output).sum().unsqueeze(0)).sum().item()
        output["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], tokens)
        return output, keep.index_fill(0, free, True)

    def _joined(self, found: list[Streams]) -> Streams:
        """Return the streams of all rounds. Branches from groups that were removed are trained anyway. If the weight
        of a stream differs between rounds, the largest counts. `logged` stays empty, because the completions table
        already has the rows of each round."""
        joined: Streams = {}
        names = dict.fromkeys(name for streams in found for name in streams)  # in the order of their first round
        for name in names:
            parts = [streams[name] for streams in found if name in streams]
            scored = [rows for rows, _ in parts]
            weights = [weight for _, weight in parts if weight is not None]
            joined[name] = (
                ScoredRows(
                    merge_rows([part.rows for part in scored], pad_id=self.policy.tokenizer.pad_token_id),
                    torch.cat([part.real for part in scored]),
                    torch.cat([part.rewards for part in scored]),
                    torch.cat([part.success_rewards for part in scored]),
                ),
                max(weights, default=None),
            )
        return joined

    def _log(self, metrics: dict[str, float]) -> None:
        counts = dict(self.counts)
        if self.order is not None:
            metrics = {**metrics, "passes": self.order.passes}
        for name, value in {**metrics, **counts}.items():
            self.policy.log_metric(f"selection/{name}", value)

    def _warn_of(self, missing: int, rounds: int) -> None:
        if not missing or self._warned or not self.policy.accelerator.is_main_process:
            return
        self._warned = True
        warnings.warn(
            f"After {rounds} round(s) of sampling, {missing} group(s) of a batch still have no contrast, and train "
            f"nothing. Raise `max_sampling_rounds={self.args.max_sampling_rounds}`, use easier or harder prompts, or "
            "set `dynamic_sampling='filter'`. This warning appears once.",
            stacklevel=2,
        )


def rounds_of(policy: Policy, scorer: Scorer, data: Any, *, shuffle: bool) -> Rounds | None:
    """Return the object that chooses the prompts of batches, or None if TRL's data loader chooses them and no group is
    removed."""
    args = policy.args
    if not args.orders_prompts:
        return Rounds(policy, scorer, None) if args.dynamic_sampling == "filter" else None
    return Rounds(policy, scorer, PromptOrder(data, shuffle=shuffle, seed=args.seed))

"""Rows beside the main ones are scored by TRL in a second pass that touches nothing of the first."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from trl_explore.rewards.checks import RewardError, checked
from trl_explore.rows.advantages import combine_rewards, equal_rewards, success_rewards
from trl_explore.rows.policy import Pass, Policy
from trl_explore.rows.rollouts import Rows
from trl_explore.rows.streams import RowDict, kept_randomness
from trl_explore.rows.table import Logs, by_name, logged_rows

# A run ends when so many prompts in a row have no reward at all. Fewer may lack a readable gold answer.
MOST_UNSCORED_PROMPTS = 8


@dataclass
class ScoredRows:
    """Rows of an extra stream after TRL has scored them."""

    rows: RowDict  # what TRL's loss receives, padded to the same B on every process
    real: torch.Tensor  # mask `(B,)`: `False` on rows that only pad
    rewards: torch.Tensor  # total per real row of this process, `(B_real,)`; NaN where unscorable
    success_rewards: torch.Tensor  # decides about success, `(B_real,)`; NaN where not known
    logged: Logs = field(default_factory=dict)  # of the real rows of all processes; empty without `log_completions`


class Scorer:
    """Lets TRL score rows: rewards, advantages, log-probabilities and metrics."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rewards_per_func: torch.Tensor | None = None  # raw, of the main rows, `(N, F)`; NaN where not scored
        self.deciding: torch.Tensor | None = None  # about success, of the rows that are credited, where those are some
        self.any_example: dict[str, Any] = {}
        self._num_unscored = 0  # prompts in a row without a reward
        self._ever_scored = False  # whether any prompt of the run had a reward
        self._columns: list[str] = []  # of the data, as reward functions get them

    @property
    def names(self) -> list[str]:
        """Names of the trainer's reward functions, `[F]`. A user may replace them, so nothing is kept here."""
        return self.policy.reward_func_names

    @property
    def weights(self) -> torch.Tensor:
        """Weights of the trainer's reward functions, `(F,)`. A callback may change them during a run."""
        return self.policy.reward_weights

    def score(self, name: str, rows: Rows) -> ScoredRows | None:
        """
        Let TRL score rows that are already sampled: rewards, advantages among siblings, old and reference log-probs.

        Reward functions see each row once, and no row whose rewards are known. Every process calls it.

        Args:
            name (`str`):
                Name of the stream; what TRL logs meanwhile is logged under `name/`.
            rows ([`Rows`]):
                Rows of this process, in whole groups; may be empty.

        Returns:
            [`ScoredRows`] or `None`: `None` where no process has a row.
        """
        policy = self.policy
        num_rows = policy.ranks.most(len(rows))
        if num_rows == 0:
            return None
        padded = self._padded(rows, num_rows)
        with policy.running(Pass(name, padded)) as scoring:
            with kept_randomness(policy.accelerator.device):
                output = policy.scored(padded)
            self._log_real_rows(rows, scoring, all_rows=num_rows * policy.ranks.number)
            if policy.serving is not None:
                policy.serving.watch_correction(output)
            rewards = scoring.rewards_per_func
            assert rewards is not None
            level = self.level(rewards, group_size=rows.group_size)
            output["advantages"] = output["advantages"].masked_fill(level, 0.0)
            own = policy.ranks.own(num_rows)
            totals, deciding = self.totals(rewards)[own], self.success(rewards)[own]
            logged = logged_rows(policy, scoring.logs, rows, num_rows) if policy.log_completions else {}
        real = torch.arange(num_rows, device=totals.device) < len(rows)
        return ScoredRows(output, real, totals[: len(rows)], deciding[: len(rows)], logged)

    def judge(
        self,
        examples: list[dict[str, Any]],
        completion_ids: list[list[int]],
        *,
        completions: list[list[dict[str, Any]] | None] | None = None,
        environments: list[Any] | None = None,
        keep_metrics: bool = True,
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """
        Rewards of completions while they are being sampled; rows made of them need not be scored again.

        Every process calls it equally often, also without completions. Functions see what they see for training rows.

        Args:
            examples (`list[dict]`):
                The data-set example behind each completion, `[R]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[R][T_i]`.
            completions (`list[list[dict]]`, *optional*):
                What they say, as messages, `[R]`; by default TRL decodes the tokens.
            environments (`list`, *optional*):
                The environment after each of them, `[R]`.
            keep_metrics (`bool`, *optional*, defaults to `True`):
                Whether to log the metrics that reward functions log of them.

        Returns:
            `tuple[list[list[float]], list[dict]]`: Rewards `[R][F]`, NaN where a function returned `None`; and what
            functions logged with `log_extra`, by column, `[R]`; a `ValueError` where these are not R values.
        """
        num_rows = self.policy.ranks.most(len(completion_ids))
        if num_rows == 0:
            return [], []
        rows = Rows(
            examples=[dict(example) for example in examples],
            prompt_ids=[[self.policy.eos_token_ids[0]] for _ in completion_ids],
            completion_ids=completion_ids,
            loss_mask=[[1] * len(ids) for ids in completion_ids],
            group_size=1,
            completions=completions or [],
        )
        rows = self._padded(rows, num_rows)
        if environments is not None:
            environments = environments + [None] * (num_rows - len(environments))
        with self.policy.running(Pass(None, rows, environments, keep_metrics=keep_metrics)) as judging:
            rewards = self.policy.rewarded(rows)
        for name, values in judging.columns.items():
            if len(values) != len(completion_ids):
                raise ValueError(
                    f"`log_extra({name!r}, ...)` was given {len(values)} values for {len(completion_ids)} "
                    "completions: log one per completion, from one reward function."
                )
        extra = [{name: values[i] for name, values in judging.columns.items()} for i in range(len(completion_ids))]
        return self.policy.ranks.local(rewards)[: len(completion_ids)].tolist(), extra

    def rewards(
        self,
        ask: Callable[[list[Any]], torch.Tensor],
        reward_funcs: list[Any],
        known_rewards: list[list[float] | None] | None,
    ) -> torch.Tensor:
        """Rewards `(N, F)`, each function asked once by TRL's `ask`, only for rows not in `known_rewards` `[B][F]`."""
        funcs = [
            func if isinstance(func, torch.nn.Module) else checked(func, name)
            for func, name in zip(reward_funcs, self.names, strict=True)
        ]
        if known_rewards is None:
            return ask(funcs)
        missing = [known is None for known in known_rewards]
        rewards = ask([_only_missing(func, missing) for func in funcs])
        unknown = [0.0] * len(funcs)
        known = torch.tensor([r or unknown for r in known_rewards], dtype=rewards.dtype, device=rewards.device)
        gather = self.policy.ranks.gather
        keep = gather(torch.tensor(missing, device=rewards.device))
        return torch.where(keep.unsqueeze(1), rewards, gather(known))

    def begin_run(self, *, resumed: bool) -> None:
        """Note that a run begins. A resumed run, and one after another of the trainer, may have had rewards before."""
        self._ever_scored = self._ever_scored or resumed

    def stop_if_unscored(self, rewards: torch.Tensor, example: dict[str, Any], *, group_size: int) -> None:
        """Raise RewardError if the last [`MOST_UNSCORED_PROMPTS`] prompts have no reward in `rewards` `(N, F)` of all
        processes. TRL would go on and save a model that learned nothing."""
        if not rewards.isnan().all():
            self._num_unscored, self._ever_scored = 0, True
            return
        self._num_unscored += len(rewards) // group_size
        self._columns = sorted(example)
        if self._num_unscored >= MOST_UNSCORED_PROMPTS:
            raise self._unscored_error()

    def stop_if_never_scored(self) -> None:
        """Raise RewardError at the end of a run in which no prompt had a reward: it was too short to stop before."""
        if self._num_unscored and not self._ever_scored:
            raise self._unscored_error()

    def _unscored_error(self) -> RewardError:
        return RewardError(
            f"None of the completions of {self._num_unscored} prompt(s) in a row has a reward, so nothing can be "
            f"learned: {', '.join(self.names)} returned None or NaN for all of them. Check the columns that reward "
            f"functions read; the data has {', '.join(self._columns)}."
        )

    def level(self, rewards_per_func: torch.Tensor, *, group_size: int) -> torch.Tensor:
        """Rows of this process `(B,)` whose advantage is 0 but for rounding, by the rewards `(N, F)` it came from."""
        per_function = self.policy.args.multi_objective_aggregation == "normalize_then_sum"
        found = equal_rewards(rewards_per_func, self.weights, group_size=group_size, per_function=per_function)
        return self.policy.ranks.local(found)

    def totals(self, rewards_per_func: torch.Tensor | None = None) -> torch.Tensor:
        """Total reward of each row, `(N,)`, NaN where unscorable; of the main rows by default."""
        return combine_rewards(self._main(rewards_per_func), self.weights)

    def success(self, rewards_per_func: torch.Tensor | None = None) -> torch.Tensor:
        """The reward `(N,)` that decides whether each row succeeded, as `success_reward` says; NaN where it is not
        known. `rewards_per_func`, `(N, F)`, are the main rows' by default."""
        deciding = self.policy.args.success_reward
        return success_rewards(self._main(rewards_per_func), self.weights, self.names, deciding)

    def success_here(self) -> torch.Tensor:
        """What [`success`] is for the rows `(B,)` of this process that are credited."""
        return self.policy.ranks.local(self.success()) if self.deciding is None else self.deciding

    def were_shaped(self, shaped: torch.Tensor) -> bool:
        """Whether rewards `(N, F)` that advantages came from are others than the raw ones of the main rows."""
        return not torch.equal(self._main(None).nan_to_num(), shaped.nan_to_num())

    def show_raw(self, metrics: dict[str, list[Any]], table: Any) -> None:
        """TRL has just logged the shaped rewards it normalised; users compare `reward` across methods, so it becomes
        the raw one, in its metrics and in the columns of its table."""
        raw = self._main(None)
        total = self.totals()
        metrics["shaped_reward"].append(metrics["reward"][-1])
        metrics["reward"][-1] = total.nanmean().item()
        metrics["reward_std"][-1] = total[~total.isnan()].std().item()
        for i, name in enumerate(self.names):
            column = raw[:, i][~raw[:, i].isnan()]
            # Functions of one name share a metric, and each has added a value to it, in their order.
            place = -self.names[i:].count(name)
            metrics[f"rewards/{name}/mean"][place] = column.mean().item()
            metrics[f"rewards/{name}/std"][place] = column.std().item()
        for name, values in by_name(self.names, raw).items():
            for _ in range(min(len(raw), len(table[name]))):
                table[name].pop()
            table[name].extend(values)

    def _main(self, rewards_per_func: torch.Tensor | None) -> torch.Tensor:
        found = self.rewards_per_func if rewards_per_func is None else rewards_per_func
        assert found is not None
        return found

    def _padded(self, rows: Rows, num_rows: int) -> Rows:
        return rows.padded(
            num_rows, example=self.any_example, token_id=self.policy.eos_token_ids[0], num_rewards=len(self.names)
        )

    def _log_real_rows(self, rows: Rows, scoring: Pass, *, all_rows: int) -> None:
        """Log lengths and groups again without the rows that only pad: each has one prompt token and trains none."""
        ends = {*self.policy.eos_token_ids, self.policy.tokenizer.pad_token_id}
        own = [(sum(mask), ids[-1] in ends) for ids, mask in zip(rows.completion_ids, rows.loss_mask, strict=True)]
        real = self.policy.ranks.objects(own)
        if len(real) == all_rows:
            return
        metrics = scoring.metrics
        metrics["num_tokens"][-1] -= all_rows - len(real)
        metrics["completions/clipped_ratio"] = [sum(not ended for _, ended in real) / len(real)]
        for kind, lengths in (
            ("", [length for length, _ in real]),
            ("terminated_", [length for length, ended in real if ended] or [0]),
        ):
            metrics[f"completions/mean_{kind}length"] = [sum(lengths) / len(lengths)]
            metrics[f"completions/min_{kind}length"] = [float(min(lengths))]
            metrics[f"completions/max_{kind}length"] = [float(max(lengths))]
        args = self.policy.args
        per_group = args.multi_objective_aggregation == "sum_then_normalize" and args.scale_rewards != "batch"
        if per_group and rows.group_size > 1:  # groups of NaN count as groups with spread
            metrics["frac_reward_zero_std"][-1] *= all_rows / len(real)


def _only_missing(func: Any, missing: list[bool]) -> Any:
    """A reward function that sees only rows without rewards; the others get a placeholder."""
    if all(missing) or (isinstance(func, torch.nn.Module) and any(missing)):
        return func  # a reward model has no side effects, and its extra rows are overwritten

    def pick(value):
        return [v for v, m in zip(value, missing, strict=True) if m] if isinstance(value, list) else value

    def spread(rewards):
        found = iter(rewards)
        return [next(found) if m else 0.0 for m in missing]

    def seen_by_function(columns):
        log_extra = columns["log_extra"]  # one value per completion, also for those that are not scored again

        def log_some(column, values):
            found = iter(values)
            log_extra(column, [next(found, None) if m else None for m in missing])

        return {**{k: pick(v) for k, v in columns.items()}, "log_extra": log_some}

    def scored(**columns):
        return spread(func(**seen_by_function(columns)) if any(missing) else [])

    async def scored_async(**columns):
        return spread(await func(**seen_by_function(columns)) if any(missing) else [])

    return scored_async if is_async_callable(func) else scored

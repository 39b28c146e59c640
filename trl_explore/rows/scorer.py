"""Rows beside the main ones are scored by TRL in a second pass that touches nothing of the first."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trl_explore.rewards.checks import RewardError, checked, is_async
from trl_explore.rows.advantages import combine_rewards, equal_rewards, success_rewards
from trl_explore.rows.logged import LoggedColumns
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


@dataclass(frozen=True)
class RewardQuestion:
    """A call of the reward functions about some rows of this process."""

    functions: list[Any]  # called in place of the trainer's reward functions, `[F]`
    known_rewards: list[list[float] | None] | None  # `[B][F]`; None if no row was scored before
    missing: list[bool]  # rows that the functions are asked about, `[B]`
    logged: LoggedColumns


class Scorer:
    """Lets TRL score rows: rewards, advantages, log-probabilities and metrics."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rewards_per_func: torch.Tensor | None = None  # raw, of the main rows, `(N, F)`; NaN where not scored
        self.any_example: dict[str, Any] = {}
        self._num_unscored = 0  # prompts in a row without a reward
        self._ever_scored = False  # whether any prompt of the run had a reward
        self._columns: list[str] = []  # of the data, as reward functions get them
        self._warned_of_columns = False

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
        prompt_ids: list[list[int]],
        completions: list[list[dict[str, Any]] | None] | None = None,
        environments: list[Any] | None = None,
        keep_metrics: bool = True,
    ) -> tuple[list[list[float]], list[dict[str, Any]]]:
        """
        Compute rewards of completions while they are being sampled; rows made of them need not be scored again.

        Every process calls it equally often, also without completions. Reward functions see what they see of training
        rows, in copies: what they change there changes neither `examples` nor `completions`.

        Args:
            examples (`list[dict]`):
                The data-set example of each completion, `[R]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[R][T_i]`.
            prompt_ids (`list[list[int]]`):
                Tokens of the prompts as TRL encoded them, `[R][P_i]`: TRL parses a completion with its prompt.
            completions (`list[list[dict]]`, *optional*):
                Messages of the completions, `[R]`; by default TRL makes them of the tokens.
            environments (`list`, *optional*):
                The environment of each completion, after it, `[R]`.
            keep_metrics (`bool`, *optional*, defaults to `True`):
                Whether to log the metrics that reward functions log of these completions.

        Returns:
            `tuple[list[list[float]], list[dict]]`: Rewards `[R][F]`, NaN where a function returned `None`; and what
            functions logged with `log_extra`, by column, `[R]`.
        """
        num_rows = self.policy.ranks.most(len(completion_ids))
        if num_rows == 0:
            return [], []
        rows = Rows(
            examples=examples,
            prompt_ids=prompt_ids,
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
        extra = [{name: values[i] for name, values in judging.columns.items()} for i in range(len(completion_ids))]
        return self.policy.ranks.local(rewards)[: len(completion_ids)].tolist(), extra

    def question(
        self,
        reward_funcs: list[Any],
        known_rewards: list[list[float] | None] | None,
        known_extra: Sequence[Mapping[str, Any]] = (),
        *,
        num_rows: int,
    ) -> RewardQuestion:
        """
        Prepare a call of the reward functions about the rows whose rewards are not known.

        Args:
            reward_funcs (`list`):
                The reward functions, `[F]`.
            known_rewards (`list`, *optional*):
                Rewards `[B][F]`; None for a row that the functions are asked about. None if they are asked about all.
            known_extra (`Sequence[Mapping]`, *optional*):
                What the functions logged with the known rewards, by column, `[B]`.
            num_rows (`int`):
                Rows of this process.

        Returns:
            [`RewardQuestion`]: Call its `functions` in place of `reward_funcs`, and pass the rewards to [`answered`].
        """
        missing = [known is None for known in known_rewards or [None] * num_rows]
        logged = LoggedColumns(missing, known_extra)
        functions = []
        for number, (func, name) in enumerate(zip(reward_funcs, self.names, strict=True)):
            # TRL asks a reward model about all rows if it asks at all: a model has no side effects, and the rewards
            # of known rows are replaced.
            is_model = isinstance(func, torch.nn.Module)
            if not is_model or not any(missing):
                func = _only_missing(func if is_model else checked(func, name), missing, logged.log_of(number))
            functions.append(func)
        return RewardQuestion(functions, known_rewards, missing, logged)

    def answered(self, question: RewardQuestion, rewards: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """
        Return the rewards of all rows, and what was logged with `log_extra`.

        Args:
            question ([`RewardQuestion`]):
                What was asked.
            rewards (`torch.Tensor`):
                The answers of its functions over all processes, `(N, F)`.

        Returns:
            `tuple[torch.Tensor, dict[str, list]]`: Rewards `(N, F)`; and one logged value per row of this process, by
            column.
        """
        columns, unplaced = question.logged.columns()
        self._warn_of_columns(unplaced, sum(question.missing))
        if question.known_rewards is None:
            return rewards, columns
        unknown = [0.0] * len(question.functions)
        known_rows = [row or unknown for row in question.known_rewards]
        known = torch.tensor(known_rows, dtype=rewards.dtype, device=rewards.device)
        gather = self.policy.ranks.gather
        keep = gather(torch.tensor(question.missing, device=rewards.device))
        return torch.where(keep.unsqueeze(1), rewards, gather(known)), columns

    def _warn_of_columns(self, unplaced: dict[str, int], num_rows: int) -> None:
        """Warn once of columns, with their number of values, that do not fit `num_rows` rows."""
        if not unplaced or self._warned_of_columns or not self.policy.args.log_completions:
            return
        self._warned_of_columns = True
        column, number = next(iter(unplaced.items()))
        warnings.warn(
            f"`log_extra({column!r}, ...)` was given {number} values for {num_rows} completions, so the completions "
            "table cannot tell which rows they belong to and leaves the column empty. Log one value per completion, "
            "None where there is none. This is said once.",
            stacklevel=2,
        )

    def begin_run(self, *, resumed: bool) -> None:
        """Record that a run begins. A resumed run counts as one that had rewards: they may be in its first part."""
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


def _only_missing(func: Any, missing: list[bool], log_extra: Callable[[str, Any], None]) -> Any:
    """Return a reward function that is asked about the rows without rewards only; other rows get a placeholder."""

    def pick(value: Any) -> Any:
        if all(missing) or not isinstance(value, list):
            return value
        return [v for v, m in zip(value, missing, strict=True) if m]

    def spread(rewards: list[Any]) -> list[Any]:
        found = iter(rewards)
        return [next(found) if m else 0.0 for m in missing]

    def seen_by_function(columns: dict[str, Any]) -> dict[str, Any]:
        return {**{name: pick(value) for name, value in columns.items()}, "log_extra": log_extra}

    def scored(**columns: Any) -> list[Any]:
        return spread(func(**seen_by_function(columns)) if any(missing) else [])

    async def scored_async(**columns: Any) -> list[Any]:
        return spread(await func(**seen_by_function(columns)) if any(missing) else [])

    return scored_async if is_async(func) else scored

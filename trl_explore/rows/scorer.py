"""Let TRL score further rows and completions in a second pass, without changing the state of the main rows."""

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

# If this many consecutive prompts have no reward at all, the run stops. A few prompts may lack a readable gold answer.
MOST_UNSCORED_PROMPTS = 8


@dataclass
class ScoredRows:
    """Rows of a stream after TRL has scored them."""

    rows: RowDict  # rows as TRL's loss receives them, padded with filler rows to the same B on every process
    real: torch.Tensor  # mask `(B,)`; False for filler rows
    rewards: torch.Tensor  # total reward of each real row of this process, `(B_real,)`; NaN if it has no reward
    success_rewards: torch.Tensor  # reward that decides about success, `(B_real,)`; NaN if it has no reward
    # Completions table of the real rows of all processes. Empty without `log_completions`.
    logged: Logs = field(default_factory=dict)


# Streams of a generation batch, by name: their rows and their weight. The weight is the factor of the stream's mean
# loss. If it is None, the loss is one mean over the stream and the main rows.
Streams = dict[str, tuple[ScoredRows, float | None]]


@dataclass(frozen=True)
class RewardCall:
    """A call of the reward functions for the rows of this process whose rewards are not known."""

    functions: list[Any]  # functions that TRL calls instead of the trainer's reward functions, `[F]`
    known_rewards: list[list[float] | None] | None  # `[B][F]`; None if no row was scored before
    missing: list[bool]  # True for rows whose rewards are not known, `[B]`
    logged: LoggedColumns  # values that the functions log with `log_extra`


class Scorer:
    """Lets TRL score rows: it computes rewards, advantages, log-probabilities and metrics."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # Raw rewards of the main rows, `(N, F)`. NaN if a row was not scored.
        self.rewards_per_func: torch.Tensor | None = None
        self.any_example: dict[str, Any] = {}  # a data-set row; it gives columns to filler rows
        self._num_unscored = 0  # number of consecutive prompts without a reward, up to now
        self._ever_scored = False  # True if any prompt of the run had a reward
        self._columns: list[str] = []  # columns of the data that reward functions get
        self._warned_of_columns = False

    @property
    def names(self) -> list[str]:
        """Names of the trainer's reward functions, `[F]`. A user may replace the functions, so read them each time."""
        return self.policy.reward_func_names

    @property
    def weights(self) -> torch.Tensor:
        """Weights of the trainer's reward functions, `(F,)`. A callback may change them during a run."""
        return self.policy.reward_weights

    def score(self, name: str, rows: Rows) -> ScoredRows | None:
        """
        Let TRL score rows that are already sampled. It computes rewards, advantages within each group of rows, and old
        and reference log-probabilities.

        Reward functions score only rows whose rewards are not known. Every process calls this method.

        Args:
            name (`str`):
                Name of the stream. TRL's metrics of these rows are logged under `name/`.
            rows ([`Rows`]):
                Rows of this process, in whole groups; may be empty.

        Returns:
            [`ScoredRows`] or `None`: The scored rows. None if no process has a row.
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
            equal = self.equal_reward_rows(rewards, group_size=rows.group_size)
            output["advantages"] = output["advantages"].masked_fill(equal, 0.0)  # rounding left tiny values
            own = policy.ranks.own(num_rows)
            totals, deciding = self.totals(rewards)[own], self.success(rewards)[own]
            logged: Logs = {}
            if policy.log_completions:
                logged = logged_rows(policy, scoring.logs, rows, num_rows)
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
        Return rewards of completions while a method still samples. Training rows made of these completions keep the
        rewards, so that no completion is scored twice.

        Every process must call it the same number of times, even without completions. Reward functions get the same
        arguments as for training rows. They get copies, so that they cannot change `examples` or `completions`.

        Args:
            examples (`list[dict]`):
                The data-set row of each completion, `[R]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[R][T_i]`.
            prompt_ids (`list[list[int]]`):
                Tokens of the prompts as TRL encoded them, `[R][P_i]`. TRL needs the prompt to parse a completion.
            completions (`list[list[dict]]`, *optional*):
                Messages of the completions, `[R]`. By default, TRL decodes them from the tokens.
            environments (`list`, *optional*):
                The environment of each completion, in its state after the completion, `[R]`.
            keep_metrics (`bool`, *optional*, defaults to `True`):
                If True, keep the metrics that reward functions log for these completions.

        Returns:
            `tuple[list[list[float]], list[dict]]`: Rewards `[R][F]`, NaN if a function returned None; and the values
            that functions logged with `log_extra`, by column, `[R]`.
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
        extra = []
        for row in range(len(completion_ids)):
            extra.append({name: values[row] for name, values in judging.columns.items()})
        return self.policy.ranks.local(rewards)[: len(completion_ids)].tolist(), extra

    def prepare_rewards(
        self,
        reward_funcs: list[Any],
        known_rewards: list[list[float] | None] | None,
        known_extra: Sequence[Mapping[str, Any]] = (),
        *,
        num_rows: int,
    ) -> RewardCall:
        """
        Prepare a call of the reward functions for the rows whose rewards are not known. Every process must call it.

        Args:
            reward_funcs (`list`):
                The reward functions, `[F]`.
            known_rewards (`list`, *optional*):
                Rewards `[B][F]`; None for a row that the functions must score. None if they must score all rows.
            known_extra (`Sequence[Mapping]`, *optional*):
                Values that the functions logged with the known rewards, by column, `[B]`.
            num_rows (`int`):
                Number of rows of this process.

        Returns:
            [`RewardCall`]: Call its `functions` instead of `reward_funcs`, and pass the rewards to [`merge_rewards`].
        """
        missing = [True] * num_rows
        if known_rewards:
            missing = [known is None for known in known_rewards]
        logged = LoggedColumns(missing, known_extra)
        calls_models = any(missing)
        if any(isinstance(func, torch.nn.Module) for func in reward_funcs):
            # A sharded reward model gathers its weights in every call, so either all processes call it or none.
            calls_models = self.policy.ranks.most(any(missing)) > 0
        functions = []
        for number, (func, name) in enumerate(zip(reward_funcs, self.names, strict=True)):
            is_model = isinstance(func, torch.nn.Module)
            if not is_model:
                func = _only_missing(checked(func, name), missing, logged.log_of(number))
            elif not calls_models:
                func = _only_missing(func, missing, logged.log_of(number))
            # Otherwise, TRL calls the reward model for all rows. A model has no side effects, and `merge_rewards`
            # replaces its rewards of known rows.
            functions.append(func)
        return RewardCall(functions, known_rewards, missing, logged)

    def merge_rewards(self, call: RewardCall, rewards: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """
        Return the rewards of all rows, and the values that were logged with `log_extra`.

        Args:
            call ([`RewardCall`]):
                The call that [`prepare_rewards`] made.
            rewards (`torch.Tensor`):
                Rewards that its functions returned, for the rows of all processes, `(N, F)`.

        Returns:
            `tuple[torch.Tensor, dict[str, list]]`: Rewards `(N, F)`; and one logged value per row of this process, by
            column.
        """
        columns, unplaced = call.logged.columns()
        self._warn_of_columns(unplaced, sum(call.missing))
        if call.known_rewards is None:
            return rewards, columns
        placeholder = [0.0] * len(call.functions)  # for missing rows; `torch.where` does not use it
        known_rows = [row or placeholder for row in call.known_rewards]
        known = torch.tensor(known_rows, dtype=rewards.dtype, device=rewards.device)
        gather = self.policy.ranks.gather
        missing = gather(torch.tensor(call.missing, device=rewards.device))
        return torch.where(missing.unsqueeze(1), rewards, gather(known)), columns

    def _warn_of_columns(self, unplaced: dict[str, int], num_rows: int) -> None:
        """Warn once if columns have a number of values that does not fit `num_rows` rows. `unplaced` holds these
        numbers, by column."""
        if not unplaced or self._warned_of_columns or not self.policy.args.log_completions:
            return
        self._warned_of_columns = True
        column, number = next(iter(unplaced.items()))
        warnings.warn(
            f"`log_extra({column!r}, ...)` was given {number} values for {num_rows} completions, so the completions "
            "table cannot tell which rows they belong to and leaves the column empty. Log one value per completion, "
            "None where there is none. This warning appears once.",
            stacklevel=2,
        )

    def begin_run(self, *, resumed: bool) -> None:
        """Record that a run begins. Assume that a resumed run had rewards before it was interrupted."""
        self._ever_scored = self._ever_scored or resumed

    def stop_if_unscored(self, rewards: torch.Tensor, example: dict[str, Any], *, group_size: int) -> None:
        """Raise a RewardError if the last [`MOST_UNSCORED_PROMPTS`] prompts have no reward. `rewards` are the rewards
        of the newest batch of all processes, `(N, F)`. TRL would continue, and save a model that learned nothing."""
        if not rewards.isnan().all():
            self._num_unscored, self._ever_scored = 0, True
            return
        self._num_unscored += len(rewards) // group_size
        self._columns = sorted(example)
        if self._num_unscored >= MOST_UNSCORED_PROMPTS:
            raise self._unscored_error()

    def stop_if_never_scored(self) -> None:
        """Raise RewardError if no prompt of the run had a reward. Called at the end of a run, because a short run ends
        before `stop_if_unscored` raises."""
        if self._num_unscored and not self._ever_scored:
            raise self._unscored_error()

    def _unscored_error(self) -> RewardError:
        return RewardError(
            f"None of the completions of {self._num_unscored} prompt(s) in a row has a reward, so nothing can be "
            f"learned: {', '.join(self.names)} returned None or NaN for all of them. Check the columns that reward "
            f"functions read; the data has {', '.join(self._columns)}."
        )

    def equal_reward_rows(self, rewards_per_func: torch.Tensor, *, group_size: int) -> torch.Tensor:
        """Return the mask `(B,)` of this process's rows in groups of equal rewards. Without rounding errors, their
        advantage would be 0. `rewards_per_func`, `(N, F)`, are the rewards from which the advantages were computed."""
        per_function = self.policy.args.multi_objective_aggregation == "normalize_then_sum"
        found = equal_rewards(rewards_per_func, self.weights, group_size=group_size, per_function=per_function)
        return self.policy.ranks.local(found)

    def totals(self, rewards_per_func: torch.Tensor | None = None) -> torch.Tensor:
        """Return the total reward of each row, `(N,)`. NaN if a row has no reward. `rewards_per_func`, `(N, F)`, are
        the rewards of the main rows by default."""
        return combine_rewards(self._or_main(rewards_per_func), self.weights)

    def success(self, rewards_per_func: torch.Tensor | None = None) -> torch.Tensor:
        """Return the reward of each row that decides about its success, `(N,)`: the reward that `success_reward`
        names, or the sum of all rewards. NaN if it is not known. `rewards_per_func`, `(N, F)`, are the rewards of the
        main rows by default."""
        deciding = self.policy.args.success_reward
        return success_rewards(self._or_main(rewards_per_func), self.weights, self.names, deciding)

    def were_shaped(self, shaped: torch.Tensor) -> bool:
        """Return whether the hook `shape_rewards` changed the raw rewards of the main rows into `shaped`, `(N, F)`."""
        return not torch.equal(self._or_main(None).nan_to_num(), shaped.nan_to_num())

    def show_raw(self, metrics: dict[str, list[Any]], table: Any) -> None:
        """
        Replace shaped rewards by raw rewards in TRL's metrics and in its completions table.

        TRL has just logged the shaped rewards. But users compare `reward` across methods, so it must be the raw one.
        """
        raw = self._or_main(None)
        total = self.totals()
        metrics["shaped_reward"].append(metrics["reward"][-1])
        metrics["reward"][-1] = total.nanmean().item()
        metrics["reward_std"][-1] = total[~total.isnan()].std().item()
        for i, name in enumerate(self.names):
            column = raw[:, i][~raw[:, i].isnan()]
            # Functions with the same name append to the same metric, in their order. So count from the end.
            from_end = self.names[i:].count(name)
            metrics[f"rewards/{name}/mean"][-from_end] = column.mean().item()
            metrics[f"rewards/{name}/std"][-from_end] = column.std().item()
        # The newest rows of the table are the main rows of this batch.
        for name, values in by_name(self.names, raw).items():
            for _ in range(min(len(raw), len(table[name]))):  # TRL's columns are deques, which have no slices
                table[name].pop()
            table[name].extend(values)

    def _or_main(self, rewards_per_func: torch.Tensor | None) -> torch.Tensor:
        """Return `rewards_per_func`, or the raw rewards of the main rows if it is None."""
        found = self.rewards_per_func if rewards_per_func is None else rewards_per_func
        assert found is not None
        return found

    def _padded(self, rows: Rows, num_rows: int) -> Rows:
        """Return copies of the rows, with filler rows up to `num_rows`."""
        return rows.padded(
            num_rows, example=self.any_example, token_id=self.policy.eos_token_ids[0], num_rewards=len(self.names)
        )

    def _log_real_rows(self, rows: Rows, scoring: Pass, *, all_rows: int) -> None:
        """Correct TRL's metrics of lengths and groups, which also count filler rows. A filler row has one prompt
        token, and no token of it is trained."""
        ends = {*self.policy.eos_token_ids, self.policy.tokenizer.pad_token_id}
        own = []  # length of each row of this process, and whether it ended by itself
        for ids, mask in zip(rows.completion_ids, rows.loss_mask, strict=True):
            own.append((sum(mask), ids[-1] in ends))
        real = self.policy.ranks.objects(own)
        if len(real) == all_rows:
            return
        metrics = scoring.metrics
        metrics["num_tokens"][-1] -= all_rows - len(real)
        all_lengths = [length for length, _ in real]
        ended_lengths = [length for length, ended in real if ended]
        metrics["completions/clipped_ratio"] = [(len(real) - len(ended_lengths)) / len(real)]
        ended_lengths = ended_lengths or [0]
        for kind, lengths in (("", all_lengths), ("terminated_", ended_lengths)):
            metrics[f"completions/mean_{kind}length"] = [sum(lengths) / len(lengths)]
            metrics[f"completions/min_{kind}length"] = [float(min(lengths))]
            metrics[f"completions/max_{kind}length"] = [float(max(lengths))]
        args = self.policy.args
        per_group = args.multi_objective_aggregation == "sum_then_normalize" and args.scale_rewards != "batch"
        if per_group and rows.group_size > 1:
            # The standard deviation of a filler group is NaN. TRL counts the group in the divisor, but not as a group
            # with deviation 0. So divide by the number of real rows instead.
            metrics["frac_reward_zero_std"][-1] *= all_rows / len(real)


def _only_missing(func: Any, missing: list[bool], log_extra: Callable[[str, Any], None]) -> Any:
    """
    Return a reward function that calls `func` only for the rows that are True in `missing`.

    It returns a reward for every row, and 0 for the other rows. If no row is missing, it does not call `func`.
    """

    def only_missing(columns: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `func`: lists without the entries of known rows, and `log_extra`. Arguments that are
        no lists stay unchanged."""
        arguments: dict[str, Any] = {}
        for name, value in columns.items():
            if isinstance(value, list) and not all(missing):
                value = [entry for entry, is_missing in zip(value, missing, strict=True) if is_missing]
            arguments[name] = value
        arguments["log_extra"] = log_extra
        return arguments

    def of_all_rows(rewards: list[Any]) -> list[Any]:
        """Return the rewards of missing rows at their places, and 0 elsewhere."""
        remaining = iter(rewards)
        found = []
        for is_missing in missing:
            found.append(next(remaining) if is_missing else 0.0)
        return found

    def scored(**columns: Any) -> list[Any]:
        rewards = func(**only_missing(columns)) if any(missing) else []
        return of_all_rows(rewards)

    async def scored_async(**columns: Any) -> list[Any]:
        rewards = await func(**only_missing(columns)) if any(missing) else []
        return of_all_rows(rewards)

    if is_async(func):
        return scored_async
    return scored

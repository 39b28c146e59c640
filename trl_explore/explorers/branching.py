"""Let a branch explorer continue GRPO's completions of a generation batch, and credit its rows."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trl_explore.explorers.branch_checks import checked_branches
from trl_explore.explorers.branch_explorer import BranchExplorer, ScoredGroup, SearchResult
from trl_explore.rewards.success import failed
from trl_explore.rows.advantages import is_credit
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout
from trl_explore.rows.scorer import Scorer, Streams
from trl_explore.rows.streams import RowDict, row_tokens
from trl_explore.selection.choice import PromptChoice


class Branching:
    """
    Lets a branch explorer explore the chosen prompts of each generation batch. The explorer may pass prompts on to
    other explorers (see `BranchExplorer.assign`).

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        explorer ([`~trl_explore.explorers.branch_explorer.BranchExplorer`]):
            Samples branches.
        choice ([`~trl_explore.selection.choice.PromptChoice`], *optional*):
            Chooses the prompts to explore. None: all prompts are explored.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Scores the rows.
    """

    def __init__(self, policy: Policy, explorer: BranchExplorer, choice: PromptChoice | None, scorer: Scorer) -> None:
        self.policy, self.explorer, self.choice, self.scorer = policy, explorer, choice, scorer
        self.results: list[SearchResult] = []  # results of the current round, one for each explorer
        self._num_rounds = 0  # rounds of sampling in the current generation batch
        self._explorers: dict[str, BranchExplorer] = {}  # explorers of all its rounds, by the names of their streams
        self._num_fillers = 0  # number of this process's fillers in the current round, which are its last groups

    def begin_batch(self) -> None:
        """Begin a generation batch. Called before its first round of sampling."""
        self._num_rounds, self._explorers = 0, {}
        self.explorer.begin_batch()

    def begin(self, num_fillers: int = 0) -> None:
        """Begin a round of sampling. The last `num_fillers` prompts of this process are fillers (see [`Rounds`])."""
        self.results = []
        self._num_rounds += 1
        self._num_fillers = num_fillers

    def end_batch(self, streams: Streams) -> Streams:
        """End a generation batch. Return its streams. After several rounds, the streams of branches get new weights,
        because a weight may depend on the prompts of all rounds."""
        self.explorer.end_batch()
        if self._num_rounds == 1:
            return streams
        weighted = dict(streams)
        for name, explorer in self._explorers.items():
            if name in streams:
                scored, _ = streams[name]
                weighted[name] = scored, self.explorer.weight_of(explorer)
        return weighted

    def search(
        self,
        output: RowDict,
        *,
        examples: list[dict[str, Any]],
        completion_ids: list[list[int]],
        rollout: Rollout | None,
    ) -> None:
        """
        Sample, score and credit the branches of a generation batch.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them, B rows.
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            completion_ids (`list[list[int]]`):
                Tokens of the main rows, `[B][T_i]`.
            rollout ([`Rollout`], *optional*):
                The result of sampling, with the log-probabilities that the sampler reported.
        """
        if not self.explorer.is_active:
            return
        logprobs = None if rollout is None else rollout.logprobs
        # transformers reports no log-probabilities of sampled tokens. If TRL computed the old ones, use those.
        if logprobs is None and self.explorer.needs_logprobs and "old_per_token_logps" in output:
            logprobs = []
            for row, ids in zip(output["old_per_token_logps"].tolist(), completion_ids, strict=True):
                logprobs.append(row[: len(ids)])
        self.explorer.forks.begin_search(examples, row_tokens(output)[0], completion_ids, logprobs)
        main_lengths = [len(ids) for ids in completion_ids]
        for explorer, groups in self.explorer.assign(self._groups(output), output):
            self.results.append(self._explored(explorer, groups, main_lengths))
            self._explorers[explorer.stream] = explorer
        self.explorer.forks.end_search()
        self.explorer.end_search(self.results)

    def _explored(
        self, explorer: BranchExplorer, groups: Sequence[ScoredGroup], main_lengths: list[int]
    ) -> SearchResult:
        """Let an explorer explore groups. Score its rows, and set their advantages."""
        num_before = explorer.forks.sample.tokens.own  # tokens sampled on this process since the run began
        branches = checked_branches(
            explorer.name, explorer.explore(groups), main_lengths=main_lengths, num_rewards=len(self.scorer.names)
        )
        num_tokens = explorer.forks.sample.tokens.own - num_before
        scored = self.scorer.score(explorer.stream, branches.rows)
        # If the explorer returned advantages on any process, all processes must take part in crediting.
        if scored is not None and self.policy.ranks.most(branches.advantages is not None):
            self._credit_branches(scored.rows, branches.advantages or [])
        explorer.after_scoring(branches, scored)
        return SearchResult(explorer, branches, scored, num_prompts=len(groups), num_tokens=num_tokens)

    def _groups(self, output: RowDict) -> list[ScoredGroup]:
        """Return this process's prompts to explore."""
        ranks, size = self.policy.ranks, self.policy.args.num_generations
        deciding = self.scorer.success()
        explored = torch.ones_like(deciding, dtype=torch.bool)
        if self.choice is not None:
            explored = self.choice.mask(deciding)
        is_explored = ranks.local(explored).tolist()
        rewards = ranks.local(self.scorer.totals()).tolist()
        of_success = ranks.local(deciding).tolist()
        failures = failed(ranks.local(deciding), threshold=self.policy.args.resolved_success_threshold).tolist()
        is_trained = output["completion_mask"].any(dim=1).tolist()
        # With `splits_groups`, the first and the last group may be partly on other processes.
        num_rows = len(is_explored)
        first_row = ranks.index * num_rows  # among the rows of all processes
        starts = [row for row in range(num_rows) if row == 0 or (first_row + row) % size == 0]
        first_filler = num_rows - self._num_fillers * size
        groups = []
        for start, end in itertools.pairwise([*starts, num_rows]):
            if is_explored[start]:
                rows = slice(start, end)
                trajectories = self.explorer.forks.trajectories[rows]
                groups.append(
                    ScoredGroup(
                        trajectories,
                        rewards[rows],
                        of_success[rows],
                        failures[rows],
                        is_trained[rows],
                        is_filler=start >= first_filler,
                    )
                )
        return groups

    def _credit_branches(self, rows: RowDict, advantages: Sequence[float | list[float]]) -> None:
        """Replace the advantages of the first rows of `rows` by `advantages`. The filler rows after them keep theirs,
        which does not matter, because filler rows are never trained."""
        if self._per_token(advantages):
            num_tokens = rows["completion_ids"].shape[1]
            rows["advantages"] = rows["advantages"].unsqueeze(1).repeat(1, num_tokens)  # (R, T)
        _fill(rows["advantages"], dict(enumerate(advantages)))

    def credit(self, advantages: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """
        Return the advantages of the main rows: the explorer's for rows whose credit it changes, else GRPO's.

        Args:
            advantages (`torch.Tensor`):
                Advantages of GRPO, `(B,)`, or of an explorer, `(B,)` or `(B, T)`.
            num_tokens (`int`):
                Number of tokens of the padded completions (T).

        Returns:
            `torch.Tensor`: Advantages of shape `(B,)` or `(B, T)`.
        """
        if not self.results:
            return advantages
        changed: dict[int, float | list[float]] = {}
        for result in self.results:
            changed |= result.branches.main_advantages
        if self._per_token(list(changed.values())) and advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).repeat(1, num_tokens)
        else:
            advantages = advantages.clone()
        _fill(advantages, changed)
        return advantages

    def credited(self, trained: torch.Tensor) -> torch.Tensor:
        """Return the mask `(B,)` of this process's main rows to which an explorer gave an advantage other than 0.
        `trained`, `(B,)`, is False for rows that TRL masks, which do not count."""
        mask = torch.zeros_like(trained)
        for result in self.results:
            for row, value in result.branches.main_advantages.items():
                mask[row] = is_credit(value)
        return mask & trained

    def streams(self) -> Streams:
        """Return the streams of the branches with their weights. Empty if there are no branches."""
        streams: Streams = {}
        for result in self.results:
            if result.scored is not None:
                streams[result.explorer.stream] = result.scored, self.explorer.weight_of(result.explorer)
        return streams

    def _per_token(self, advantages: Sequence[float | list[float]]) -> bool:
        """Return whether any process has an advantage for each token. If so, all processes must have them."""
        return self.policy.ranks.most(any(isinstance(value, list) for value in advantages)) > 0


def _fill(advantages: torch.Tensor, values: Mapping[int, float | list[float]]) -> None:
    """Write values into rows of `advantages`, `(B,)` or `(B, T)`."""
    for row, value in values.items():
        if isinstance(value, list):
            advantages[row, : len(value)] = torch.tensor(value, device=advantages.device)
        else:
            advantages[row] = value

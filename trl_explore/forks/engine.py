"""Sampling of branches, for all methods that continue GRPO's completions from a fork."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_explore.forks.trajectories import Branch, Fork, Trajectory, suffix_mask
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Continuation, Rows
from trl_explore.rows.scorer import Scorer
from trl_explore.sampling.sampler import Sampler

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig


class Forks:
    """
    Samples branches of the completions of a generation batch, scores them, and makes training rows of them.

    This class is for completions of a single turn. [`~trl_explore.agents.forks.AgentForks`] also continues with tools.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        sample ([`~trl_explore.sampling.sampler.Sampler`]):
            Samples continuations of token prefixes.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Asks the reward functions.
    """

    is_agent = False  # True: completions have several turns, and branches have environments

    def __init__(self, policy: Policy, sample: Sampler, scorer: Scorer) -> None:
        self.policy, self.sample, self.scorer = policy, sample, scorer
        self.args: ExplorationConfig = policy.args
        self.trajectories: list[Trajectory] = []  # GRPO's completions, `[B]`

    def begin_search(
        self,
        examples: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        logprobs: list[list[float | None]] | None,
    ) -> None:
        """
        Store the completions of GRPO from which branches can be sampled.

        Args:
            examples (`list[dict]`):
                Rows of the data set, `[B]`.
            prompt_ids (`list[list[int]]`):
                Tokens of the prompts, `[B][P_i]`.
            completion_ids (`list[list[int]]`):
                Tokens of the completions, `[B][T_i]`.
            logprobs (`list[list[float]]`, *optional*):
                Log-probabilities that the sampler reported, `[B][T_i]`.
        """
        self.trajectories = []
        for row, ids in enumerate(completion_ids):
            self.trajectories.append(
                Trajectory(
                    row=row,
                    example=examples[row],
                    prompt_ids=prompt_ids[row],
                    completion_ids=ids,
                    loss_mask=[1] * len(ids),
                    logprobs=None if logprobs is None else logprobs[row],
                )
            )

    def end_search(self) -> None:
        """Called after the branches of a round of sampling are sampled and scored. Every process calls it."""

    def has_failed(self, row: int) -> bool:
        """Return whether the environment of a main row raised an exception. Completions of a single turn have no
        environment."""
        return False

    def longest_completion(self) -> int:
        """Return the maximum number of tokens of a branch with its prefix: `max_completion_length`, or else the length
        of the longest main row of this process."""
        limit = self.args.max_completion_length
        return limit or max(len(trajectory.completion_ids) for trajectory in self.trajectories)

    # ------------------------------------------------------------------------------------------------ sample and score

    def sample_branches(self, forks: Sequence[Fork]) -> list[Branch]:
        """
        Sample branches from all forks in one call.

        Every process must call it the same number of times, even without forks.

        Args:
            forks (`Sequence[Fork]`):
                Places in completions, with the number of branches at each.

        Returns:
            `list[Branch]`: The branches, in the order of the forks.
        """
        prefixes, budgets = [], []
        longest = self.longest_completion()
        for fork in forks:
            if not isinstance(fork, Fork):
                raise TypeError(f"`sample_branches` got {fork!r}: give a list of `Fork`.")
            fork.check()
            start = fork.prefix_length
            prefixes.append(fork.origin.prompt_ids + fork.origin.completion_ids[:start])
            budgets.append(longest - start)
        numbers = [fork.number for fork in forks]
        begun = [fork.begun for fork in forks]
        branches = []
        with self.sample.rollout():  # later turns can reuse keys and values of earlier turns
            sampled = self.sample(prefixes, numbers, budgets, begun=begun)
            for fork, continuations in zip(forks, sampled, strict=True):
                for continuation in continuations:
                    branches.append(self.begin_branch(fork, continuation))
            self.continue_turns(branches)
        return branches

    def continue_turns(self, branches: list[Branch]) -> None:
        """Sample the turns after the first turn of each branch. Completions of a single turn have none."""

    def begin_branch(self, fork: Fork, continuation: Continuation) -> Branch:
        """Return the branch that continues a fork with the sampled tokens."""
        origin, start, token_ids = fork.origin, fork.prefix_length, continuation.token_ids
        logprobs: list[float | None] | None = None
        if continuation.logprobs is not None:
            # A completion from a checkpoint has no log-probabilities. Its prefix is not trained, so 0 has no effect.
            prefix_logprobs: list[float | None] = [0.0] * start
            if origin.logprobs is not None:
                prefix_logprobs = origin.logprobs[:start]
            logprobs = [*prefix_logprobs, *continuation.logprobs]
        return Branch(
            origin=origin,
            turn=fork.turn,
            start=start,
            completion_ids=origin.completion_ids[:start] + token_ids,
            loss_mask=origin.loss_mask[:start] + [1] * len(token_ids),
            messages=None,
            environment=None,
            complete=token_ids[-1] in self.policy.eos_token_ids,
            num_sampled=len(token_ids),
            logprobs=logprobs,
        )

    def judge(self, branches: Sequence[Branch]) -> None:
        """Ask the reward functions about branches, and store `rewards` and `extra` in them. Every process must call it
        the same number of times."""
        rewards, logged = self.scorer.judge(
            [branch.origin.example for branch in branches],
            [branch.completion_ids for branch in branches],
            prompt_ids=[branch.origin.prompt_ids for branch in branches],
        )
        for branch, values, extra in zip(branches, rewards, logged, strict=True):
            branch.rewards, branch.extra = values, extra

    # --------------------------------------------------------------------------------------------------- training rows

    def rows(self, branches: Sequence[Branch], *, group_size: int, trains_prefixes: bool) -> Rows:
        """
        Return training rows.

        Args:
            branches (`Sequence[Branch]`):
                The branches, in groups of `group_size`. If a branch has rewards, its row gets them.
            group_size (`int`):
                Number of consecutive rows over which GRPO's advantages are computed.
            trains_prefixes (`bool`):
                True if a branch also trains the tokens that it shares with the completion from which it forks. False:
                only the tokens after the fork are trained.
        """
        loss_mask = []
        for branch in branches:
            mask = branch.loss_mask
            loss_mask.append([*mask] if trains_prefixes else suffix_mask(mask, branch.start))
        # With vLLM, TRL needs log-probabilities of all rows on all processes, also on a process without rows. vLLM
        # reports them for every branch. Without vLLM, TRL needs none.
        logprobs: list[list[float | None]] | None = None
        if self.policy.serving is not None:
            logprobs = [branch.logprobs or [] for branch in branches]
        return Rows(
            examples=[branch.origin.example for branch in branches],
            prompt_ids=[branch.origin.prompt_ids for branch in branches],
            completion_ids=[branch.completion_ids for branch in branches],
            loss_mask=loss_mask,
            group_size=group_size,
            logprobs=logprobs,
            known_rewards=[branch.rewards for branch in branches],
            extra=[branch.extra for branch in branches],
            completions=[branch.messages for branch in branches],
            parents=[branch.origin.row for branch in branches],
            shared=[branch.shared for branch in branches],
        )

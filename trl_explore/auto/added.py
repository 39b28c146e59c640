"""Branch explorers that sample whole completions and add them to GRPO's rows."""

from collections.abc import Sequence
from typing import Any

import torch

from trl_explore.credit.of_groups import group_advantages
from trl_explore.explorers.branch_explorer import Branches, BranchExplorer, ScoredGroup
from trl_explore.explorers.exploration import (
    as_rollout,
    credited_rows,
    sampled_as_grpo,
    score_missing,
    served_logprobs,
    train_all_mask,
)
from trl_explore.explorers.explorer import Explored, Explorer, PromptGroup, Sample, check_explored
from trl_explore.forks.engine import Forks
from trl_explore.forks.trajectories import Fork
from trl_explore.rows.copies import own_copy
from trl_explore.rows.policy import Policy
from trl_explore.rows.rollouts import Rollout, Rows
from trl_explore.rows.scorer import ScoredRows, Scorer


class AddedExplorer(BranchExplorer):
    """
    Adds the completions of an [`~trl_explore.explorers.explorer.Explorer`] to the training rows.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        forks ([`~trl_explore.forks.engine.Forks`]):
            Samples for all explorers of the run. It holds GRPO's completions.
        scorer ([`~trl_explore.rows.scorer.Scorer`]):
            Calls the reward functions.
        explorer ([`~trl_explore.explorers.explorer.Explorer`]):
            Samples whole completions of prompts.
    """

    def __init__(self, policy: Policy, forks: Forks, scorer: Scorer, *, explorer: Explorer) -> None:
        super().__init__(policy, forks, scorer, args=explorer.args)
        self.explorer = explorer
        self.name = explorer.name
        self._explored: list[Explored] = []

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        prompt_groups = [self._prompt_group(group) for group in groups]
        with self.forks.sample.forked_randomness():
            explored = self.explorer.explore(prompt_groups, self._plain)
            check_explored(
                self.name,
                explored,
                num_prompts=len(groups),
                size=self.args.num_generations,
                num_rewards=len(self.scorer.names),
                max_length=self.args.max_completion_length,
                columns=self.explorer.plain_columns,
            )
            origins = [group.trajectories[0] for group in groups]
            score_missing(self.scorer, [(origin.example, origin.prompt_ids) for origin in origins], explored)
        self._explored = list(explored)
        masks_tokens = any(of_prompt.loss_mask is not None for of_prompt in explored)
        found = as_rollout(self._explored, masks_tokens=masks_tokens)
        examples: list[dict[str, Any]] = []
        prompt_ids: list[list[int]] = []
        parents: list[int | None] = []
        for origin in origins:
            examples += [origin.example] * self.args.num_generations
            prompt_ids += [origin.prompt_ids] * self.args.num_generations
            parents += [origin.row] * self.args.num_generations
        rows = Rows(
            examples=examples,
            prompt_ids=prompt_ids,
            completion_ids=found.completion_ids,
            loss_mask=found.loss_mask or train_all_mask(found.completion_ids),
            group_size=self.args.num_generations,
            logprobs=served_logprobs(self.policy, found),
            known_rewards=[*(found.known_rewards or [])],
            extra=found.extra or (),
            parents=parents,
            shared=[0] * len(examples),
        )
        return Branches(rows)

    def after_scoring(self, branches: Branches, scored: ScoredRows | None) -> None:
        if scored is None:
            return
        index = torch.arange(len(branches.rows), device=scored.rows["advantages"].device)
        scored.rows["advantages"] = credited_rows(self.policy, self.explorer, self._explored, scored.rows, index)

    def state_dict(self) -> dict[str, Any]:
        return self.explorer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.explorer.load_state_dict(state)

    def forget_data(self) -> None:
        self.explorer.forget_data()

    def _prompt_group(self, group: ScoredGroup) -> PromptGroup:
        """Convert a group of GRPO's completions into the input of `self.explorer`."""
        assert self.scorer.rewards_per_func is not None
        rewards = self.policy.ranks.local(self.scorer.rewards_per_func)
        samples = []
        for trajectory in group.trajectories:
            samples.append(Sample([*trajectory.completion_ids], rewards[trajectory.main_row].tolist()))
        origin = group.trajectories[0]
        return PromptGroup(own_copy(origin.example), [*origin.prompt_ids], samples)

    def _plain(self, prompts: list[list[int]]) -> Rollout:
        """Sample one completion for each prompt, as GRPO does."""
        return sampled_as_grpo(self.policy, self.forks.sample, prompts, self.explorer.max_completion_length)


class ResampleBranches(BranchExplorer):
    """Samples another group of `num_generations` completions, or of trajectories of an agent, from the prompt."""

    name = "resample"

    def explore(self, groups: Sequence[ScoredGroup]) -> Branches:
        size = self.args.num_generations
        forks = []
        for group in groups:
            # The new trajectories start from the first state of an environment. After an error, the environment may
            # not return to that state, so use a trajectory without an error.
            usable = [own for own in group.trajectories if not self.forks.has_failed(own.main_row)]
            if usable:
                forks.append(Fork(usable[0], turn=0, number=size, start=0))
        branches = self.forks.sample_branches(forks)
        self.forks.judge(branches)
        rows = self.forks.rows(branches, group_size=size, trains_prefixes=False)
        # `unlikeliness` needs the whole batch, so these rows get GRPO's advantages instead, which TRL computes.
        if self.args.advantage in ("grpo", "unlikeliness"):
            return Branches(rows)
        rewards = torch.tensor([branch.rewards for branch in branches]).view(len(branches), len(self.scorer.names))
        totals, deciding = self.scorer.totals(rewards), self.scorer.success(rewards)
        advantages = group_advantages(self.args, totals.view(-1, size), deciding.view(-1, size))
        return Branches(rows, advantages.flatten().tolist())

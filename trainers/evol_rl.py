"""EVOL-RL: train without labels. The majority's answer counts as right, and unusual reasoning gets a larger reward."""

import math
import time
import warnings
from typing import Any

import torch

from trl_explore.label_free.embedding import make_embedder, reasoning
from trl_explore.label_free.novelty import band_rewards, novelties, shuffled_in_classes, similarities
from trl_explore.label_free.vote import majority_answer
from trl_explore.rewards.answers import answer_key, completion_text
from trl_explore.rewards.success import succeeded
from trl_explore.rows.advantages import as_columns

from .base import ExplorationTrainer, Requires
from .evol_rl_config import EvolRLConfig


class EvolRLTrainer(ExplorationTrainer):
    """
    GRPO without labels. The majority's answer counts as right, and unusual reasoning gets a larger reward.

    Method of [Evolving Language Models without Labels: Majority Drives Selection, Novelty Promotes
    Variation](https://huggingface.co/papers/2509.15194). What changes with respect to GRPO, per generation batch:

    1. The most frequent answer to a prompt counts as right. With `correctness="reward"`, the reward functions decide.
    2. Completions of a prompt form two classes, right and wrong. The novelty of a completion is one minus the mean of
       two numbers: its mean similarity to its class, and its largest similarity to any other completion. Similarity is
       the cosine of text embeddings.
    3. Right completions get a reward from 0.5 to 1, and wrong ones from -1 to -0.5. More novel completions of a class
       get larger rewards. Completions without an answer get -1. The rest is GRPO.

    The logged `reward` and all evaluation use the reward functions. With `novelty_band=0` and `correctness="reward"`,
    the parameters equal GRPO's bit for bit. Deviations from the paper (all of them are in
    `docs/methods/evol_rl.md`): only the trained rows vote, and the entropy bonus is TRL's `entropy_coef`.

    The constructor has the arguments of [`~trl.GRPOTrainer`]. `args` is an [`EvolRLConfig`] or a plain
    [`~trl.GRPOConfig`]. TRL needs a reward function. Without labels, pass `trl_explore.rewards.answered_reward`, which
    only checks whether there is an answer.

    Raises:
        ImportError: Without the extra `dense`, unless `embedding_model="ngrams"`.
    """

    method = "evol_rl"
    num_generations: int
    config_class = EvolRLConfig
    args: EvolRLConfig
    requires = Requires(whole_groups=True)
    _columns: dict[str, list[Any]] = {}  # columns of the completions table for the newest main rows
    _looked_for_votes = False  # True after the first batch

    def setup(self) -> None:
        super().setup()
        args = self.args
        if args.novelty_band > 0:
            size, device = args.embedding_batch_size, self.accelerator.device
            self.embed = make_embedder(args.embedding_model, device=device, batch_size=size)

    def shape_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        rewards_per_func = super().shape_rewards(rewards_per_func)
        args, size = self.args, self.num_generations
        if args.correctness == "reward" and args.novelty_band == 0:
            return rewards_per_func
        start = time.perf_counter()
        texts = [completion_text(completion) for completion in self.credit.completions]
        answers = [answer_key(text) for text in texts]
        deciding = self.ranks.local(self.scorer.success(rewards_per_func))  # rewards that decide about success, `(B,)`
        known, right = self._classes(answers, deciding)
        similarity = [torch.eye(0)] * (len(texts) // size)  # an empty matrix for groups without novelty
        novelty = [0.0 if has_class else math.nan for has_class in known]
        rewards: list[float] = []
        for first in range(0, len(texts), size):
            rows = [row for row in range(first, first + size) if known[row]]
            if args.novelty_band > 0 and len(rows) > 1:
                similarity[first // size] = similarities(self.embed([reasoning(texts[row]) for row in rows]))
                is_right = [right[row] for row in rows]
                scores = novelties(similarity[first // size], is_right)
                if args.novelty_scores == "shuffled":
                    scores = shuffled_in_classes(scores, is_right, generator=self.exploration_generator)
                for row, score in zip(rows, scores, strict=True):
                    novelty[row] = score
            group_novelty = novelty[first : first + size]
            if len(rows) < 2:
                # A single answer is no majority. With NaN, `band_rewards` gives every row the reward -1.
                group_novelty = [math.nan] * size
            rewards += band_rewards(group_novelty, right[first : first + size], width=args.novelty_band)
        if args.correctness == "reward":
            # A row without a reward stays without one, so it does not count in GRPO's means.
            rewards = [reward if has_class else math.nan for has_class, reward in zip(known, rewards, strict=True)]
        self._columns = {
            "answer": ["" if answer is None else str(answer) for answer in answers],
            "novelty": novelty,
            "shaped_reward": rewards,
        }
        self._log(known, right, deciding.tolist(), similarity, time.perf_counter() - start)
        totals = self.ranks.gather(deciding.new_tensor(rewards))
        return as_columns(totals, rewards_per_func, self.reward_weights)

    def _classes(self, answers: list[Any], deciding: torch.Tensor) -> tuple[list[bool], list[bool]]:
        """Return which rows have a class, and which rows are right, `[B]` each. A row has a class if it has an answer,
        or with `correctness="reward"`, if it has a reward."""
        size = self.num_generations
        if self.args.correctness == "reward":
            return (~deciding.isnan()).tolist(), succeeded(deciding, threshold=self.args.success_threshold).tolist()
        known, right = [], []
        for first in range(0, len(answers), size):
            group_answers = answers[first : first + size]
            majority = majority_answer(group_answers)
            num_answers = sum(answer is not None for answer in group_answers)
            for answer in group_answers:
                known.append(answer is not None)
                # A single answer is no majority.
                right.append(num_answers > 1 and answer is not None and answer == majority)
        return known, right

    def _log(
        self,
        known: list[bool],
        right: list[bool],
        deciding: list[float],
        similarity: list[torch.Tensor],
        seconds: float,
    ) -> None:
        """Log metrics of votes and novelty over all processes. `known` and `right` are the result of `_classes`.
        `similarity` has one matrix per group."""
        size = self.num_generations
        judged = []  # rewards of the rows that count as right
        for value, is_right in zip(deciding, right, strict=True):
            if is_right and not math.isnan(value):
                judged.append(value)
        num_votes = 0  # groups with at least two answers
        for first in range(0, len(known), size):
            num_votes += sum(known[first : first + size]) > 1
        # Similarities above the diagonal, so that each pair counts once.
        pairs = [matrix[torch.ones_like(matrix).triu(1).bool()] for matrix in similarity]
        total = self.ranks.summed(
            {
                "rows": len(known),
                "known": sum(known),
                "votes": num_votes,
                "right": sum(right),
                "judged": len(judged),
                "reward": sum(judged),
                "pairs": sum(map(len, pairs)),
                "similarity": sum(float(own.sum()) for own in pairs),
            }
        )
        self._warn_without_votes(
            num_rows=int(total["rows"]), num_answered=int(total["known"]), num_votes=int(total["votes"])
        )
        self.log_metric("votes/answered_fraction", total["known"] / total["rows"])
        self.log_metric("votes/right_fraction", total["right"] / total["rows"])
        if total["judged"]:
            self.log_metric("votes/right_reward", total["reward"] / total["judged"])
        if total["pairs"]:
            self.log_metric("novelty/mean_similarity", total["similarity"] / total["pairs"])
        self.log_metric("novelty/seconds", seconds)

    def _warn_without_votes(self, *, num_rows: int, num_answered: int, num_votes: int) -> None:
        """Warn if no prompt of the first batch has two answers. Without a majority, all rewards are -1, and nothing is
        trained."""
        if self._looked_for_votes or self.args.correctness != "majority":
            return
        self._looked_for_votes = True
        if num_votes == 0 and self.accelerator.is_main_process:
            warnings.warn(
                f"An answer was found in {num_answered} of the {num_rows} completions of the first batch, and no "
                "prompt has two answers. Without a majority every completion gets the reward -1, and nothing is "
                "trained. An answer is a completion that is one number, or what stands in `\\boxed{...}` or after "
                "`#### `. Ask for one of these in the prompts, or set `correctness='reward'`, with which the reward "
                "functions decide what is right.",
                stacklevel=2,
            )

    def completion_columns(self) -> dict[str, list[Any]]:
        return {**super().completion_columns(), **self._columns}

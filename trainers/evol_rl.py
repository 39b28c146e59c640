"""EVOL-RL: the majority's answer stands for right, and unusual reasoning is worth more."""

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
    GRPO without labels: the majority's answer is right, and rows that reason unusually get more.

    Method of [Evolving Language Models without Labels: Majority Drives Selection, Novelty Promotes
    Variation](https://huggingface.co/papers/2509.15194). What changes with respect to GRPO, per generation batch:

    1. The answer that most completions of a prompt give counts as right (or the reward functions decide, with
       `correctness="reward"`).
    2. The novelty of a completion is one minus its mean similarity to its class, right or wrong, and its largest
       similarity to any other, half each; similarity is the cosine of text embeddings.
    3. Right completions get a reward from 0.5 to 1, wrong ones from -1 to -0.5, the more novel of their class the
       higher, and completions without an answer -1. The rest is GRPO.

    The logged `reward` and all evaluation stay those of the reward functions. `novelty_band=0` with
    `correctness="reward"` gives GRPO's parameters bit for bit. Deviations from the paper (all of them in
    `docs/methods/evol_rl.md`): the votes are those of the trained rows, and the entropy bonus is TRL's `entropy_coef`.

    The constructor takes what [`~trl.GRPOTrainer`] takes; `args` is an [`EvolRLConfig`] or a plain
    [`~trl.GRPOConfig`]. TRL needs a reward function: without labels, `trl_explore.rewards.answered_reward` only says
    whether there is an answer.

    Raises:
        ImportError: Without the extra `dense`, unless `embedding_model="ngrams"`.
    """

    method = "evol_rl"
    num_generations: int
    config_class = EvolRLConfig
    requires = Requires(whole_groups=True)
    _columns: dict[str, list[Any]] = {}
    _looked_for_votes = False

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
        deciding = self.ranks.local(self.scorer.success(rewards_per_func))
        known, right = self._classes(answers, deciding)
        similarity = [torch.eye(0)] * (len(texts) // size)
        novelty = [0.0 if own else math.nan for own in known]
        rewards: list[float] = []
        for g in range(0, len(texts), size):
            rows = [row for row in range(g, g + size) if known[row]]
            if args.novelty_band > 0 and len(rows) > 1:
                similarity[g // size] = similarities(self.embed([reasoning(texts[row]) for row in rows]))
                of_class = [right[row] for row in rows]
                found = novelties(similarity[g // size], of_class)
                if args.novelty_scores == "shuffled":
                    found = shuffled_in_classes(found, of_class, generator=self.exploration_generator)
                for row, value in zip(rows, found, strict=True):
                    novelty[row] = value
            group = novelty[g : g + size] if len(rows) > 1 else [math.nan] * size
            rewards += band_rewards(group, right[g : g + size], width=args.novelty_band)
        if args.correctness == "reward":
            rewards = [reward if k else math.nan for k, reward in zip(known, rewards, strict=True)]
        self._columns = {
            "answer": ["" if answer is None else str(answer) for answer in answers],
            "novelty": novelty,
            "shaped_reward": rewards,
        }
        self._log(known, right, deciding.tolist(), similarity, time.perf_counter() - start)
        totals = self.ranks.gather(deciding.new_tensor(rewards))
        return as_columns(totals, rewards_per_func, self.reward_weights)

    def _classes(self, answers: list[Any], deciding: torch.Tensor) -> tuple[list[bool], list[bool]]:
        """Which rows take part, and which of them are right, `[B]`."""
        size = self.num_generations
        if self.args.correctness == "reward":
            return (~deciding.isnan()).tolist(), succeeded(deciding, threshold=self.args.success_threshold).tolist()
        groups = [answers[g : g + size] for g in range(0, len(answers), size)]
        voted = [answer is not None and answer == majority_answer(group) for group in groups for answer in group]
        return [answer is not None for answer in answers], voted

    def _log(
        self,
        known: list[bool],
        right: list[bool],
        deciding: list[float],
        similarity: list[torch.Tensor],
        seconds: float,
    ) -> None:
        size = self.num_generations
        judged = [value for value, own in zip(deciding, right, strict=True) if own and not math.isnan(value)]
        pairs = [matrix[torch.ones_like(matrix).triu(1).bool()] for matrix in similarity]
        total = self.ranks.summed(
            {
                "rows": len(known),
                "known": sum(known),
                "votes": sum(sum(known[g : g + size]) > 1 for g in range(0, len(known), size)),
                "right": sum(right),
                "judged": len(judged),
                "reward": sum(judged),
                "pairs": sum(map(len, pairs)),
                "similarity": sum(float(own.sum()) for own in pairs),
            }
        )
        counts = {"num_rows": total["rows"], "num_answered": total["known"], "num_votes": total["votes"]}
        self._warn_without_votes(**{name: int(count) for name, count in counts.items()})
        self.log_metric("votes/answered_fraction", total["known"] / total["rows"])
        self.log_metric("votes/right_fraction", total["right"] / total["rows"])
        if total["judged"]:
            self.log_metric("votes/right_reward", total["reward"] / total["judged"])
        if total["pairs"]:
            self.log_metric("novelty/mean_similarity", total["similarity"] / total["pairs"])
        self.log_metric("novelty/seconds", seconds)

    def _warn_without_votes(self, *, num_rows: int, num_answered: int, num_votes: int) -> None:
        """Warn if no prompt of the first batch has a majority: then every reward is -1, and nothing is trained."""
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

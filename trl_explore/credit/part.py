"""Advantages of the main rows, by the fields `advantage`, `count_bonus`, `clip_cov` and `kl_cov`."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trl_explore.credit.bonus import centred, novelty, repetition
from trl_explore.credit.covariance import covariances, num_largest, share_of, with_penalty
from trl_explore.credit.functions import AdvantageBatch, advantage_parts, call
from trl_explore.credit.normalised import equal_groups, normalised
from trl_explore.credit.of_groups import built_in
from trl_explore.credit.unlikeliness import discounted
from trl_explore.rewards.answers import answer_key, completion_text
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict, kept_randomness, loss_mask, row_tokens
from trl_explore.sampling.sampler import without_dropout


class Credit:
    """Computes the advantages of the main rows. Rows of streams, which are trained in addition to the main rows, keep
    GRPO's advantages."""

    def __init__(self, policy: Policy, scorer: Scorer) -> None:
        self.policy, self.scorer = policy, scorer
        # Completions of this process's main rows, in the form that reward functions get, `[B]`.
        self.completions: list[Any] = []
        self.counts: dict[str, Counter[str]] = {}  # numbers of answers by prompt, over all processes
        # Tokens of completions, `(B, T)`, and their log-probabilities `(B, T)` under the policy that sampled them.
        self._logprobs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._looked_for_answers = False
        self._in_loss: tuple[RowDict, float] | None = None  # micro-batch whose loss is being computed, and its scale

    def assigned(
        self, output: RowDict, rewards_per_func: torch.Tensor, examples: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """
        Return the advantages of the main rows, `(B,)`, or `(B, T)` if a function of the user returns one per token.
        Every process calls this method.

        Args:
            output (`dict`):
                The main rows of this process as TRL scored them.
            rewards_per_func (`torch.Tensor`):
                Rewards of all processes, `(N, F)` for N rows: P prompts with G rows each. They are shaped if the
                method shapes rewards. NaN for rows that `trained_generations` leaves out.
            examples (`Sequence[dict]`):
                Rows of the data set, `[B]`.

        Raises:
            ValueError: If a function of the user returns a wrong shape, or a number that is not finite.
        """
        args, advantages = self.policy.args, output["advantages"]
        if args.advantage == "grpo" and not args.count_bonus and not args.trains_some:
            return advantages
        rewards = self.scorer.totals(rewards_per_func).view(-1, args.num_generations)  # (P, G)
        if args.trains_some:
            # TRL compared all rows of a group. Compare only the trained rows. The rewards of all other rows are NaN.
            own = normalised(rewards, scale=args.scale_rewards).masked_fill(equal_groups(rewards), 0.0)
            advantages = output["advantages"] = self.policy.ranks.local(own.flatten())
        if args.advantage != "grpo":
            advantages = self._weighted_sum(output, rewards, rewards_per_func, examples)
        if args.count_bonus:
            bonus = self.policy.ranks.local(self._bonus(output, self._all_totals(rewards)).flatten())
            advantages = _sum(advantages, args.count_bonus * bonus)
        if args.trains_some:
            untrained = self.policy.ranks.local(rewards.isnan().flatten())
            if advantages.dim() == 2:
                untrained = untrained.unsqueeze(1)
            advantages = advantages.masked_fill(untrained, 0.0)
        return advantages

    def _all_totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the total rewards `(P, G)` of all sampled rows, including rows that are not trained."""
        if not self.policy.args.trains_some:
            return rewards
        return self.scorer.totals().view(rewards.shape)

    def _weighted_sum(
        self,
        output: RowDict,
        rewards: torch.Tensor,
        rewards_per_func: torch.Tensor,
        examples: Sequence[Mapping[str, Any]],
    ) -> torch.Tensor:
        """Return the weighted sum of the parts of `advantage`, `(B,)` or `(B, T)`. `rewards` are the total rewards of
        all processes, `(P, G)`."""
        args, ranks = self.policy.args, self.policy.ranks
        deciding = self.scorer.success().view(rewards.shape).masked_fill(rewards.isnan(), torch.nan)
        # Rows of this process that have a reward and are trained, `(B,)`, and their trained tokens, `(B, T)`.
        compared = ranks.local(~rewards.isnan().flatten())
        mask = loss_mask(output) * compared.unsqueeze(1)
        grpo = ranks.gather(output["advantages"]).view(rewards.shape)
        parts = advantage_parts(args)
        names = _distinct([part.name for part in parts])
        logs_parts = any(part.function is not None for part in parts) or len(parts) > 1
        total: torch.Tensor | None = None
        for name, part in zip(names, parts, strict=True):
            if part.function is not None:
                batch = None
                if part.reads_batch:
                    batch = AdvantageBatch(
                        rows=output,
                        examples=examples,
                        rewards_per_func=rewards_per_func.view(*rewards.shape, -1).clone(),
                        success_rewards=deciding.clone(),
                        grpo=grpo.clone(),
                        trainer=self.policy,
                        ranks=ranks,
                    )
                found = call(part, rewards, batch, mask=mask)
            elif part.name == "grpo" or (part.name == "unlikeliness" and args.unlikeliness_beta == 0):
                found = grpo
            elif part.name == "unlikeliness":
                found = self._unlikeliness(output, rewards)
            else:
                found = built_in(part.name, args, rewards, deciding)
            if found.shape == rewards.shape:
                found = ranks.local(found.flatten())  # (B,)
            if logs_parts:
                self._log_size(name, found, compared if found.dim() == 1 else mask)
            weighted = found if part.weight == 1 else part.weight * found
            total = weighted if total is None else _sum(total, weighted)
        assert total is not None
        # If any process has advantages per token, expand them on all processes, so that the shapes agree.
        if any(part.reads_batch for part in parts) and ranks.most(total.dim() == 2):
            total = _per_token(total, mask).clone()
        return total

    def _log_size(self, name: str, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Log the mean absolute value of the advantages whose `mask` is not 0, over all processes."""
        total = self.policy.ranks.summed(
            {"sum": (advantages.abs() * mask).sum().item(), "number": int(mask.sum())},
        )
        self.policy.log_metric(f"credit/advantage_size/{name}", total["sum"] / max(total["number"], 1))

    def _unlikeliness(self, output: RowDict, rewards: torch.Tensor) -> torch.Tensor:
        """Return the advantages `(P, G)` of `advantage="unlikeliness"`."""
        args, mask = self.policy.args, loss_mask(output)
        # Mean log-probability of each row; NaN for rows without trained tokens.
        of_rows = (self._old_logprobs(output) * mask).sum(dim=1) / mask.sum(dim=1)
        logprobs = self.policy.ranks.gather(of_rows).view(rewards.shape)
        worth = discounted(rewards, logprobs, beta=args.unlikeliness_beta)
        return normalised(worth, scale=args.scale_rewards).masked_fill(equal_groups(rewards), 0.0)

    def _bonus(self, output: RowDict, rewards: torch.Tensor) -> torch.Tensor:
        """Return the bonuses `(P, G)` of all processes. Afterwards, add the answers of this batch to `counts`."""
        ranks, args = self.policy.ranks, self.policy.args
        prompts = [_prompt_key(ids) for ids in row_tokens(output)[0]]
        found = [answer_key(completion_text(completion)) for completion in self.completions]
        scored = ~ranks.local(rewards.flatten()).isnan()
        answers: list[str | None] = []  # None for rows without a reward, too
        for key, is_scored in zip(found, scored, strict=True):
            answers.append(str(key) if key is not None and is_scored else None)
        rows = ranks.objects(list(zip(prompts, answers, strict=True)))
        num_groups, size = rewards.shape
        values: list[float] = []  # bonuses of rows with an answer, before they are centred
        bonuses: list[list[float]] = []
        num_distinct = 0
        for start in range(0, len(rows), size):
            prompt, _ = rows[start]
            own = [answer for _, answer in rows[start : start + size]]
            if args.count_bonus_scope == "history":
                of_group = novelty(own, self.counts.get(prompt, {}))
                bonuses.append(centred(of_group))
            else:
                of_group = repetition(own)
                bonuses.append([value or 0.0 for value in of_group])
            values += [value for value in of_group if value is not None]
            num_distinct += len({*own} - {None})
        for prompt, answer in rows:
            if answer is not None:
                self.counts.setdefault(prompt, Counter())[answer] += 1
        self._warn_without_answers(num_scored=int((~rewards.isnan()).sum()), num_answered=len(values))
        self.policy.log_metric("credit/bonus_mean", sum(values) / max(len(values), 1))
        self.policy.log_metric("credit/distinct_answers", num_distinct / num_groups)
        self.policy.log_metric("credit/answered_fraction", len(values) / len(rows))
        return rewards.new_tensor(bonuses)

    def _warn_without_answers(self, *, num_scored: int, num_answered: int) -> None:
        """Warn if no completion of the first batch has an answer, so that no bonus is given."""
        if self._looked_for_answers or not num_scored:
            return
        self._looked_for_answers = True
        if num_answered == 0 and self.policy.accelerator.is_main_process:
            warnings.warn(
                f"`count_bonus={self.policy.args.count_bonus}` counts answers, and none was found in the {num_scored} "
                "completions of the first batch: no completion gets a bonus. An answer is a completion that is one "
                "number, or what stands in `\\boxed{...}` or after `#### `. Ask for one of these in the prompts, or "
                "set `count_bonus=0`.",
                stacklevel=2,
            )

    def _old_logprobs(self, output: RowDict) -> torch.Tensor:
        """Return the log-probabilities `(B, T)` under the policy that sampled. If TRL did not compute them, compute
        them in the same way."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        if self._logprobs is None or self._logprobs[0] is not output["completion_ids"]:
            policy = self.policy
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            width, size = output["completion_ids"].shape[1], policy.args.per_device_train_batch_size
            with torch.no_grad(), kept_randomness(policy.accelerator.device), without_dropout(policy.model):
                found = policy.forward(policy.model, ids, mask, width, batch_size=size)[0]
            self._logprobs = output["completion_ids"], found
        return self._logprobs[1]

    # ------------------------------------------------------------------------------------------------- single tokens

    def apply_clip_cov_and_kl_cov(self, output: RowDict) -> None:
        """
        Apply the fields `clip_cov` and `kl_cov` to tokens that reduce the entropy. Every process calls this method.

        Clip-Cov takes random tokens whose covariance of advantage and log-probability is in a range, and sets their
        advantages to 0. KL-Cov marks the tokens with the largest covariance for a penalty, which [`penalise`] adds.

        Args:
            output (`dict`):
                The main rows of this process, with their final advantages, `(B,)` or `(B, T)`.
        """
        args, ranks = self.policy.args, self.policy.ranks
        if not (args.clip_cov or args.kl_cov):
            return
        mask = loss_mask(output).bool()
        advantages = _per_token(output["advantages"], mask)
        # On the CPU, because Apple's MPS devices have no float64.
        own, logprobs = advantages[mask].cpu().double(), self._old_logprobs(output)[mask].cpu().double()
        sums = ranks.summed({"tokens": len(own), "advantages": own.sum().item(), "logprobs": logprobs.sum().item()})
        number = max(int(sums["tokens"]), 1)
        means = {"mean_advantage": sums["advantages"] / number, "mean_logprob": sums["logprobs"] / number}
        cov = covariances(own, logprobs, **means)
        total = ranks.summed({"covariance": cov.sum().item()})["covariance"]
        self.policy.log_metric("credit/covariance_mean", total / number)
        if args.clip_cov:
            candidates = (cov > args.clip_cov_low) & (cov < args.clip_cov_high)
            # A random choice of candidates: those with the largest random numbers.
            keys = torch.rand(int(candidates.sum()), generator=self.policy.exploration_generator, dtype=torch.float64)
            keys = cov.new_zeros(cov.shape).masked_scatter(candidates, keys)
            clipped = self._largest("clip_cov", keys, candidates, number).to(mask.device)
            output["advantages"] = advantages.masked_fill(torch.zeros_like(mask).masked_scatter(mask, clipped), 0.0)
        if args.kl_cov:
            chosen = self._largest("kl_cov", cov, torch.ones_like(cov, dtype=torch.bool), number).to(mask.device)
            output["kl_cov"] = torch.zeros_like(mask).masked_scatter(mask, chosen)
        self._logprobs = None  # free the memory, because the next generation batch needs other log-probabilities

    def _largest(self, field: str, values: torch.Tensor, candidates: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the mask of this process's tokens that are among the largest `values` of all candidates, `(tokens,)`.
        The configuration's `field` is the share of the `num_tokens` tokens of all processes that is chosen."""
        ranks = self.policy.ranks
        number = share_of(getattr(self.policy.args, field), num_tokens)
        places = candidates.nonzero().squeeze(1)
        found, order = values[places].sort(descending=True, stable=True)
        per_process = ranks.objects([found[:number].tolist()])
        self.policy.log_metric(f"credit/{field}_fraction", min(number, sum(map(len, per_process))) / num_tokens)
        num_own = num_largest(per_process, number, process=ranks.index)
        chosen = torch.zeros_like(candidates)
        chosen[places[order[:num_own]]] = True
        return chosen

    @contextmanager
    def loss_of(self, rows: RowDict, *, scale: float) -> Iterator[RowDict]:
        """
        Yield the rows for TRL's loss of a micro-batch of main rows.

        If KL-Cov marked tokens, yield a copy, because [`penalise`] writes into the rows. The original rows are trained
        again in the next iteration, so they must not change.

        Args:
            rows (`dict`):
                Rows of the micro-batch.
            scale (`float`):
                Factor by which the advantages of `rows` were multiplied already.
        """
        self._in_loss = ({**rows}, scale) if "kl_cov" in rows else None
        try:
            yield rows if self._in_loss is None else self._in_loss[0]
        finally:
            self._in_loss = None

    def penalise(self, logprobs: torch.Tensor) -> None:
        """Add the penalty of KL-Cov to the advantages of the rows that [`loss_of`] yielded. TRL's loss has just
        computed the log-probabilities `(B, T)`, and has not read the advantages yet."""
        if self._in_loss is None:
            return
        rows, scale = self._in_loss
        log_ratios = logprobs.detach() - rows["old_per_token_logps"]
        advantages = _per_token(rows["advantages"], rows["kl_cov"])
        coef = self.policy.args.kl_cov_coef * scale
        rows["advantages"] = with_penalty(advantages, log_ratios, rows["kl_cov"], coef=coef)

    # --------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of times that each answer was seen, by prompt."""
        return {"counts": {prompt: dict(answers) for prompt, answers in self.counts.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.counts = {prompt: Counter(answers) for prompt, answers in state["counts"].items()}


def _prompt_key(ids: list[int]) -> str:
    """Return a short key for the tokens of a prompt."""
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest()


def _distinct(names: Sequence[str]) -> list[str]:
    """Make names distinct, for metrics: the second `"f"` becomes `"f 2"`."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        seen[name] += 1
        distinct.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return distinct


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the sum of two advantages, each `(B,)` or `(B, T)`."""
    if first.dim() < second.dim():
        first = first.unsqueeze(1)
    if second.dim() < first.dim():
        second = second.unsqueeze(1)
    return first + second


def _per_token(advantages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return advantages, `(B,)` or `(B, T)`, in the shape `(B, T)` of `like`."""
    if advantages.dim() == 1:
        return advantages.unsqueeze(1).expand(like.shape)
    return advantages

"""Advantages of the main rows as the configuration says: the one part that the trainer asks."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_explore.credit.bonus import centred, novelty, repetition
from trl_explore.credit.covariance import covariances, num_largest, share_of, with_penalty
from trl_explore.credit.maxrl import maxrl
from trl_explore.credit.normalised import equal_groups, normalised
from trl_explore.credit.subsets import outcomes, pass_at_k, pkpo
from trl_explore.credit.unlikeliness import discounted
from trl_explore.rewards.answers import answer_key, completion_text
from trl_explore.rows.policy import Policy
from trl_explore.rows.scorer import Scorer
from trl_explore.rows.streams import RowDict, kept_randomness, loss_mask, row_tokens
from trl_explore.sampling.sampler import without_dropout


class Credit:
    """Gives main rows the advantage, the bonus and the tempered tokens that the configuration asks for, by the rewards
    that TRL normalised. Rows of further streams keep GRPO's."""

    def __init__(self, policy: Policy, scorer: Scorer) -> None:
        self.policy, self.scorer = policy, scorer
        self.completions: list[Any] = []  # of the main rows of this process as reward functions saw them, `[B]`
        self.counts: dict[str, Counter[str]] = {}  # of answers by prompt, over all processes
        # Rows of tokens, and their log-probabilities `(B, T)` under the policy that sampled them.
        self._logprobs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._looked_for_answers = False
        self._in_loss: tuple[RowDict, float] | None = None  # the micro-batch whose loss is computed, and its scale

    def assigned(self, output: RowDict, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Advantages `(B,)` of the main rows, from the rewards `(N, F)` that TRL's came from; collective."""
        args, advantages = self.policy.args, output["advantages"]
        if args.advantage == "grpo" and not args.count_bonus:
            return advantages
        rewards = self.scorer.totals(rewards_per_func).view(-1, args.num_generations)  # (P, G)
        if args.advantage != "grpo" and (args.advantage != "unlikeliness" or args.unlikeliness_beta):
            advantages = self.policy.ranks.local(self._advantages(output, rewards).flatten())
        if args.count_bonus:
            bonus = self.policy.ranks.local(self._bonus(output, rewards).flatten())
            advantages = advantages + args.count_bonus * bonus
        return advantages

    def _advantages(self, output: RowDict, rewards: torch.Tensor) -> torch.Tensor:
        args = self.policy.args
        if args.advantage == "maxrl":
            return maxrl(rewards)
        if args.advantage == "passk":
            deciding = self.scorer.success().view(rewards.shape)
            return pass_at_k(outcomes(deciding, threshold=args.success_threshold), k=args.passk_k)
        if args.advantage != "unlikeliness":
            return pkpo(rewards, k=args.passk_k, leave_one_out=args.advantage == "pkpo_loo")
        mask = loss_mask(output)
        of_rows = (self._old_logprobs(output) * mask).sum(dim=1) / mask.sum(dim=1)  # NaN where nothing is trained
        logprobs = self.policy.ranks.gather(of_rows).view(rewards.shape)
        worth = discounted(rewards, logprobs, beta=args.unlikeliness_beta)
        return normalised(worth, scale=args.scale_rewards).masked_fill(equal_groups(rewards), 0.0)

    def _bonus(self, output: RowDict, rewards: torch.Tensor) -> torch.Tensor:
        """Bonuses `(P, G)`; answers of this batch are counted behind them."""
        ranks, args = self.policy.ranks, self.policy.args
        prompts = [_prompt_key(ids) for ids in row_tokens(output)[0]]
        found = [answer_key(completion_text(completion)) for completion in self.completions]
        scored = ~ranks.local(rewards.flatten()).isnan()
        answers = [None if key is None or not real else str(key) for key, real in zip(found, scored, strict=True)]
        rows, size = ranks.objects(list(zip(prompts, answers, strict=True))), rewards.shape[1]
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        values, bonuses = [], []
        for group in groups:
            own = [answer for _, answer in group]
            rare = args.count_bonus_scope == "history"
            of_group = novelty(own, self.counts.get(group[0][0], {})) if rare else repetition(own)
            values += [value for value in of_group if value is not None]
            bonuses.append(centred(of_group) if rare else [value or 0.0 for value in of_group])
        for prompt, answer in rows:
            if answer is not None:
                self.counts.setdefault(prompt, Counter())[answer] += 1
        distinct = sum(len({answer for _, answer in group} - {None}) for group in groups)
        self._warn_without_answers(num_scored=int((~rewards.isnan()).sum()), num_answered=len(values))
        self.policy.log_metric("credit/bonus_mean", sum(values) / max(len(values), 1))
        self.policy.log_metric("credit/distinct_answers", distinct / len(groups))
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
        """Log-probabilities `(B, T)` under the policy that sampled: TRL's, or else the same pass, as it would run."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        if self._logprobs is None or self._logprobs[0] is not output["completion_ids"]:
            policy, sides = self.policy, ("prompt", "completion")
            ids, mask = (torch.cat([output[f"{side}_{part}"] for side in sides], dim=1) for part in ("ids", "mask"))
            width, size = output["completion_ids"].shape[1], policy.args.per_device_train_batch_size
            with torch.no_grad(), kept_randomness(policy.accelerator.device), without_dropout(policy.model):
                found = policy.forward(policy.model, ids, mask, width, batch_size=size)[0]
            self._logprobs = output["completion_ids"], found
        return self._logprobs[1]

    # ------------------------------------------------------------------------------------------------- single tokens

    def temper(self, output: RowDict) -> None:
        """Take away the advantage of tokens that drive entropy down (Clip-Cov), or mark them for a penalty (KL-Cov),
        by their final advantages `(B,)` or `(B, T)`; all processes call it."""
        args, ranks = self.policy.args, self.policy.ranks
        if not (args.clip_cov or args.kl_cov):
            return
        mask = loss_mask(output).bool()
        advantages = _wide(output["advantages"], mask)
        own, logprobs = advantages[mask].double(), self._old_logprobs(output)[mask].double()
        sums = ranks.summed(
            {"tokens": len(own), "advantages": own.sum().item(), "logprobs": logprobs.sum().item()},
        )
        number = max(int(sums["tokens"]), 1)
        means = {"mean_advantage": sums["advantages"] / number, "mean_logprob": sums["logprobs"] / number}
        cov = covariances(own, logprobs, **means)
        total = ranks.summed({"covariance": cov.sum().item()})["covariance"]
        self.policy.log_metric("credit/covariance_mean", total / number)
        if args.clip_cov:
            candidates = (cov > args.clip_cov_low) & (cov < args.clip_cov_high)
            keys = torch.rand(int(candidates.sum()), generator=self.policy.exploration_generator, dtype=torch.float64)
            keys = cov.new_zeros(cov.shape).masked_scatter(candidates, keys.to(cov.device))
            clipped = self._largest("clip_cov", keys, candidates, number)
            output["advantages"] = advantages.masked_fill(torch.zeros_like(mask).masked_scatter(mask, clipped), 0.0)
        if args.kl_cov:
            chosen = self._largest("kl_cov", cov, torch.ones_like(cov, dtype=torch.bool), number)
            output["kl_cov"] = torch.zeros_like(mask).masked_scatter(mask, chosen)
        self._logprobs = None

    def _largest(self, field: str, values: torch.Tensor, candidates: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Which tokens of this process are among the largest `values` of all candidates, as many as `field` says."""
        ranks, number = self.policy.ranks, share_of(vars(self.policy.args)[field], num_tokens)
        places = candidates.nonzero().squeeze(1)
        found, order = values[places].sort(descending=True, stable=True)
        per_process = ranks.objects([found[:number].tolist()])
        self.policy.log_metric(f"credit/{field}_fraction", min(number, sum(map(len, per_process))) / num_tokens)
        chosen = torch.zeros_like(candidates)
        chosen[places[order[: num_largest(per_process, number, process=ranks.index)]]] = True
        return chosen

    @contextmanager
    def loss_of(self, rows: RowDict, *, scale: float) -> Iterator[RowDict]:
        """Rows for TRL's loss of a main micro-batch, whose advantages and loss are multiplied by `scale`. Where KL-Cov
        marked tokens they are a copy, which [`penalise`] writes into: what is buffered is trained again."""
        self._in_loss = ({**rows}, scale) if "kl_cov" in rows else None
        try:
            yield rows if self._in_loss is None else self._in_loss[0]
        finally:
            self._in_loss = None

    def penalise(self, logprobs: torch.Tensor) -> None:
        """Log-probabilities `(B, T)` were computed: in the loss of marked rows, which reads advantages only now, the
        penalty goes into these."""
        if self._in_loss is None:
            return
        rows, scale = self._in_loss
        log_ratios = logprobs.detach() - rows["old_per_token_logps"]
        wide, coef = _wide(rows["advantages"], rows["kl_cov"]), self.policy.args.kl_cov_coef * scale
        rows["advantages"] = with_penalty(wide, log_ratios, rows["kl_cov"], coef=coef)

    # --------------------------------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: how often each answer was seen."""
        return {"counts": {prompt: dict(answers) for prompt, answers in self.counts.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.counts = {prompt: Counter(answers) for prompt, answers in state["counts"].items()}


def _prompt_key(ids: list[int]) -> str:
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest()


def _wide(advantages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return advantages.unsqueeze(1).expand(like.shape) if advantages.dim() == 1 else advantages

"""Use of the vLLM backend by a trainer: weight updates, limits of lengths, and warnings about options."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl_explore.rows.policy import Policy
from trl_explore.rows.streams import RowDict, loss_mask
from trl_explore.serving.backend import Answer, Request, ServedGeneration

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

MASKED_FRACTION = 0.1  # fraction of the rows of a batch above which a warning is given


class Serving:
    """
    Samples from vLLM with the weights of the current step.

    Args:
        policy ([`~trl_explore.rows.policy.Policy`]):
            The trainer.
        backend ([`~trl_explore.serving.backend.ServedGeneration`]):
            The vLLM backend.
        sync_weights (`Callable[[], None]`):
            Function that sends the weights of the current step, if it has not done so already.
    """

    def __init__(self, policy: Policy, backend: ServedGeneration, sync_weights: Callable[[], None]) -> None:
        self.policy, self.backend, self.sync_weights = policy, backend, sync_weights
        self._warned = False

    def check(self, longest: int | None) -> None:
        """
        Warn about harmful options, and check that vLLM accepts the longest prompt.

        Tools and environments add tokens to a prompt later. Each request is checked again when it is sampled.

        Args:
            longest (`int`, *optional*):
                Number of tokens of the longest prompt. None if it is not known.
        """
        warn_about_sampling(self.policy.args)
        self.check_longest(longest)

    def check_longest(self, longest: int | None) -> None:
        """Raise a ValueError if vLLM does not accept a prompt of `longest` tokens with its completion. Do nothing if
        `longest` is None."""
        if longest is not None:
            # Without `max_completion_length`, vLLM ends completions at the model's limit, so one token suffices.
            self.backend.check_lengths([Request([0] * longest, 1, self.policy.args.max_completion_length or 1)])

    def complete(self, asked: list[Request]) -> list[list[Answer]]:
        """Send the weights, and sample the continuations `[R][num_samples_i]` of this process's requests, which may be
        none."""
        self.sync_weights()
        return self.backend.complete(asked)

    @contextmanager
    def budgeted(self, prefixes: list[list[int]], budgets: list[int]) -> Iterator[None]:
        """
        Limit the number of new tokens that TRL samples for each prefix inside the `with` block.

        In later turns of an agent, a part of the completion's budget is already used.

        Args:
            prefixes (`list[list[int]]`):
                Token ids of the conversations so far, `[R][T_i]`.
            budgets (`list[int]`):
                Maximum number of new tokens of each prefix, `[R]`.
        """
        self.backend.budgets = dict(zip(map(tuple, prefixes), budgets, strict=True))
        try:
            yield
        finally:
            self.backend.budgets = {}

    def watch_correction(self, output: RowDict) -> None:
        """Log the fraction of the rows of all processes that TRL's importance sampling correction excludes from the
        loss. Warn once if it is large."""
        mode = self.policy.args.vllm_importance_sampling_mode
        if "importance_sampling_ratio" not in output or mode != "sequence_mask":
            return
        trained = loss_mask(output).any(dim=1)
        masked = (output["importance_sampling_ratio"].squeeze(1) == 0) & trained
        total = self.policy.ranks.summed({"masked": masked.sum().item(), "trained": trained.sum().item()})
        fraction = total["masked"] / max(total["trained"], 1)
        self.policy.log_metric("sampling/masked_fraction", fraction)
        if fraction > MASKED_FRACTION and not self._warned:
            self._warned = True
            warnings.warn(
                f"{fraction:.0%} of the rows were sampled by vLLM with probabilities so far from the trainer's that "
                "`vllm_importance_sampling_mode='sequence_mask'` takes them out of the loss. Small differences add up "
                "over long completions: `vllm_importance_sampling_mode='token_truncate'` keeps the rows, a larger "
                "`vllm_importance_sampling_clip_max` keeps more of them. If `sampling/sampling_logp_difference/mean` "
                "grows from step to step, the server does not get the weights.",
                stacklevel=2,
            )


def warn_about_sampling(args: "ExplorationConfig") -> None:
    """Warn about options of vLLM that harm a run without an error."""
    options: dict[str, Any] = args.generation_kwargs or {}
    # In a request to vLLM, an option of `generation_kwargs` replaces the field of the same name.
    used = {"top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p, **options}
    # None, like the neutral value, truncates nothing.
    cuts = {"top_p": (used["top_p"] or 1) < 1, "top_k": (used["top_k"] or 0) > 0, "min_p": bool(used["min_p"])}
    if args.vllm_importance_sampling_correction and any(cuts.values()):
        named = ", ".join(f"`{name}={used[name]}`" for name, cut in cuts.items() if cut)
        warnings.warn(
            f"{named}: vLLM reports the probabilities of the truncated distribution that it samples from, but the "
            "trainer computes probabilities of the whole distribution. So every importance ratio is biased. Sample "
            "without truncation, or set `vllm_importance_sampling_correction=False`.",
            stacklevel=4,
        )
    if "seed" in options:
        warnings.warn(
            f"`generation_kwargs` has `seed={options['seed']}`: vLLM then answers equal requests equally, so the "
            "completions of a group and the branches of a prefix become copies of each other. Leave `seed` out; the "
            "`seed` of the configuration does no harm.",
            stacklevel=4,
        )

"""The vLLM backend in a trainer: what may be asked of it, and what is said about the options."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trl_explore.rows.policy import Policy
from trl_explore.rows.streams import RowDict, loss_mask
from trl_explore.serving.backend import Answer, Request, ServedGeneration

MASKED_FRACTION = 0.1  # of the rows of a batch; above it the user is told


class Serving:
    """Samples from vLLM, with the weights of the step: `sync_weights` sends them unless they were sent."""

    def __init__(self, policy: Policy, backend: ServedGeneration, sync_weights: Callable[[], None]) -> None:
        self.policy, self.backend, self.sync_weights = policy, backend, sync_weights
        self._warned = False

    def check(self, longest: int | None) -> None:
        """The longest prompt must fit; where tools or environments add to it, it is checked when it is sampled."""
        warn_about_sampling(self.policy.args)
        self.check_longest(longest)

    def check_longest(self, longest: int | None) -> None:
        """Raise ValueError if vLLM does not take the longest prompt with its completion. None if the length of prompts
        is not known."""
        if longest is not None:
            # Without a limit, vLLM ends completions at the model's context: a prompt needs room for one token.
            self.backend.check_lengths([Request([0] * longest, 1, self.policy.args.max_completion_length or 1)])

    def complete(self, asked: list[Request]) -> list[list[Answer]]:
        """Continue prefixes of this process, which may have none: `[R][num_samples_i]`."""
        self.sync_weights()
        return self.backend.complete(asked)

    @contextmanager
    def budgeted(self, prefixes: list[list[int]], budgets: list[int]) -> Iterator[None]:
        """Let TRL's own sampling ask for no more than there is room for: later turns are no whole completions."""
        self.backend.budgets = dict(zip(map(tuple, prefixes), budgets, strict=True))
        try:
            yield
        finally:
            self.backend.budgets = {}

    def watch_correction(self, output: RowDict) -> None:
        """Count rows that TRL's correction takes out of the loss, and tell the user once if they are many."""
        mode = self.policy.args.vllm_importance_sampling_mode
        if "importance_sampling_ratio" not in output or mode != "sequence_mask":
            return
        trained = loss_mask(output).any(dim=1)
        masked = (output["importance_sampling_ratio"].squeeze(1) == 0) & trained
        fraction = masked.sum().item() / max(trained.sum().item(), 1)
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


def warn_about_sampling(args) -> None:
    """Tell a user of vLLM about options that harm a run without an error."""
    cuts = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if args.vllm_importance_sampling_correction and any(cuts.values()):
        named = ", ".join(f"`{name}={vars(args)[name]}`" for name, cut in cuts.items() if cut)
        warnings.warn(
            f"{named}: vLLM reports the probabilities of the truncated distribution that it samples from, the trainer "
            "computes those of the whole one, so every importance ratio is biased. Sample without truncation, or set "
            "`vllm_importance_sampling_correction=False`.",
            stacklevel=4,
        )
    if "seed" in (args.generation_kwargs or {}):
        warnings.warn(
            f"`generation_kwargs` has `seed={args.generation_kwargs['seed']}`: vLLM then answers equal requests "
            "equally, so that the siblings of a group and the branches of a prefix become copies of each other. "
            "Leave `seed` out; `seed` of the configuration does not harm.",
            stacklevel=4,
        )

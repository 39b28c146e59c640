"""Forward context influence of steps: how much later steps attend to each. Follows AttnRL
(https://huggingface.co/papers/2509.26628), section 3."""

from collections.abc import Sequence

import torch

from trl_explore.chains.leaves import TreeCompletion

SELECTIONS = ("attention", "uncertain", "random")  # values of AttnRL's `fork_selection`
StepSpan = tuple[int, int]  # where a step begins and ends among the tokens of a row


def step_attention(attention: torch.Tensor, steps: Sequence[StepSpan]) -> torch.Tensor:
    """What a token of step j attends to a token of step k on average, `(H, S, S)` in float32, from attention
    `(H, T, T)` of queries to keys."""
    average = torch.zeros(len(steps), attention.shape[-1], device=attention.device)  # (S, T)
    for step, (begin, end) in zip(average, steps, strict=True):
        step[begin:end] = 1.0 / (end - begin)
    return torch.stack([average @ head.float() @ average.T for head in attention])  # one head in float32 at a time


def forward_influence(attention: torch.Tensor, *, distance: int) -> torch.Tensor:
    """`max over heads of sum_{j >= k + distance} alpha_jk` for every step k, `(S,)`, from `alpha`, `(H, S, S)`."""
    return attention.tril(-distance).sum(dim=-2).amax(dim=0)


def influential_steps(
    influence: Sequence[float], starts: Sequence[int], number: int, *, end: int, quantile: float, distance: int
) -> list[int]:
    """
    Starts of so many steps to fork at, or of all where there are fewer: in text order those at or above a quantile of
    the completion's influence, then the first ones.

    Args:
        influence (`Sequence[float]`):
            Of the steps `[S]`.
        starts (`Sequence[int]`):
            Their first tokens `[S]`; the first step is never forked.
        number (`int`):
            Forks.
        end (`int`):
            Token from which on nothing is forked.
        quantile (`float`):
            Share of the steps that are below it.
        distance (`int`):
            Fewest tokens between forks, and before the first; the steps that fill up do not keep it.

    Returns:
        `list[int]`: Starts, ascending.
    """
    possible = open_steps(starts, end=end)
    if not possible:
        return []
    values = torch.tensor([v if s in possible else 0.0 for v, s in zip(influence, starts, strict=True)])
    threshold = values.quantile(quantile)
    if threshold == 0 and values.any():  # few steps are attended to at all
        threshold = values[values > 0].min()
    chosen: list[int] = []
    for start, value in zip(starts, values.tolist(), strict=True):
        far = start >= distance and (not chosen or start - chosen[-1] >= distance)
        if start in possible and value >= threshold.item() and far and len(chosen) < number:
            chosen.append(start)
    others = [start for start in possible if start not in chosen]
    return sorted(chosen + others[: number - len(chosen)])


def open_steps(starts: Sequence[int], *, end: int) -> list[int]:
    """Starts of steps that may be forked: all but the first, before token `end`."""
    return [start for start in starts[1:] if start < end]


def forked_chains(
    leaves: Sequence[TreeCompletion], *, scored: Sequence[bool], generator: torch.Generator
) -> list[int]:
    """
    Places of `ceil(G exp(-accuracy))` of a prompt's G scored chains: those of the rarer outcome first, then others
    that are drawn.
    """
    chains = [i for i, leaf in enumerate(leaves) if leaf.parent is None and scored[i]]
    if not chains:
        return []
    right = [i for i in chains if leaves[i].solved]
    accuracy = len(right) / len(chains)
    number = int((len(chains) * torch.tensor(-accuracy, dtype=torch.float64).exp()).ceil())
    wrong = [i for i in chains if not leaves[i].solved]
    rare, common = (wrong, right) if accuracy >= 0.5 else (right, wrong)
    order = torch.randperm(len(common), generator=generator).tolist()
    return sorted([*rare, *(common[i] for i in order)][:number])

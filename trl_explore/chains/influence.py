"""Forward context influence of steps: how much the later steps of a completion attend to each step. Follows AttnRL
(https://huggingface.co/papers/2509.26628), section 3."""

from collections.abc import Sequence

import torch

from trl_explore.chains.leaves import TreeCompletion

SELECTIONS = ("attention", "uncertain", "random")  # values of AttnRL's `fork_selection`
StepSpan = tuple[int, int]  # first token of a step and its end (exclusive), counted in a row of tokens


def step_attention(attention: torch.Tensor, steps: Sequence[StepSpan]) -> torch.Tensor:
    """Return the mean attention of the tokens of step j to the tokens of step k, `(H, S, S)` in float32, from the
    attention of queries to keys, `(H, T, T)`."""
    average = torch.zeros(len(steps), attention.shape[-1], device=attention.device)  # (S, T)
    for step, (begin, end) in zip(average, steps, strict=True):
        step[begin:end] = 1.0 / (end - begin)
    # Convert one head at a time, because a float32 copy of all heads needs much memory.
    return torch.stack([average @ head.float() @ average.T for head in attention])


def forward_influence(attention: torch.Tensor, *, distance: int) -> torch.Tensor:
    """Return `max over heads of sum_{j >= k + distance} alpha_jk` for every step k, `(S,)`. `attention` is `alpha`,
    `(H, S, S)`."""
    return attention.tril(-distance).sum(dim=-2).amax(dim=0)


def influential_steps(
    influence: Sequence[float], starts: Sequence[int], number: int, *, end: int, quantile: float, distance: int
) -> list[int]:
    """
    Choose the steps at which a completion is forked.

    Steps whose influence is at or above a quantile are chosen first, in text order. If these are fewer than `number`,
    the earliest other steps are added.

    Args:
        influence (`Sequence[float]`):
            Influence of the steps, `[S]`.
        starts (`Sequence[int]`):
            First token of each step, `[S]`. The first step is never forked.
        number (`int`):
            Number of forks.
        end (`int`):
            The completion may be forked only before this token.
        quantile (`float`):
            Quantile of the completion's influence, in [0, 1].
        distance (`int`):
            Minimum number of tokens between two forks, and before the first fork. It does not apply to steps that are
            added.

    Returns:
        `list[int]`: First tokens of the chosen steps, ascending; all possible steps if there are fewer than `number`.
    """
    possible = open_steps(starts, end=end)
    if not possible:
        return []
    known = []  # influence of each step; 0 if the step cannot be forked
    for value, start in zip(influence, starts, strict=True):
        known.append(value if start in possible else 0.0)
    values = torch.tensor(known)
    threshold = values.quantile(quantile)
    if threshold == 0 and values.any():
        threshold = values[values > 0].min()  # most steps get no attention: take all steps that get some
    chosen: list[int] = []
    nearest = distance  # first token at which the next fork may be
    for start, value in zip(starts, values.tolist(), strict=True):
        if start in possible and value >= threshold.item() and start >= nearest and len(chosen) < number:
            chosen.append(start)
            nearest = start + distance
    others = [start for start in possible if start not in chosen]
    return sorted(chosen + others[: number - len(chosen)])


def open_steps(starts: Sequence[int], *, end: int) -> list[int]:
    """Return the first tokens of the steps that can be forked: all steps before token `end`, except the first step."""
    return [start for start in starts[1:] if start < end]


def forked_chains(
    leaves: Sequence[TreeCompletion], *, scored: Sequence[bool], generator: torch.Generator
) -> list[int]:
    """
    Return the indices of the chains of a prompt that are forked: `ceil(G exp(-accuracy))` of its G scored chains.

    Chains with the rarer outcome are chosen first, then random chains with the other outcome. `scored` is True for a
    completion with a reward, `[L]`.
    """
    solved, failed = [], []
    for i, leaf in enumerate(leaves):
        if leaf.parent is None and scored[i]:
            if leaf.solved:
                solved.append(i)
            else:
                failed.append(i)
    num_chains = len(solved) + len(failed)
    if num_chains == 0:
        return []
    accuracy = len(solved) / num_chains
    number = int((num_chains * torch.tensor(-accuracy, dtype=torch.float64).exp()).ceil())
    rare, common = (failed, solved) if accuracy >= 0.5 else (solved, failed)
    order = torch.randperm(len(common), generator=generator).tolist()
    shuffled = [common[i] for i in order]
    return sorted([*rare, *shuffled][:number])

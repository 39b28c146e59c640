"""The field `advantage`: names of built-in advantages, functions of a user, and weighted sums of these."""

import inspect
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_explore.names import import_named, is_import_path, shown, unknown_name
from trl_explore.rows.ranks import Ranks

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

ADVANTAGES = ("grpo", "maxrl", "passk", "pkpo", "pkpo_loo", "reinforce", "unlikeliness")
EXAMPLE = "def my_advantage(rewards): return rewards - rewards.nanmean(dim=1, keepdim=True)"


@dataclass(frozen=True)
class AdvantageBatch:
    """
    Data that an advantage function can read in addition to the rewards. It must not change them.

    P is the number of prompts of all processes, G is `num_generations`, and B is the number of rows of this process.
    All processes together have `P * G` rows, in the order of the processes.
    """

    # Inputs of TRL's loss for the main rows of this process, by name, such as `completion_ids`, `(B, T)`.
    rows: Mapping[str, Any]
    examples: Sequence[Mapping[str, Any]]  # rows of the data set, `[B]`
    rewards_per_func: torch.Tensor  # rewards of each reward function, without weights, `(P, G, F)`; NaN if not scored
    success_rewards: torch.Tensor  # rewards that decide about success, `(P, G)`; NaN if not scored
    grpo: torch.Tensor  # GRPO's advantages, `(P, G)`; with `trained_generations`, only of the rows that are trained
    trainer: Any  # the trainer, with its model, its tokenizer and its state
    ranks: Ranks  # the processes of the run

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the rows of all processes, `(P, G)`. `values` has one value for each row of this
        process, `(B,)`. Every process must call it."""
        return self.ranks.gather(values).view(self.grpo.shape)


@dataclass(frozen=True)
class AdvantagePart:
    """One of the advantages whose weighted sum the trainer uses."""

    name: str  # a name in `ADVANTAGES`, or the import path of a function
    weight: float
    function: Callable[..., Any] | None = None  # None: the built-in advantage `name`

    @property
    def reads_batch(self) -> bool:
        """True if the part reads more than the rewards of a group: an [`AdvantageBatch`]."""
        if self.function is None:
            return self.name == "unlikeliness"
        return "batch" in _signature(self.function).parameters


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function. A `torch.nn.Module` has the signature of its `forward`."""
    if isinstance(function, torch.nn.Module):
        return inspect.signature(function.forward)
    return inspect.signature(function)


def read_advantage(given: Any) -> Any:
    """Return the value of the field `advantage`. None is GRPO's advantage. A list may come from the command line as
    JSON text, which is parsed."""
    if given is None:
        return "grpo"
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            return json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"`advantage={given!r}` is no list of names in JSON: {error}.") from None
    return list(given) if isinstance(given, tuple) else given


def advantage_parts(args: "ExplorationConfig") -> list[AdvantagePart]:
    """
    Return the parts whose weighted sum is the advantage. `args` is any configuration.

    Raises:
        ValueError: If `advantage` or `advantage_weights` has a wrong value, or if a function cannot be imported or
            called.
    """
    given, weights = read_advantage(args.advantage), args.advantage_weights
    if not isinstance(given, list):
        if weights is not None:
            raise ValueError(
                f"`advantage_weights={weights!r}` weighs the entries of a list, and `advantage={shown(given)}` is no "
                "list: leave `advantage_weights` out, or set `advantage` to a list."
            )
        return [_part(given, 1.0)]
    if not given:
        raise ValueError("`advantage=[]` names no advantage: leave `advantage` out for GRPO's.")
    weights = [1.0] * len(given) if weights is None else weights
    if not isinstance(weights, Sequence) or isinstance(weights, str) or len(weights) != len(given):
        raise ValueError(
            f"`advantage_weights={weights!r}` must be a list of {len(given)} numbers, one for each entry of "
            f"`advantage={shown(given)}`."
        )
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"`advantage_weights={weights!r}`: {weight!r} is no finite number.")
    return [_part(one, float(weight)) for one, weight in zip(given, weights, strict=True)]


def _part(given: Any, weight: float) -> AdvantagePart:
    """Check one entry of `advantage`, and return it with its weight. Raise ValueError if it is wrong."""
    if isinstance(given, str):
        if given in ADVANTAGES:
            return AdvantagePart(given, weight)
        if not is_import_path(given):
            raise ValueError(
                f"`advantage`: {unknown_name('value', given, ADVANTAGES)} A function of your own is passed itself, or "
                "named by its import path, my_module.my_advantage."
            )
        name, function = import_named("`advantage`", given, "function", inspect.isfunction)
    elif callable(given):
        name, function = shown(given), given
    else:
        raise ValueError(
            f"`advantage`: {given!r} is neither a function nor a name. Pass a name ({', '.join(ADVANTAGES)}), a "
            "function, its import path, or a list of these."
        )
    part = AdvantagePart(name, weight, function)
    try:
        arguments = {"batch": None} if part.reads_batch else {}
        _signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:  # Python raises ValueError for signatures of some C functions
        raise ValueError(
            f"`advantage`: {name} cannot be called with `rewards`, nor with `rewards` and `batch`: {error}. Give all "
            f"other parameters a default. Write for example `{EXAMPLE}`."
        ) from None
    return part


def call(
    part: AdvantagePart,
    rewards: torch.Tensor,
    batch: AdvantageBatch | None,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Return the advantages that a user's function computes.

    Args:
        part ([`AdvantagePart`]):
            The part with the function.
        rewards (`torch.Tensor`):
            Total rewards, `(P, G)`. NaN if a row has no reward.
        batch ([`AdvantageBatch`], *optional*):
            The batch. It may be None only if the function does not read it, for example for rows that are not main
            rows.
        mask (`torch.Tensor`, *optional*):
            Mask `(B, T)` for the main rows of this process. It is not 0 for tokens that may get an advantage. If it is
            None, the function must return one number per row.

    Returns:
        `torch.Tensor`: Advantages of the rows of all processes, `(P, G)`, or of the tokens of this process, `(B, T)`.
        They are 0 for rows without a reward, and for tokens outside of `mask`.

    Raises:
        ValueError: If the result has a wrong shape, or a number that is not finite.
    """
    assert part.function is not None
    arguments = {"batch": batch} if part.reads_batch else {}
    with torch.no_grad():
        returned = part.function(rewards.clone(), **arguments)
    start = f"The advantage function {part.name}"
    try:
        if isinstance(returned, np.ndarray):
            returned = returned.copy()  # torch cannot read an array with negative strides
        found = torch.as_tensor(returned).detach()
        if found.is_complex() or found.layout != torch.strided:
            raise ValueError
        found = found.to(device=rewards.device, dtype=rewards.dtype)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{start} returned {type(returned).__name__} {reprlib.repr(returned)}; it must return a dense tensor of "
            "real numbers."
        ) from None
    if found.shape == rewards.shape:
        found = found.masked_fill(rewards.isnan(), 0.0)
        _check_finite(start, found, "prompt {} and completion {}")
        return found
    if mask is not None and found.shape == mask.shape:
        found = found.masked_fill(mask == 0, 0.0)
        _check_finite(start, found, "row {} and token {} of this process")
        return found
    expected = f"{tuple(rewards.shape)}, one advantage for each reward"
    if mask is not None:
        expected += f", or {tuple(mask.shape)}, one for each token of this process's padded completions"
    raise ValueError(f"{start} returned the shape {tuple(found.shape)}. It must return the shape {expected}.")


def _check_finite(start: str, found: torch.Tensor, where: str) -> None:
    """Raise ValueError if an advantage is not finite. `where` has two `{}` for the indices of that advantage."""
    wrong = (~found.isfinite()).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise ValueError(
            f"{start} returned {found[tuple(place)].item()} for {where.format(*place)}. All advantages must be "
            "finite. Is something divided by a deviation or a mean that is 0?"
        )

"""Checks of the configuration's fields that change advantages, such as `advantage` and `kl_cov`.

`args` is the configuration of any of our trainers.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trl_explore.credit.functions import advantage_parts
from trl_explore.names import shown

if TYPE_CHECKING:
    from trl_explore.trainers.config import ExplorationConfig

OF_SUBSETS = {"passk", "pkpo", "pkpo_loo"}  # advantages that compare subsets of `passk_k` rows
SCOPES = ("history", "batch")  # values of `count_bonus_scope`
# Loss types that multiply the advantage of a token by a ratio that is clipped on both sides.
RATIO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")


def check_advantage(args: "ExplorationConfig") -> None:
    """Raise a ValueError if `advantage` is unknown, or cannot be computed or train with the other fields."""
    names = {part.name for part in advantage_parts(args)}
    advantage = shown(args.advantage)
    if advantage != "grpo" and args.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            f"`advantage={advantage!r}` is formed from a row's total reward, which "
            "`multi_objective_aggregation='normalize_then_sum'` never forms: set that to 'sum_then_normalize', or "
            "leave `advantage` out."
        )
    if "reinforce" in names and args.dynamic_sampling != "off":
        raise ValueError(
            f"`dynamic_sampling={args.dynamic_sampling!r}` drops groups whose rewards are all equal, and "
            f"`advantage={advantage!r}` trains them: leave one of the two out."
        )
    if args.count_bonus and args.dynamic_sampling != "off":
        raise ValueError(
            f"`dynamic_sampling={args.dynamic_sampling!r}` drops groups whose rewards are all equal, and "
            f"`count_bonus={args.count_bonus}` trains them: leave one of the two out."
        )
    field, size = "num_generations", args.num_generations
    if args.trained_generations is not None:
        field, size = "trained_generations", args.trained_generations
    if names & OF_SUBSETS and size is not None and args.passk_k > size:
        raise ValueError(
            f"`passk_k={args.passk_k}` is more than the `{field}={size}` rows of a group that are compared: lower it, "
            f"or raise `{field}`."
        )
    # With one subset of all rows, every row of a group has the mean success of all subsets: no row stands out.
    if "passk" in names and args.passk_k == size:
        raise ValueError(
            f"`advantage='passk'` with `passk_k={args.passk_k}` and `{field}={size}` gives every row the advantage 0, "
            f"so nothing is learned: `passk_k` must be smaller than `{field}`. Lower `passk_k`, or raise `{field}`."
        )


def check_covariance(args: "ExplorationConfig") -> None:
    """Raise a ValueError if the range of `clip_cov` is empty, or if `kl_cov` does not work with the loss."""
    if args.clip_cov_low >= args.clip_cov_high:
        raise ValueError(
            f"`clip_cov_low={args.clip_cov_low}` must be less than `clip_cov_high={args.clip_cov_high}`: tokens "
            "between them are clipped."
        )
    if not args.kl_cov:
        return
    field = f"`kl_cov={args.kl_cov}`"
    if args.loss_type not in RATIO_LOSSES or args.importance_sampling_level != "token":
        raise ValueError(
            f"{field} changes the ratio of single tokens, which `loss_type={args.loss_type!r}` with "
            f"`importance_sampling_level={args.importance_sampling_level!r}` does not have: set `loss_type` to one of "
            f"{', '.join(RATIO_LOSSES)} and the level to 'token', or use `clip_cov`."
        )
    for name in ("delta", "off_policy_mask_threshold"):
        value = getattr(args, name)
        if value is not None:
            raise ValueError(f"{field} takes the place of all clipping, `{name}={value}` too: leave one of them out.")


def check_updates(args: "ExplorationConfig") -> None:
    """Raise a ValueError if `kl_cov` would do nothing. Its penalty has no gradient before the policy has changed since
    it sampled, so one update per generation batch is not enough."""
    num_passes = args.steps_per_generation * args.num_iterations  # forward and backward passes per generation batch
    # An optimizer step then comes only at the end of a generation batch, never between two passes over the same batch.
    if args.kl_cov and args.gradient_accumulation_steps % num_passes == 0:
        raise ValueError(
            f"`kl_cov={args.kl_cov}` does nothing with one update per generation batch, where no token has moved yet: "
            f"set `num_iterations=2`, or `steps_per_generation={args.steps_per_generation}` above "
            f"`gradient_accumulation_steps={args.gradient_accumulation_steps}`."
        )


def check_text_only(args: "ExplorationConfig") -> None:
    """Raise a ValueError if a field is set that does not work with vision-language models."""
    in_use = {
        "advantage": any(part.name == "unlikeliness" for part in advantage_parts(args)),
        "count_bonus": args.count_bonus > 0,
        "clip_cov": args.clip_cov > 0,
        "kl_cov": args.kl_cov > 0,
        "dynamic_sampling": args.dynamic_sampling == "refill",
        "trained_generations": args.trained_generations is not None,
    }
    names = [name for name, used in in_use.items() if used]
    refuse(args, names, "looks at tokens, and not at a prompt's images")


def refuse(args: "ExplorationConfig", names: Iterable[str], why: str) -> None:
    """Raise a ValueError for the first field of `names`, if there is one. `why` is the predicate of the message, whose
    subject is the field."""
    for name in names:
        raise ValueError(f"`{name}={shown(getattr(args, name))!r}` {why}: leave `{name}` out.")

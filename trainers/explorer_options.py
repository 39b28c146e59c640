"""Configurations of the explorers of a run, from the fields `explore`, `explorers` and `explorer_options`."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin

from trl_explore.auto.explorer_table import DEFAULT_EXPLORERS, EXPLORER_TABLE
from trl_explore.auto.hints import check_hint_column
from trl_explore.names import unknown_name

from .config import ExplorationConfig, upgrade_config
from .explorer_configs import HintConfig

SHARED = {spec.name for spec in fields(ExplorationConfig)}  # fields of the trainer
# Fields of the trainer that `OwnOptions.follow` does not copy. `__init__` sets them once, because an explorer reads
# them only once or needs another value. `follow` sets `success_threshold` itself, because None must become a number.
NOT_FOLLOWED = {
    "explore",
    "success_threshold",
    "advantage",
    "advantage_weights",
    "count_bonus",
    "trained_generations",
}
# By declared type of a field: the types of the values that the field accepts. Any other declared type accepts only
# its own values.
ACCEPTED: dict[Any, Any] = {
    float: (float, int),
    list: (list, tuple),
    tuple: (list, tuple),
    Sequence: (list, tuple),
    dict: Mapping,
}


class OwnOptions:
    """
    Configuration of one explorer. `args` holds the fields that all trainers share, with the values of the trainer, and
    the explorer's own fields, with the values from `explorer_options`.

    Args:
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The trainer's configuration.
        name (`str`):
            Name of the explorer.

    Raises:
        ValueError: If `explorer_options` has a wrong field or value for this explorer.
    """

    def __init__(self, args: ExplorationConfig, name: str) -> None:
        entry = EXPLORER_TABLE[name]
        given = dict(args.options_by_explorer.get(name, {}))
        _check_fields(name, given)
        self.shared = sorted(SHARED - NOT_FOLLOWED)
        # The explorer works as in its own trainer, where `explore` and its fields are not set. `count_bonus` and
        # `trained_generations` only change GRPO's rows.
        values = {**vars(args), "explore": None, "explorers": None, "explorer_options": None, "count_bonus": 0.0}
        values["trained_generations"] = None
        values["success_threshold"] = args.resolved_success_threshold
        if entry.has_own_advantages:
            # The trainer's `advantage` only changes GRPO's rows.
            values["advantage"], values["advantage_weights"] = "grpo", None
        # Do not call the constructor: it would compute fields again that have their final values already.
        self.args = object.__new__(ExplorationConfig)
        self.args.__dict__.update({**values, **entry.defaults, **given})
        try:
            self.args = upgrade_config(self.args, entry.config_class)
            self.args.validate()
        except (TypeError, ValueError) as error:
            raise ValueError(f"`explorer_options[{name!r}]`: {error}") from None

    def follow(self, args: ExplorationConfig) -> None:
        """Copy the shared fields from the trainer's configuration, because callbacks may change them."""
        for name in self.shared:
            setattr(self.args, name, getattr(args, name))
        self.args.success_threshold = args.resolved_success_threshold


def own_options(args: ExplorationConfig, *, is_agent: bool, train_dataset: Any) -> dict[str, OwnOptions]:
    """
    Return the configuration of each explorer of a run, by name.

    Args:
        args ([`~trl_explore.trainers.ExplorationConfig`]):
            The trainer's configuration.
        is_agent (`bool`):
            True if the run has tools or an environment.
        train_dataset (`Dataset` or `IterableDataset`):
            The training data. The explorer `"hints"` reads one of its columns.

    Raises:
        ValueError: If `explorers` or `explorer_options` has an unknown name or a wrong value, if an explorer does not
            suit the task, or if the data has no hints for the explorer `"hints"`.
    """
    names = explorer_names(args, is_agent=is_agent)
    options = {name: OwnOptions(args, name) for name in names}
    for name, given in args.options_by_explorer.items():
        # Also check the options of explorers that this run does not use. Otherwise, a run that does use them would be
        # the first to report a misspelt field.
        _check_fields(name, given)
    for own in options.values():
        if isinstance(own.args, HintConfig):
            check_hint_column(own.args.hint_column, train_dataset, remove_unused_columns=args.remove_unused_columns)
    return options


def explorer_names(args: ExplorationConfig, *, is_agent: bool) -> tuple[str, ...]:
    """
    Return the names of the explorers of a run. With `explore="auto"`, these are the names in `explorers`, or the
    defaults if `explorers` is None. Otherwise, the only name is the value of `explore`.

    Raises:
        ValueError: If `explorers` or `explorer_options` has an unknown name, or if an explorer does not suit the task.
    """
    field = "explorers"
    names: tuple[str, ...] = DEFAULT_EXPLORERS[is_agent]
    if args.explore != "auto":
        field, names = "explore", (args.explore or "",)
    elif args.explorers is not None:
        names = tuple(args.explorers)
    for name in names:
        _check_known(field, name)
        entry = EXPLORER_TABLE[name]
        if is_agent and not entry.agents:
            suited = [other for other, candidate in EXPLORER_TABLE.items() if candidate.agents]
            raise ValueError(
                f"`{field}`: {name!r} explores completions of a single turn, but this run has tools or an "
                f"environment: {_remedy(field, suited)}."
            )
        if not is_agent and not entry.single_turn:
            suited = [other for other, candidate in EXPLORER_TABLE.items() if candidate.single_turn]
            raise ValueError(
                f"`{field}`: {name!r} explores the turns of an agent, and this run has neither tools nor "
                f"environments: {_remedy(field, suited)}."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"`explorers={list(names)}` names an explorer twice: name each once.")
    for name in args.options_by_explorer:
        _check_known("explorer_options", name)
    return names


def _check_known(field: str, name: Any) -> None:
    """Raise ValueError if there is no explorer with this name."""
    if not isinstance(name, str) or name not in EXPLORER_TABLE:
        raise ValueError(f"`{field}`: {unknown_name('explorer', str(name), EXPLORER_TABLE)}")


def _check_fields(name: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of an explorer is unknown, refused, or has the wrong type."""
    entry, start = EXPLORER_TABLE[name], f"`explorer_options[{name!r}]`"
    own = {spec.name: spec for spec in fields(entry.config_class) if spec.name not in SHARED}
    for option, value in given.items():
        if option in entry.refused_options:
            raise ValueError(f"{start}: `{option}` cannot be set for one explorer of several: leave it out.")
        if option in SHARED:
            raise ValueError(f"{start}: `{option}` is a field of the trainer: set it there.")
        if option not in own:
            raise ValueError(f"{start}: {unknown_name('field', str(option), sorted(own))}")
        if not _has_type(value, own[option].type):
            words = getattr(own[option].type, "__name__", str(own[option].type))
            raise ValueError(f"{start}: `{option}={value!r}` has the wrong type: give a value of type `{words}`.")


def _remedy(field: str, suited: Sequence[str]) -> str:
    """Return the part of an error message that names the explorers that suit the task."""
    if field == "explorers":
        return f"choose from {', '.join(suited)}"
    return f"set `explore='auto'`, whose `explorers` can be {', '.join(suited)}, or leave `explore` out"


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the declared type of a field, `hint`. An integer may be a `float`, and a tuple may be
    a `list`. True and False are not numbers."""
    kinds: tuple[Any, ...] = (hint,)
    if isinstance(hint, UnionType):
        kinds = get_args(hint)
    for kind in kinds:
        plain: Any = get_origin(kind) or kind
        if plain is Any:
            return True
        if isinstance(value, bool):
            if plain is bool:
                return True
        elif isinstance(value, ACCEPTED.get(plain, plain)):
            return True
    return False

"""Values of a YAML document, read or refused in one sentence that names their place."""

from typing import Any

from trl_explore.runs.inputs import UsageError


def read_mapping(place: str, given: Any) -> dict[str, Any]:
    """Fields with values; nothing stands for none. `place` is their name in messages."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"{place}={given!r}: expected fields with values, got a {type(given).__name__}")
    return given


def read_number(place: str, given: Any) -> float:
    """A number, also from text, because YAML reads 2e5 as text."""
    try:
        return float(given)
    except (TypeError, ValueError):
        raise UsageError(f"{place}={given!r}: give a number") from None


def read_count(place: str, given: Any) -> int:
    """A positive integer."""
    number = read_number(place, given)
    if number < 1 or not number.is_integer():
        raise UsageError(f"{place}={given}: give an integer of at least 1")
    return int(number)

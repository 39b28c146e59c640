"""Functions that check values of a YAML document. Their UsageErrors name the value's place in the document."""

from typing import Any

from trl_explore.errors import UsageError


def read_mapping(place: str, given: Any) -> dict[str, Any]:
    """Read a mapping; a missing value is an empty mapping."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"{place}={given!r}: expected fields with values, got a {type(given).__name__}")
    return given


def read_number(place: str, given: Any) -> float:
    """Read a number."""
    try:
        return float(given)
    except (TypeError, ValueError):
        raise UsageError(f"{place}={given!r}: give a number") from None


def read_count(place: str, given: Any) -> int:
    """Read a positive integer."""
    number = read_number(place, given)
    if number < 1 or not number.is_integer():
        raise UsageError(f"{place}={given}: give an integer of at least 1")
    return int(number)

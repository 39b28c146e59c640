"""Models whose rotary factors depend on the length of the longest row of a forward pass."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Values = dict[str, Any]


def fixed_rotary_length(config: "PreTrainedConfig") -> int | None:
    """
    Return the number of tokens up to which a model always uses the same rotary factors. None if they never change.

    LongRoPE (Phi-3.5, Phi-4-mini) uses other factors for the whole forward pass as soon as a row is longer than
    `original_max_position_embeddings`. Dynamic NTK computes new factors for every row that is longer than
    `max_position_embeddings`. Keys that were computed with the old factors do not fit queries with the new ones.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of a model. The function also reads settings per layer type and nested configurations.

    Returns:
        `int` or `None`: Number of tokens of the longest row.
    """
    values = config.to_dict()
    lengths = []
    for owner, rope in _rope_settings(values, values, inside=False):
        kind = str(rope.get("rope_type") or rope.get("type"))
        longest = owner.get("max_position_embeddings") or values.get("max_position_embeddings") or 1
        if kind in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings") or owner.get("original_max_position_embeddings")
            lengths.append(original or longest)
        elif "dynamic" in kind:
            # At exactly `longest` tokens, transformers may still use the factors of an earlier, longer row.
            lengths.append(longest - 1)
    return min(lengths, default=None)


def _rope_settings(owner: Values, values: Values, *, inside: bool) -> Iterator[tuple[Values, Values]]:
    """Yield a pair for every dictionary of rotary settings in `values`: the configuration that it belongs to, and the
    dictionary. `inside` is True if a key above `values` contains "rope"."""
    if inside and ("rope_type" in values or "type" in values):
        yield owner, values
    if "max_position_embeddings" in values:
        owner = values
    for name, inner in values.items():
        if isinstance(inner, dict):
            yield from _rope_settings(owner, inner, inside=inside or "rope" in str(name))

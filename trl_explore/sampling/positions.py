"""Models whose rotary positions depend on how long the longest row of a forward pass is."""

from collections.abc import Iterator
from typing import Any

Values = dict[str, Any]


def fixed_rotary_length(config: Any) -> int | None:
    """
    Return the longest row up to which the rotary factors of a model never change, or None if they never change at all.

    LongRoPE (Phi-3.5, Phi-4-mini) takes other factors for the whole forward pass once a row is longer than
    `original_max_position_embeddings`. Dynamic NTK recomputes its factors for every longer row. Keys from before such
    a change do not fit queries after it.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of a model. Settings per layer type and of nested configurations are read, too.
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
            # At exactly `longest` tokens, transformers may still use the factors of a longer row before.
            lengths.append(longest - 1)
    return min(lengths, default=None)


def _rope_settings(owner: Values, values: Values, *, inside: bool) -> Iterator[tuple[Values, Values]]:
    """Yield every dictionary of rotary settings in `values`, with the configuration that it belongs to."""
    if inside and ("rope_type" in values or "type" in values):
        yield owner, values
    owner = values if "max_position_embeddings" in values else owner
    for name, inner in values.items():
        if isinstance(inner, dict):
            yield from _rope_settings(owner, inner, inside=inside or "rope" in str(name))

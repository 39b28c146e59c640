"""Sampling of continuations with transformers: entropies, shared prefixes, and keys and values that are kept."""

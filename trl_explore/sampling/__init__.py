"""Sampling: what happens inside `generate`."""

"""Shared prefixes computed once."""

"""Branches of completions: a branch keeps a prefix of a completion and continues it."""

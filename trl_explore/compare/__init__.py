"""Comparing methods on one budget."""

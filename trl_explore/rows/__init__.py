"""Rows of a batch: what was sampled, what it is worth, and the streams that train it."""

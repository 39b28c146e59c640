"""Saving: checkpoints, what may change between runs, Ctrl-C."""

"""Advice on a run of GRPO, read from the run's own logs."""

"""Parts of a run: its arguments, inputs, models, tasks and worker processes."""

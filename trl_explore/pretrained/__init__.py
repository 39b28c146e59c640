"""A small pretrained language model, and how a task is taught to it."""

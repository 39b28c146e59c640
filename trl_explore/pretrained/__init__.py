"""A small pretrained language model, and supervised training that teaches it a task."""

"""Jinja templates of the model cards: `base.md`, and one per method that fills its blocks."""

"""DEEP-GRPO's maths: where to branch."""

"""The maths and the explorer of DEEP-GRPO: segments of a completion, and the choice of pivots."""

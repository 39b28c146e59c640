"""The maths and the explorer of BranPO: other endings of trajectories."""

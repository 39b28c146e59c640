"""BranPO's maths: tails of trajectories."""

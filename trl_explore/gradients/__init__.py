"""G2RL's maths: gradient features and novelty."""

"""The mathematics of G2RL: gradient features of responses, and rewards that depend on their novelty."""

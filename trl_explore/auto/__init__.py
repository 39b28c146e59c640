"""The rule that chooses for each unsolved prompt how to explore it, or not to explore it."""

"""Explorers of `explore="auto"`, and the rule that chooses one of them, or none, for each unsolved prompt."""

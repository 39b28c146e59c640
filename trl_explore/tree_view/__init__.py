"""Dumped search trees, to look at."""

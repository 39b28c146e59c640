"""vLLM: what a trainer and a server agree on, and weights through files."""

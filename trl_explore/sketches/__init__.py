"""SESA: completions of a prompt that differ from each other, by lists, sketches or an agent's actions."""

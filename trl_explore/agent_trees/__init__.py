"""Trees of an agent's turns: where they grow, and what their leaves are worth."""

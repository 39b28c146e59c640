"""The maths and the explorer of Tree-GRPO for agents: trees of turns, and the advantages of their leaves."""

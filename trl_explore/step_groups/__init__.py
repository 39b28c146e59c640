"""The maths of GiGPO: groups of an agent's steps that start in the same state, and advantages inside these groups."""

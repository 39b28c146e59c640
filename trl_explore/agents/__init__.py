"""Agents: environments and their states, tools, TRL's tool loop, and branches of trajectories."""

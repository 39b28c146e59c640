"""Agents: environments, their states, trajectories, tools."""

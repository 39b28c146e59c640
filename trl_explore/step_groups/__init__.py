"""Steps of agents: which were taken in one state, and what they are worth beside each other."""

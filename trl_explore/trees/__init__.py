"""TreeGRPO: the search tree, its operations and scores, the search, token credit, records and the replay buffer."""

"""What a run's own logs say about it, and what paid where a measured run looked alike."""

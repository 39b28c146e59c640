"""Learning without labels: rewards for the majority answer and for unusual reasoning."""

"""Learning without labels: the majority's answer for right, and rewards for unusual reasoning."""

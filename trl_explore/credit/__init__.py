"""What a completion's reward is worth to the update: advantages, bonuses for rare answers, tempered tokens."""

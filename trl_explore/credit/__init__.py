"""Credit of completions: other advantages than GRPO's, bonuses for rare answers, Clip-Cov and KL-Cov."""

"""Explorers: ways of sampling completions that plain GRPO would not sample."""

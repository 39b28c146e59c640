"""Rows of a batch: their tokens, rewards and advantages, and the streams that train them."""

"""Selection of the prompts of a generation batch, and of the prompts that a method explores."""

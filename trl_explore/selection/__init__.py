"""Which prompts a generation batch is made of, and which of them a method explores."""

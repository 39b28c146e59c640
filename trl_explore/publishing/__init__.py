"""Publishing on the Hub: cards and files."""

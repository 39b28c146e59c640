"""SESA's maths: drafts and actions."""

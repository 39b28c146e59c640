"""Evaluation: samples, metrics, intervals, hard prompts."""

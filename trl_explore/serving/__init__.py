"""Sampling with vLLM: checks of a server, requests with any number of samples, and weight transfer through files."""

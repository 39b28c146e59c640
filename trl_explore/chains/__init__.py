"""The maths of TreeRL and AttnRL: chains of a prompt, where they fork, and what their tokens are worth."""

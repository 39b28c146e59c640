"""The maths and the explorers of TreeRL and AttnRL: trees of completions, their forks, and their advantages."""

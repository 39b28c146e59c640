"""The machine that a run is on: accelerators and threads."""

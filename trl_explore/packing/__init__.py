"""Training on packed rows, in which tokens that several rows share are computed once."""

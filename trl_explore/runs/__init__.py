"""What a run is made of: inputs, models, threads, processes."""

"""Detection of steps, of the training loop that runs them, and of repeated calls."""

"""Detection of steps, of the training loop that runs them, of repeated calls, and of the side effects of what a step calls."""

"""The optimizer: which kernel runs, where it updates, and in how many bits its states are kept."""

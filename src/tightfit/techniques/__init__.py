"""One folder per family, one file per technique: its options as numbers, and the code that applies it to a live model."""

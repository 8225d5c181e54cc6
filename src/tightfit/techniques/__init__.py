"""One folder per family, one file per technique: its options as numbers, and how it is put on a live model."""

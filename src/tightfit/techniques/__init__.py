"""One file, one technique: its options as numbers, and how it is put on a live model."""

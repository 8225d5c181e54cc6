"""Micro-batches of one step that are alike: traced a few times, and written to the tape again for the others."""

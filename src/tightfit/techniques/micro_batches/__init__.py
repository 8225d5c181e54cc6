"""Micro-batches, and the check that each example is computed independently."""

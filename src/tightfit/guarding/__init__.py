"""Keeps a training alive: an out-of-memory error inside of a step takes the step back, frees memory, and runs the step again."""

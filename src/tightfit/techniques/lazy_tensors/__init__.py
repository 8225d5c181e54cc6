"""Lazy tensors and gradients, whose values are computed when they are read."""

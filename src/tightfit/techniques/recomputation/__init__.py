"""Activations recomputed in the backward pass instead of saved."""

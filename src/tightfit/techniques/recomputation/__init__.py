"""Activations computed again in the backward pass instead of saved."""

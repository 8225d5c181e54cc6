"""Weights and their gradients that stay in host memory or in files and are copied to the card for their uses."""

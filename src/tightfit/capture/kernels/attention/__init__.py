"""Attention: which kernel a card runs, and the memory that it takes."""

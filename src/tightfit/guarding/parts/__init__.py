"""Batches in parts: how many examples go through forward and backward pass at once, found while a run goes on."""

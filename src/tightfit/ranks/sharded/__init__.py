"""Optimizer states of which each rank has those of its share of the parameters (ZeRO-1)."""

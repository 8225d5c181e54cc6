"""Patches of torch, Triton and other libraries in the traced process."""

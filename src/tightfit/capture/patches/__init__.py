"""Patches of torch and of other libraries in the traced process."""

"""Finds what grows from step to step, and names what keeps it: tensors by their allocation sites, names, graphs, cycles; reserved memory; the process."""

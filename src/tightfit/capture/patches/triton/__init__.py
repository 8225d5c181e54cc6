"""Triton kernels on the virtual GPU: what a kernel writes to, launches as operators, and the driver that Triton asks about the card."""

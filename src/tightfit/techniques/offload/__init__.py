"""Offload: what the card does not need for a while waits in host memory."""

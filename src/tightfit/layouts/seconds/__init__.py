"""Seconds of a step under a layout: of the parts, of a rank, and of what is streamed from the host."""

"""Searches the settings of torch's caching allocator that a recording would need least memory with."""

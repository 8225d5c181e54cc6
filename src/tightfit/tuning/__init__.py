"""Searches the settings of torch's caching allocator with which a recorded program reserves least memory."""

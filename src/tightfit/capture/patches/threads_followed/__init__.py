"""Threads of the program's own: which are followed, whose turn it is, and what of each other's work they have waited for."""

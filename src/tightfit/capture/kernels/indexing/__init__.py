"""Indexing and sorting."""

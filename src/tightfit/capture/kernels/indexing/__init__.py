"""Indexing, and the sorting that its backward pass needs."""

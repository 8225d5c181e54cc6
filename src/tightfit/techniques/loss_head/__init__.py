"""The linear head and its cross-entropy in chunks."""

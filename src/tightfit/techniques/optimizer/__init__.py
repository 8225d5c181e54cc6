"""Optimizer implementations, optimizer-in-backward, and quantised or factored optimizer states."""

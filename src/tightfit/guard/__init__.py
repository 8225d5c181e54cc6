"""Watches a real run: limits, rescue from out-of-memory errors, leaks."""

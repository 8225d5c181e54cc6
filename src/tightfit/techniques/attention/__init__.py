"""Attention without materialised scores."""

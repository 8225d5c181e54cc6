"""Applies plans to live models and to unmodified programs, and records real runs."""

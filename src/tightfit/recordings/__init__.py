"""Torch memory recordings: read without running code, rebuilt, replayed."""

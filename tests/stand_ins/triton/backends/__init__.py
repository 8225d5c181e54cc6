"""Backends of the compiler."""

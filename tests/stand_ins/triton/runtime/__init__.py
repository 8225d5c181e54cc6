"""Launches."""

from triton.runtime.driver import driver

__all__ = ["driver"]

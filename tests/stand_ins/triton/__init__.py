"""Stands in for Triton where it is not installed: how kernels are declared and launched, as triton 3.9 does it, without a compiler.

Without the virtual GPU a launch fails as it does on a machine without a card.
"""

from triton.runtime.autotuner import Config, autotune, heuristics
from triton.runtime.jit import jit

__all__ = ["Config", "autotune", "cdiv", "heuristics", "jit"]


def cdiv(x: int, y: int) -> int:
    return -(-x // y)

"""What is done before a program that only predicts is traced again, to see what it holds without gradients."""

from collections.abc import Callable

import torch


def prepare(argument: None) -> Callable[[], None]:
    """Has the program begin as it would within `torch.no_grad()`."""
    torch.set_grad_enabled(False)
    return lambda: None

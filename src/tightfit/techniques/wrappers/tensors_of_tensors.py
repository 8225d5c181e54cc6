"""Refuses parameters that are made of other tensors: DTensor, as fully_shard leaves them, or quantised ones. They have no memory of their own."""

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.errors import ApplyError


def check_plain(parameters: Iterable[torch.Tensor], technique: str) -> None:
    """Checks that none of `parameters` is.

    Raises:
        ApplyError: one is.
    """
    for parameter in parameters:
        if is_traceable_wrapper_subclass(parameter):
            raise ApplyError(
                f"{technique} does not support parameters that wrap other tensors "
                f"({type(parameter.detach()).__name__}, as fully_shard makes them); leave {technique} out of the "
                "plan"
            )

"""Reads of tensor values by Python code, and the lines of the user's code that make them."""

import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.effects.users_code import FILES_OF_OURS, FILES_OF_TORCH, is_users_file

aten = torch.ops.aten
# `Tensor.item()`, `bool()`, `int()` and `float()` end in the first; `torch.equal` compares on the device and
# returns a bool.
READS = (aten._local_scalar_dense.default, aten.equal.default)


def line_of_code() -> str:
    """The innermost line of the user's code on the stack (or else of a library's), as `train.py:12`."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        if (
            not found
            and not file.startswith((FILES_OF_OURS, FILES_OF_TORCH, "<"))
            and "lib/python" not in file.replace("site-packages", "")
        ):
            found = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def is_called_by_us(inner: types.FrameType | None = None) -> bool:
    """Whether what is called now is called by our own code, such as a check of values, and not by the program's or a library's.

    `inner` is where the look begins, with a frame of torch's protocols; without it, the caller of who asks.
    """
    frame = inner or sys._getframe(2)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(FILES_OF_TORCH) and name not in ("__torch_function__", "__torch_dispatch__"):
            return file.startswith(FILES_OF_OURS)
        frame = frame.f_back
    return False


def is_called_by_library(inner: types.FrameType) -> bool:
    """Whether torch or our own code makes the call that the frame `inner` handles, and not the program or another library."""
    caller = inner.f_back
    return caller is None or caller.f_code.co_filename.startswith((FILES_OF_TORCH, FILES_OF_OURS))


class Reads(TorchDispatchMode):
    """Records the values that a real run reads from its tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in READS and not is_called_by_us():
            self.values.append(out)
        return out

"""Files that torch and safetensors write and read in C++, which neither Python's audit hooks nor its functions for files see, told of or led to those."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from tightfit.capture.replace import replace


def before_saves(look: Callable[[Any], object]) -> None:
    """Has `look` called with the path, or whatever else it is, that `torch.save` is about to write to."""
    import torch

    real = torch.save

    @functools.wraps(real)
    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        look(f)
        real(obj, f, *arguments, **options)

    replace(torch, save=save)


def lead_saves() -> None:
    """Has `torch.save` and the functions of safetensors open their files with Python's own `open`."""
    import torch

    real = torch.save

    @functools.wraps(real)
    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            real(obj, f, *arguments, **options)
            return
        with open(f, "wb") as file:
            real(obj, file, *arguments, **options)

    replace(torch, save=save)
    with contextlib.suppress(ImportError):
        _lead_safetensors()


def _lead_safetensors() -> None:
    import safetensors.torch as library

    as_bytes, from_bytes = library.save, library.load

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as file:
            file.write(as_bytes(tensors, metadata))

    def load_file(filename: Any, device: Any = "cpu") -> Any:
        with open(filename, "rb") as file:
            return {name: tensor.to(device) for name, tensor in from_bytes(file.read()).items()}

    replace(library, save_file=save_file, load_file=load_file)

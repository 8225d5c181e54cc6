"""Files that torch and safetensors write and read in C++, which neither Python's audit hooks nor its functions for files see, told of or led to those."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from tightfit.capture.replace import replace


def before_saves(look: Callable[[Any], object]) -> None:
    """Has `look` called with the path, or whatever else it is, that torch is about to write to."""
    import torch

    owners: list[Any] = [torch, torch.jit, torch.jit.ScriptModule, torch.jit.RecursiveScriptModule]
    for owner in owners:
        replace(owner, save=_after(look, owner.save))


def _after(look: Callable[[Any], object], real: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(real)
    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        look(f)
        real(obj, f, *arguments, **options)

    return save


def lead_saves(read: Callable[[Any], Any]) -> None:
    """Has the functions of torch and safetensors write by Python's own `open`, and read what `read` gives for a path."""
    import torch

    def opened(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
            if not isinstance(f, str | os.PathLike):
                real(obj, f, *arguments, **options)
                return
            with open(f, "wb") as file:
                real(obj, file, *arguments, **options)

        return save

    def led(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def load(f: Any, *arguments: Any, **options: Any) -> Any:
            # Mapped into memory, or by C++.
            return real(read(f) if isinstance(f, str | os.PathLike) else f, *arguments, **options)

        return load

    for owner in (torch, torch.jit):
        replace(owner, save=opened(owner.save), load=led(owner.load))
    for owner in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):
        replace(owner, save=_saved_by(torch.jit.save))
    with contextlib.suppress(ImportError):
        _lead_safetensors(read)


def _saved_by(function: Callable[..., None]) -> Callable[..., None]:
    def save(module: Any, f: Any, **options: Any) -> None:
        function(module, f, **options)

    return save


def _lead_safetensors(read: Callable[[Any], Any]) -> None:
    import safetensors
    import safetensors.torch as library

    as_bytes, from_bytes = library.save, library.load

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as file:
            file.write(as_bytes(tensors, metadata))

    def load_file(filename: Any, device: Any = "cpu") -> Any:
        with open(filename, "rb") as file:
            return {name: tensor.to(device) for name, tensor in from_bytes(file.read()).items()}

    real = safetensors.safe_open

    @functools.wraps(real, updated=())
    def safe_open(filename: Any, *arguments: Any, **options: Any) -> Any:
        return real(read(filename), *arguments, **options)

    replace(library, save_file=save_file, load_file=load_file, safe_open=safe_open)
    replace(safetensors, safe_open=safe_open)

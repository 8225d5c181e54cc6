"""Runs a module so that what its backward pass needs is computed again instead of kept, with nothing else different.

`torch.utils.checkpoint` keeps the random state and autocast. Two things are added that it leaves to its caller. Buffers that a forward changes
(the running statistics of a batch norm, the vectors of a spectral norm) are swapped, for the second run, for copies of what they were before the
first, so that they change once a step and the second run sees what the first saw. And a key-value cache that a decoder hands through its
blocks is withheld: a second run would append to it again.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
# The path of a module inside, and the name of a buffer of it.
Place = tuple[str, str]

# Batch norm's operator writes to these although its schema does not say so: the tensors' versions stay as they were.
_CHANGED_UNSEEN = frozenset({"running_mean", "running_var"})


class Recomputed:
    """The code around one module's forward; `contexts` as `context_fn` of `torch.utils.checkpoint.checkpoint`.

    It refers to the module weakly, and a copy of the module takes a copy of it, so that neither keeps the other's module alive or changes it.
    """

    def __init__(self, module: torch.nn.Module, contexts: Contexts | None = None) -> None:
        self._module = weakref.ref(module)
        self._contexts = contexts
        # None until the first forward has shown which buffers it changes.
        self._changing: list[Place] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        return Recomputed(copy.deepcopy(self._owner(), memo), self._contexts)

    def _owner(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None
        return module

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        module = self._owner()
        places = self._places(module)
        versions = {place: _buffers(module, place)[place[1]]._version for place in places}
        before = _copies(module, places)
        is_second = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_second
            with _swapped(module, before) if is_second else nullcontext():
                is_second = True
                return forward(*args, **kwargs)

        extra: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
        args, kwargs = tuple(_withhold(a) for a in args), {name: _withhold(a) for name, a in kwargs.items()}
        if kwargs.get("use_cache") is True:
            kwargs["use_cache"] = False
        result = checkpoint(run, *args, use_reentrant=False, **extra, **kwargs)
        if self._changing is None:
            self._changing = [
                place
                for place, version in versions.items()
                if place[1] in _CHANGED_UNSEEN or _buffers(module, place)[place[1]]._version != version
            ]
            for place in set(before) - set(self._changing):
                del before[place]
        return result

    def _places(self, module: torch.nn.Module) -> list[Place]:
        if self._changing is not None:
            return self._changing
        return [
            (path, name)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]


def _buffers(module: torch.nn.Module, place: Place) -> dict[str, Any]:
    return module.get_submodule(place[0])._buffers


def _copies(module: torch.nn.Module, places: Sequence[Place]) -> dict[Place, torch.Tensor]:
    with torch.no_grad():
        return {place: _buffers(module, place)[place[1]].clone() for place in places}


@contextmanager
def _swapped(module: torch.nn.Module, copies: dict[Place, torch.Tensor]) -> Iterator[None]:
    now = {place: _buffers(module, place)[place[1]] for place in copies}
    for place, value in copies.items():
        _buffers(module, place)[place[1]] = value
    try:
        yield
    finally:
        for place, value in now.items():
            _buffers(module, place)[place[1]] = value


def _withhold(argument: Any) -> Any:
    """None in place of a key-value cache, which has no tensor type of its own: Hugging Face's are told by what they can do."""
    is_cache = hasattr(argument, "get_seq_length") and hasattr(argument, "update")
    return None if is_cache else argument

"""Runs a module so that what its backward pass needs is computed again instead of kept, with nothing else different.

`torch.utils.checkpoint` keeps the random state and autocast. Two things are added that it leaves to its caller. Buffers that a forward changes
(the running statistics of a batch norm, the vectors of a spectral norm) are swapped, for the second run, for copies of what they were before the
first, so that they change once a step and the second run sees what the first saw. And a key-value cache that a decoder hands through its
blocks is withheld: a second run would append to it again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Place = tuple[torch.nn.Module, str]

# Batch norm's operator writes to these although its schema does not say so: the tensors' versions stay as they were.
_CHANGED_UNSEEN = frozenset({"running_mean", "running_var"})


class Recomputed:
    """The code around one module's forward; `contexts` as `context_fn` of `torch.utils.checkpoint.checkpoint`."""

    def __init__(self, module: torch.nn.Module, contexts: Contexts | None = None) -> None:
        self._module = module
        self._contexts = contexts
        # None until the first forward has shown which buffers it changes.
        self._changing: list[Place] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        return self

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = self._copies()
        versions = {place: _buffer(place)._version for place in before}
        is_second = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_second
            with _swapped(before) if is_second else nullcontext():
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
                if _buffer(place)._version != version or place[1] in _CHANGED_UNSEEN
            ]
            for place in set(before) - set(self._changing):
                del before[place]
        return result

    def _copies(self) -> dict[Place, torch.Tensor]:
        places = self._changing
        if places is None:
            places = [
                (module, name)
                for module in self._module.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
        with torch.no_grad():
            return {place: _buffer(place).clone() for place in places}


def _buffer(place: Place) -> torch.Tensor:
    buffer = place[0]._buffers[place[1]]
    assert buffer is not None
    return buffer


@contextmanager
def _swapped(copies: dict[Place, torch.Tensor]) -> Iterator[None]:
    now = {place: _buffer(place) for place in copies}
    for (module, name), value in copies.items():
        module._buffers[name] = value
    try:
        yield
    finally:
        for (module, name), value in now.items():
            module._buffers[name] = value


def _withhold(argument: Any) -> Any:
    """None in place of a key-value cache, which has no tensor type of its own: Hugging Face's are told by what they can do."""
    is_cache = hasattr(argument, "get_seq_length") and hasattr(argument, "update")
    return None if is_cache else argument

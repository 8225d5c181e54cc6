"""What a backward pass that is made again must find as the first one found it, and leave as it was: random generators, and buffers of the model.

A pass runs code of the program's where that checkpoints blocks by itself, or has functions whose backward calls modules: those draw, and write to buffers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tightfit.effects.random_states import put_python_state, python_state
from tightfit.torch_hooks.manifest import SET_VERSIONS

_PER_CHANNEL = 1
"""Dimensions of what kernels write to without a version: running statistics (`native_batch_norm`, aten/src/ATen/native/native_functions.yaml, declares no write)."""


class RandomStates:
    """The states of the generators of torch, Python and numpy, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        has_cards = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cards = torch.cuda.get_rng_state_all() if has_cards else []
        self._python = python_state()
        self._numpy: Any = np.random.get_state(legacy=True)

    def is_same(self, other: "RandomStates") -> bool:
        """Whether both would draw the same."""
        return (
            torch.equal(self._torch, other._torch)
            and len(self._cards) == len(other._cards)
            and all(map(torch.equal, self._cards, other._cards))
            and self._python == other._python
            and self._numpy[0] == other._numpy[0]
            and np.array_equal(self._numpy[1], other._numpy[1])
            and self._numpy[2:] == other._numpy[2:]
        )

    def put(self) -> None:
        """Puts the generators back to it."""
        torch.set_rng_state(self._torch)
        if self._cards:
            torch.cuda.set_rng_state_all(self._cards)
        put_python_state(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def drawing_as(before: RandomStates | None) -> Iterator[None]:
    """Draws what was drawn from `before` on, and leaves the generators as they are; does nothing where nothing was drawn."""
    if before is None:
        yield
        return
    present = RandomStates()
    before.put()
    try:
        yield
    finally:
        present.put()


@contextmanager
def as_before(tensors: Collection[torch.Tensor]) -> Iterator[None]:
    """Restores the elements of tensors that are written to inside."""
    # A larger buffer that was never written to, such as a mask, is not saved.
    saved = [t for t in tensors if t._version or t.dim() <= _PER_CHANNEL]
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in saved]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version:
                    tensor.copy_(value)
                elif tensor.dim() <= _PER_CHANNEL:
                    # Kernels may have written to it and said nothing.
                    tensor.copy_(value)
                    SET_VERSIONS.value()((tensor,), (version,))

"""Copies in the places of a model's buffers, for runs beside the program's: a forward that writes to its buffers (a count of calls, the vectors of a spectral norm) writes to these."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Of what is copied in each call, whether or not it is written to.
_SMALL_BYTES = 1 << 18


def own_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that have a memory of their own, which a copy can stand for."""
    found = [each for each in model.buffers() if _is_plain(each)]
    every = Counter(_memory(each) for each in (*model.parameters(), *model.buffers()) if _has_memory(each))
    return [each for each in found if every[_memory(each)] == 1]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_ordinary = type(tensor) is torch.Tensor and _has_memory(tensor) and not tensor.is_inference()
    return is_ordinary and not tensor.requires_grad


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class BufferValues:
    """What the buffers of a model had in them at one time: all of them with `has_all`, else small ones."""

    def __init__(self, model: torch.nn.Module, *, has_all: bool) -> None:
        self._then: list[tuple[torch.Tensor, int, torch.Tensor | None]] = [
            (each, each._version, each.clone() if has_all or each.nbytes <= _SMALL_BYTES else None)
            for each in own_buffers(model)
        ]

    def is_any_written(self) -> bool:
        """Whether one was written to since."""
        return any(each._version != version for each, version, _ in self._then)

    @torch.no_grad()
    def put(self) -> bool:
        """Writes to those that were written to what they had; False where that is not known of one."""
        written = [(each, values) for each, version, values in self._then if each._version != version]
        for each, values in written:
            if values is not None:
                each.copy_(values)
        return all(values is not None for _, values in written)

    def knows(self, tensor: torch.Tensor | None) -> bool:
        """Whether it is one whose values are known."""
        return any(each is tensor and values is not None for each, _, values in self._then)

    def copies(self) -> dict[int, torch.Tensor]:
        """By the identity of a buffer a tensor with what it had."""
        return {id(each): values.clone() for each, _, values in self._then if values is not None}


class CopiedBuffers:
    """Copies in the places of buffers until `take_out`; with the values of `instead` where it has them, by the identity of the buffer."""

    def __init__(self, model: torch.nn.Module, instead: dict[int, torch.Tensor] | None = None) -> None:
        copies = {id(each): (each, (instead or {}).get(id(each), each).clone()) for each in own_buffers(model)}
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
            (holder, name, *copies[id(held)])
            for part in model.modules()
            # Also a plain attribute may be a buffer.
            for holder in (part._buffers, vars(part))
            for name, held in holder.items()
            if id(held) in copies
        ]
        for holder, name, _, copied in self._places:
            holder[name] = copied
        self.tensors: Sequence[torch.Tensor] = [copied for _, copied in copies.values()]

    def take_out(self) -> None:
        """Puts the buffers back, but where the run has put something else."""
        for holder, name, held, copied in self._places:
            if holder.get(name) is copied:
                holder[name] = held


@contextlib.contextmanager
def in_copies(model: torch.nn.Module, instead: dict[int, torch.Tensor] | None = None) -> Iterator[CopiedBuffers]:
    """Copies are in the places of the buffers for a block."""
    copied = CopiedBuffers(model, instead)
    try:
        yield copied
    finally:
        copied.take_out()

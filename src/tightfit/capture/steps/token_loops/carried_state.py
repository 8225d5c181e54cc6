"""What a loop carries from turn to turn: the tensors and numbers that its frame holds, also in lists, dictionaries and objects of the library.

Two snapshots say how each changes in a turn, and `carry_on` changes it as many turns would: a tensor keeps its storage on the tape and becomes as long as it
would be, with what is known of its values; a number in an object counts on. No snapshot keeps a tensor alive, as the turns free what they no longer need.
"""

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.virtual import VirtualGpu

_MAX_DEPTH = 8

Holder = Any
"""An object with attributes, a dictionary or list, None for a local of the frame, or what cannot be changed: a tuple."""
_FIXED = ()


class NotCarried(Exception):
    """A change that is not known to go on, or that cannot be made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor of the card: its geometry, and its values if they are known."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    num_bytes: int
    values: torch.Tensor | None

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes."""
        return (*self.size, *self.stride, self.offset, self.num_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """Anything else that is compared: numbers of type `kind`, or what a leaf is."""

    kind: type
    value: Any
    can_change: bool


Snapshot = Mapping[str, _Tensor | _Other]


def _parts(values: Mapping[str, Any], library: str) -> Iterator[tuple[str, Holder, Any, Any]]:
    """The leaves below `values` with their paths, what holds them and by which key. Of objects, those of `library` are looked into; modules are not."""
    waiting: list[tuple[str, Holder, Any, Any, int]] = [(name, None, name, value, 0) for name, value in values.items()]
    seen = set[int]()
    while waiting:
        path, holder, key, value, depth = waiting.pop()
        inside = None if isinstance(value, torch.Tensor) else _inside(value, library)
        if inside is None:
            yield path, holder, key, value
            continue
        if id(value) in seen:
            continue
        if depth == _MAX_DEPTH:
            raise NotCarried
        seen.add(id(value))
        yield f"{path}#", None, None, len(inside)
        within = value if isinstance(value, MutableMapping | list) or hasattr(value, "__dict__") else _FIXED
        waiting += [(f"{path}.{name}", within, name, each, depth + 1) for name, each in inside]


def _inside(value: Any, library: str) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    is_own = type(value).__module__.partition(".")[0] == library
    if not is_own or isinstance(value, torch.nn.Module | type) or not hasattr(value, "__dict__"):
        return None
    return list(vars(value).items())


def snapshot(gpu: VirtualGpu, values: Mapping[str, Any], library: str, strangers_in: frozenset[str]) -> Snapshot:
    """What is below `values` now. Below those named by `strangers_in` nothing may be of another library: the program's own code would see some turns alone.

    Raises:
        NotCarried: there is such a thing, or it is nested too deeply.
    """
    found: dict[str, _Tensor | _Other] = {}
    for path, holder, _, value in _parts(values, library):
        if type(value) is FakeTensor and value.layout == torch.strided and value.is_cuda:
            known = gpu.known_values.values(value) if gpu.known_values.known(value) else None
            with torch._C._DisableTorchDispatch():
                found[path] = _Tensor(
                    size=tuple(value.size()),
                    stride=value.stride(),
                    offset=int(value.storage_offset()),
                    dtype=value.dtype,
                    num_bytes=value.untyped_storage().nbytes(),
                    values=None if known is None else known.clone(),
                )
        elif isinstance(value, torch.Tensor):
            found[path] = _Other(kind=type(value), value=(tuple(value.size()), value.dtype), can_change=False)
        elif isinstance(value, bool | int | float | str | type(None) | torch.dtype | torch.device | torch.Size):
            found[path] = _Other(kind=type(value), value=value, can_change=holder is not _FIXED)
        else:
            if path.partition(".")[0] in strangers_in and not _is_of(type(value), library):
                raise NotCarried
            found[path] = _Other(kind=type(value), value=None, can_change=False)
    return found


def _is_of(kind: type, library: str) -> bool:
    return kind.__module__.partition(".")[0] in (library, "torch", "builtins", "tokenizers")


def carry_on(
    gpu: VirtualGpu,
    values: Mapping[str, Any],
    library: str,
    snapshots: tuple[Snapshot, Snapshot, Snapshot],
    number: int,
) -> dict[str, int | float]:
    """Changes what is below `values` as `number` turns more would, after those that the snapshots of three beginnings of turns are of, the last one now. Returns the numbers
    that are to be put in the place of some of `values` themselves.

    Raises:
        NotCarried: it does not change by the same from turn to turn. Nothing was changed then.
    """
    first, second, now = snapshots
    if not first.keys() == second.keys() == now.keys():
        raise NotCarried
    for path, leaf in now.items():
        _check(first[path], second[path], leaf)
    changes = list[tuple[FakeTensor, tuple[_Tensor, _Tensor]]]()
    numbers = dict[str, int | float]()
    done = set[int]()
    for path, holder, key, value in _parts(values, library):
        before, last = second[path], now[path]
        if isinstance(last, _Tensor):
            assert isinstance(before, _Tensor)
            if id(value) not in done:
                done.add(id(value))
                changes.append((value, (before, last)))
        elif isinstance(before, _Other) and last.value != before.value:
            later = value + number * (value - before.value)
            if holder is None:
                numbers[key] = later
            else:
                _set(holder, key, later)
    for tensor, (before, last) in changes:
        _grow(gpu, tensor, before, last, number)
    _know_again(gpu, changes, number)
    return numbers


def _check(first: _Tensor | _Other, second: _Tensor | _Other, now: _Tensor | _Other) -> None:
    if type(first) is not type(second) or type(second) is not type(now):
        raise NotCarried
    if isinstance(now, _Tensor):
        assert isinstance(first, _Tensor) and isinstance(second, _Tensor)
        same = {(len(t.size), t.dtype, t.values is None) for t in (first, second, now)}
        grown = [b - a for a, b in zip(first.numbers, second.numbers, strict=True)] if len(same) == 1 else []
        if len(same) > 1 or grown != [b - a for a, b in zip(second.numbers, now.numbers, strict=True)]:
            raise NotCarried
        return
    assert isinstance(first, _Other) and isinstance(second, _Other)
    if not first.kind is second.kind is now.kind:
        raise NotCarried
    if first.value == second.value == now.value:
        return
    is_counted = now.kind in (int, float) and now.can_change and now.value - second.value == second.value - first.value
    if not is_counted:
        raise NotCarried


def _set(holder: Holder, key: Any, value: Any) -> None:
    if isinstance(holder, MutableMapping | list):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _grow(gpu: VirtualGpu, tensor: FakeTensor, before: _Tensor, last: _Tensor, number: int) -> None:
    """Gives a tensor the geometry that it has after `number` turns more."""

    def after(then: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(b + number * (b - a) for a, b in zip(then, now, strict=True))

    size, stride = after(before.size, last.size), after(before.stride, last.stride)
    (offset,) = after((before.offset,), (last.offset,))
    # The storage stays, and with it what the tape knows it by; torch makes it as large as it must be. No operator of the program's is noted.
    arguments = (tensor, tensor.untyped_storage(), offset, size, stride)
    gpu.fake.dispatch(torch.ops.aten.set_.source_Storage_storage_offset, (FakeTensor,), arguments, {})


def _know_again(gpu: VirtualGpu, changes: Sequence[tuple[FakeTensor, tuple[_Tensor, _Tensor]]], number: int) -> None:
    """Puts the values of later turns in the place of those that were known."""
    known = [(tensor, leaves) for tensor, leaves in changes if leaves[1].values is not None]
    for tensor, _ in known:
        gpu.known_values.forget(tensor.untyped_storage()._cdata)
    for tensor, (before, last) in known:
        values = _values_after(before, last, number)
        # What a view has of a storage says nothing of the rest.
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if values is not None and is_whole and not gpu.known_values.known(tensor):
            gpu.known_values.adopt(tensor, values)


def _values_after(before: _Tensor, last: _Tensor, number: int) -> torch.Tensor | None:
    then, now = before.values, last.values
    if then is None or now is None:
        return None
    with torch._C._DisableTorchDispatch():
        grown = [dim for dim, (a, b) in enumerate(zip(before.size, last.size, strict=True)) if a != b]
        if not grown:
            return _counted(then, now, number)
        if len(grown) > 1:
            return None
        (dim,) = grown
        more = last.size[dim] - before.size[dim]
        if more <= 0 or before.size[dim] < more or not torch.equal(now.narrow(dim, 0, before.size[dim]), then):
            return None
        newest, older = now.narrow(dim, last.size[dim] - more, more), then.narrow(dim, before.size[dim] - more, more)
        added = [_counted(older, newest, turn) for turn in range(1, number + 1)]
        found = [each for each in added if each is not None]
        return torch.cat([now, *found], dim) if len(found) == number else None


def _counted(then: torch.Tensor, now: torch.Tensor, number: int) -> torch.Tensor | None:
    if torch.equal(then, now):
        return now
    if now.dtype == torch.bool or now.is_floating_point() or now.is_complex():
        return None
    return now + number * (now - then)

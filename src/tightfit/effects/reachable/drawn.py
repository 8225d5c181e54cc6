"""Objects that give another value each time, and arrays: generators of random numbers, iterators, Python generators, numpy arrays.

Such an object has a position or a content that can be read and compared; some can be put back, an iterator cannot.
"""

import dataclasses
import functools
import gc
import io
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tightfit.effects.holders import PLAIN
from tightfit.effects.reachable.classes_of_libraries import BAGS
from tightfit.effects.reachable.opaque import State, position, state_of
from tightfit.effects.users_code import module_of

_LARGEST_ARRAY_BYTES = 1 << 16
# Of a larger array this many elements are looked at, and the sum of all words up to the second size: a counter among them changes it.
_NUM_SAMPLES = 4_096
_LARGEST_SUMMED_BYTES = 1 << 26
_MAX_OBJECTS = 10_000
_MOST_COMPARED_OBJECTS = 1 << 20
_OF_NUMPY = np.random.Generator | np.random.RandomState | np.random.BitGenerator
# Iterators that say how many items are left.
_ITERATORS = (type(iter([])), type(iter(())), type(iter(range(0))), type(reversed([])), type(itertools.repeat(0, 0)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """An object that gives another value each time, such as a random generator. `put` is None if it cannot be rewound, or not while a region runs again
    that others draw beside; `rewind` is for a step that is taken back as a whole. `memory` is where an array's content lies, address and bytes, as tensors may share it."""

    path: str
    key: int
    state: Callable[[], Any]
    put: Callable[[Any], None] | None
    memory: tuple[int, int] = (0, 0)
    rewind: Callable[[Any], None] | None = None


def drawn(path: str, value: Any, *, is_users_class: Callable[[type], bool]) -> Drawn | None:
    """How the position of `value` is read; None if it is not an object of this kind."""
    found = _state_and_put(value, is_users_class)
    memory = (value.ctypes.data, value.nbytes) if isinstance(value, np.ndarray) else (0, 0)
    if found is None:
        return None
    rewind = (lambda state: _put_bits(value, state)) if isinstance(value, _OF_NUMPY) else None
    return Drawn(path=path, key=id(value), state=found[0], put=found[1], memory=memory, rewind=rewind)


def hidden(path: str, value: Any) -> Drawn:
    """An object with a state in C, as what it would be made again with; one that cannot tell looks changed at each look."""
    return Drawn(path=path, key=id(value), state=lambda: position(value), put=None)


def _state_and_put(value: Any, is_users_class: Callable[[type], bool]) -> State | None:
    if isinstance(value, torch.Generator | _OF_NUMPY):
        return _state_of_chance(value)
    if isinstance(value, np.ndarray):
        return _state_of_array(value)
    if isinstance(value, types.GeneratorType):
        return lambda: _place(value), None
    if isinstance(value, (itertools.count, *_ITERATORS)):
        return value.__repr__ if isinstance(value, itertools.count) else lambda: operator.length_hint(value), None
    is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
    read = state_of(value)
    is_other = read is None and is_iterator and _is_librarys(type(value), is_users_class)
    return _state_of_iterator(value) if is_other else read


def _state_of_iterator(value: Iterator[Any]) -> State:
    if not type(value).__dictoffset__:
        # In C, such as a reader of CSV, a cursor of a database, or a reader of batches of Arrow's.
        return lambda: position(value), None
    # Such as that of a DataLoader: what it counts is among its attributes.
    return lambda: {name: own for name, own in vars(value).items() if isinstance(own, PLAIN)}, None


def _state_of_chance(value: Any) -> State:
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().numpy().tobytes(), lambda content: _put_torch(value, content)
    return lambda: _Bits(_bits_of(value)), None


class _Bits:
    """The state of a generator of numpy's: what it gives is compared as text, as arrays in it have no one answer."""

    __slots__ = ("state", "text")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, state: Any) -> None:
        self.state = state
        inner = state["state"]
        self.text = (
            (inner["pos"], inner["key"].tobytes(), repr({**state, "state": 0})) if "pos" in inner else repr(state)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and self.text == other.text


def _bits_of(value: Any) -> Any:
    if isinstance(value, np.random.RandomState):
        # With the second of two normal numbers, which it keeps.
        return value.get_state(legacy=False)
    return (value.bit_generator if isinstance(value, np.random.Generator) else value).state


def _put_bits(value: Any, bits: _Bits) -> None:
    if isinstance(value, np.random.RandomState):
        value.set_state(bits.state)
    else:
        (value.bit_generator if isinstance(value, np.random.Generator) else value).state = bits.state


def _seeds_of(value: Any) -> list[Any]:
    """What generators that one of numpy's makes of itself are counted by."""
    if isinstance(value, np.random.RandomState):
        value = value._bit_generator  # type: ignore[attr-defined]
    elif isinstance(value, np.random.Generator):
        value = value.bit_generator
    seeds = value.seed_seq if isinstance(value, np.random.BitGenerator) else None
    return [seeds] if isinstance(seeds, np.random.SeedSequence) else []


def _state_of_array(value: np.ndarray) -> State:
    is_of_objects = value.dtype == object and value.size <= _MOST_COMPARED_OBJECTS
    if value.nbytes > _LARGEST_ARRAY_BYTES and not is_of_objects:
        return functools.partial(_digest, value), None
    if isinstance(value, np.ma.MaskedArray):
        # Whether it has a mask, and shares it, is not put back.
        return lambda: (
            np.ma.getdata(value).tobytes(),
            np.ma.getmaskarray(value).tobytes(),
            value.mask is np.ma.nomask,
        ), None
    if value.dtype == object:
        return lambda: _Objects(value.ravel().tolist()), lambda content: _put_objects(value, content)
    if value.dtype.hasobject:
        return value.tobytes, None
    return value.tobytes, lambda content: _put_array(value, content)


def _is_librarys(kind: type, is_users_class: Callable[[type], bool]) -> bool:
    """Whether a class is of a library: the iterators of the user's own classes are looked through like other objects."""
    # A mock says yes to every protocol, and is a bag of attributes.
    return not (module_of(kind).partition(".")[0] == "tightfit" or module_of(kind) in BAGS or is_users_class(kind))


def _place(generator: types.GeneratorType) -> Any:
    """Where a generator waits. The iterators of its loops have no name: they lie on its stack, which the garbage collector sees."""
    frame = generator.gi_frame
    if frame is None:
        return None
    # Up to Python 3.10 the frame holds the stack, from 3.11 on the generator.
    on_stack = (*gc.get_referents(generator), *gc.get_referents(frame))
    inner = [_place(o) if isinstance(o, types.GeneratorType) else position(o) for o in on_stack if _moves_on(o)]
    return frame.f_lasti, repr(frame.f_locals), inner


def _moves_on(value: Any) -> bool:
    return isinstance(value, types.GeneratorType) or (
        isinstance(value, Iterator) and module_of(type(value)) in ("builtins", "itertools")
    )


def _digest(array: np.ndarray) -> Any:
    samples = array.flat[:: max(1, array.size // _NUM_SAMPLES)].tobytes()
    if array.nbytes > _LARGEST_SUMMED_BYTES or array.dtype.hasobject or isinstance(array, np.memmap):
        return samples
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    return samples, int(words.sum(dtype=np.uint64)), flat[words.nbytes :].tobytes()


class _Objects(tuple[Any, ...]):
    """Objects that are compared by identity: as they are, two arrays have no one answer."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Objects) and len(self) == len(other) and all(map(operator.is_, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def objects_of(value: Any) -> list[Any]:
    """The objects that an array of numpy's refers to, the first of them where it has many; of a generator what counts those made of it."""
    is_array = isinstance(value, np.ndarray) and value.dtype == object
    return value.ravel()[:_MAX_OBJECTS].tolist() if is_array else _seeds_of(value)


def _put_objects(array: np.ndarray, content: _Objects) -> None:
    for number, each in enumerate(content):
        array.flat[number] = each


def _put_array(array: np.ndarray, content: bytes) -> None:
    np.copyto(array, np.frombuffer(content, array.dtype).reshape(array.shape))


def _put_torch(generator: torch.Generator, content: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))

"""The states of Python's and numpy's global random generators, read in under a microsecond, since every forward is checked; with those of torch too.

Both are Mersenne Twisters, 624 words and a position. Their public readers build a tuple or an array each time (16 and 56 microseconds measured
on one core of a small server); the words themselves are copied here instead, from where the public reader is first seen to find them.
"""

import ctypes
import dataclasses
import random
from typing import Any

import numpy as np
import torch

_NUM_WORDS = 624
_NUM_BYTES = 4 * (_NUM_WORDS + 1)
# CPython, Modules/_randommodule.c, RandomObject: the object's head, the position, the words.
_PYTHON_ADDRESS = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]


def _python_words() -> bytes:
    return ctypes.string_at(_PYTHON_ADDRESS, _NUM_BYTES)


def _is_where_expected() -> bool:
    *words, position = random.getstate()[1]
    return np.frombuffer(_python_words(), dtype=np.uint32).tolist() == [position, *words]


# Seen once at import: another interpreter, or a build of Python with another layout of objects, falls back to
# the public readers.
_READS_MEMORY = (
    object.__basicsize__ + _NUM_BYTES <= type(random._inst).__mro__[1].__basicsize__ and _is_where_expected()
)  # type: ignore[attr-defined]


def python_state() -> Any:
    """The state for `put_python_state`; equal if and only if the generator would draw the same."""
    if not _READS_MEMORY:
        return random.getstate()
    return _python_words(), random._inst.gauss_next  # type: ignore[attr-defined]


def put_python_state(state: Any) -> None:
    """Restores Python's generator to `state`."""
    if _READS_MEMORY:
        content, gauss = state
        position, *words = np.frombuffer(content, dtype=np.uint32).tolist()
        state = (random.Random.VERSION, (*words, position), gauss)
    random.setstate(state)


class NumpyState:
    """Reads the state of numpy's global generator.

    A legacy normal draw may take the second half of an earlier pair, which changes no word: as long as no draw was seen, comparing the words is
    enough; after one was seen, the whole state is read each time.
    """

    def __init__(self) -> None:
        self._words = b""
        self._state: Any = None
        self._generator: Any = None
        self._address = 0
        self.is_drawn_from = False

    def get(self) -> Any:
        """Equal by `same` if and only if the generator would draw the same."""
        generator = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
        # `np.random.set_state` and `np.random.seed` keep the kind; a program can set another one
        # (`np.random.set_bit_generator`).
        if type(generator) is not np.random.MT19937:
            return np.random.get_state(legacy=False)
        if generator is not self._generator:
            self._generator, self._address = generator, generator.ctypes.state_address
        words = ctypes.string_at(self._address, _NUM_BYTES)
        if self.is_drawn_from or words != self._words:
            self._words, self._state = words, np.random.get_state(legacy=False)
        return self._state

    def put(self, state: Any) -> None:
        """Restores numpy's generator to `state`."""
        np.random.set_state(state)

    def same(self, one: Any, other: Any) -> bool:
        """Whether two states are equal."""
        if one is other:
            return True
        same = _frozen(one) == _frozen(other)
        self.is_drawn_from |= not same
        return same


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _frozen(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


numpy_state = NumpyState()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchRandom:
    """The states of torch's generators: of the host, and of each card that was used."""

    host: torch.Tensor
    cards: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> "TorchRandom":
        """The states now."""
        cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return cls(host=torch.get_rng_state(), cards=tuple(cards))

    def is_same(self, other: "TorchRandom") -> bool:
        """Whether both would draw the same."""
        mine, others = (self.host, *self.cards), (other.host, *other.cards)
        return len(mine) == len(others) and all(map(torch.equal, mine, others))

    def put(self) -> None:
        """Makes them the states again."""
        torch.set_rng_state(self.host)
        if self.cards:
            torch.cuda.set_rng_state_all(list(self.cards))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllRandom:
    """The states of all generators that code of the program's may draw from without naming one."""

    torch_states: TorchRandom
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "AllRandom":
        """The states now."""
        return cls(torch_states=TorchRandom.now(), python=python_state(), numpy=numpy_state.get())

    def put(self) -> None:
        """Makes them the states again."""
        self.torch_states.put()
        put_python_state(self.python)
        if not numpy_state.same(numpy_state.get(), self.numpy):
            numpy_state.put(self.numpy)

    def is_same(self, other: "AllRandom") -> bool:
        """Whether both would draw the same."""
        return (
            self.python == other.python
            and numpy_state.same(self.numpy, other.numpy)
            and self.torch_states.is_same(other.torch_states)
        )

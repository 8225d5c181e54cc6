"""Counters in places of all kinds, that change a block in every seventh call alone: no comparison of the first steps sees them."""

import array
import collections
import ctypes
import dataclasses
import enum
import io
import itertools
import queue
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

Count = Callable[[], int]


def _trained(t: Trial, make: Callable[[], Count]) -> None:
    """Five steps with blocks that are given a counter each."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.count = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 if self.count() % 7 else 0.25
            return x + self.inner(x * scale)

    train(t, Net([Counting(), Counting()]), num_steps=9)


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass without a `__dict__`."""

    calls: int = 0

    def take(self) -> int:
        self.calls += 1
        return self.calls


@attack("recomputation", "a counter in a dataclass with slots, effective in every seventh call")
def seldom_in_slots(t: Trial) -> None:
    _trained(t, lambda: Slotted().take)


@attack("recomputation", "an itertools.cycle of seven, of which one counts")
def seldom_in_cycle(t: Trial) -> None:
    def make() -> Count:
        numbers = itertools.cycle(range(7))
        return lambda: next(numbers)

    _trained(t, make)


@attack("recomputation", "an itertools.cycle of seven, given to the block as it is")
def seldom_in_cycle_of_block(t: Trial) -> None:
    class Cycling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([1.0] * 6 + [0.25])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * next(self.scales))

    train(t, Net([Cycling(), Cycling()]), num_steps=9)


@attack("recomputation", "a map over a count, given to the block as it is")
def seldom_in_map(t: Trial) -> None:
    class Mapped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = map(lambda n: 0.25 if n % 7 == 6 else 1.0, itertools.count())  # noqa: C417

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * next(self.scales))

    train(t, Net([Mapped(), Mapped()]), num_steps=9)


@attack("recomputation", "a counter as an attribute of a function, effective in every seventh call")
def seldom_on_function(t: Trial) -> None:
    def make() -> Count:
        def take() -> int:
            take.calls += 1  # type: ignore[attr-defined]
            return take.calls  # type: ignore[attr-defined]

        take.calls = 0  # type: ignore[attr-defined]
        return take

    _trained(t, make)


@attack("recomputation", "a counter on a helper class, effective in every seventh call")
def seldom_on_class(t: Trial) -> None:
    class Statistics:
        calls = 0

        @classmethod
        def take(cls) -> int:
            cls.calls += 1
            return cls.calls

    _trained(t, lambda: Statistics.take)


@attack("recomputation", "a counter on a helper class that the forward names, effective in every seventh call")
def seldom_on_named_class(t: Trial) -> None:
    class Statistics:
        calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Statistics.calls += 1
            return x + self.inner(x * (1.0 if Statistics.calls % 7 else 0.25))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter on an enum's member, effective in every seventh call")
def seldom_on_enum(t: Trial) -> None:
    class Kind(enum.Enum):
        PLAIN = 1

    Kind.PLAIN.calls = 0  # type: ignore[attr-defined]

    def take() -> int:
        Kind.PLAIN.calls += 1  # type: ignore[attr-defined]
        return Kind.PLAIN.calls  # type: ignore[attr-defined]

    _trained(t, lambda: take)


@attack("recomputation", "a counter in an array.array, effective in every seventh call")
def seldom_in_array(t: Trial) -> None:
    def make() -> Count:
        numbers = array.array("l", [0])

        def take() -> int:
            numbers[0] += 1
            return numbers[0]

        return take

    _trained(t, make)


@attack("recomputation", "a counter in a bytearray, effective in every seventh call")
def seldom_in_bytes(t: Trial) -> None:
    def make() -> Count:
        numbers = bytearray(1)

        def take() -> int:
            numbers[0] = (numbers[0] + 1) % 7
            return numbers[0]

        return take

    _trained(t, make)


@attack("recomputation", "a queue of seven numbers that is rotated (queue.Queue)")
def seldom_in_queue(t: Trial) -> None:
    def make() -> Count:
        numbers: queue.Queue[int] = queue.Queue()
        for number in range(1, 8):
            numbers.put(number)

        def take() -> int:
            number = numbers.get()
            numbers.put(number)
            return number

        return take

    _trained(t, make)


@attack("recomputation", "a collections.Counter of calls by name")
def seldom_in_counter(t: Trial) -> None:
    def make() -> Count:
        counts: collections.Counter[str] = collections.Counter()

        def take() -> int:
            counts["calls"] += 1
            return counts["calls"]

        return take

    _trained(t, make)


@attack("recomputation", "a log in an io.StringIO, whose length decides")
def seldom_in_log(t: Trial) -> None:
    def make() -> Count:
        log = io.StringIO()

        def take() -> int:
            log.write(".")
            return log.tell()

        return take

    _trained(t, make)


@attack("recomputation", "a counter in a C integer (ctypes)")
def seldom_in_ctypes(t: Trial) -> None:
    def make() -> Count:
        number = ctypes.c_int(0)

        def take() -> int:
            number.value += 1
            return number.value

        return take

    _trained(t, make)


@attack("recomputation", "a counter in a tensor that is written through its numpy view")
def seldom_in_numpy_view(t: Trial) -> None:
    def make() -> Count:
        number = torch.zeros(1, dtype=torch.long)
        view = number.numpy()

        def take() -> int:
            view[0] += 1
            return int(number[0])

        return take

    _trained(t, make)


@attack("recomputation", "a counter in a buffer that is written through its numpy view, which nobody keeps")
def seldom_in_buffer_by_numpy(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.numpy()[0] += 1
            return x + self.inner(x * (1.0 if int(self.calls) % 7 else 0.25))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter in a buffer that is written through .data, effective in every seventh call")
def seldom_in_buffer_data(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.data += 1
            return x + self.inner(x * (1.0 if int(self.calls) % 7 else 0.25))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter in a Python module of the program's own, reached by getattr")
def seldom_in_module(t: Trial) -> None:
    state = types.ModuleType("state_of_attack")
    state.calls = 0  # type: ignore[attr-defined]
    sys.modules["state_of_attack"] = state

    def take() -> int:
        import state_of_attack

        state_of_attack.calls += 1
        return state_of_attack.calls

    try:
        _trained(t, lambda: take)
    finally:
        del sys.modules["state_of_attack"]


@attack("recomputation", "a counter in a numpy structured scalar, and one in a list three objects deep")
def seldom_deep(t: Trial) -> None:
    class Inner:
        def __init__(self) -> None:
            self.box = {"numbers": [np.zeros(1, dtype=[("calls", "i8")])]}

    class Outer:
        def __init__(self) -> None:
            self.inner = Inner()

        def __call__(self) -> int:
            cell = self.inner.box["numbers"][0]
            cell["calls"] += 1
            return int(cell["calls"][0])

    _trained(t, Outer)


@attack("recomputation", "an object whose counting method is found by __getattr__ of a wrapper")
def seldom_behind_wrapper(t: Trial) -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            object.__setattr__(self, "_inner", inner)

        def __getattr__(self, name: str) -> Any:
            return getattr(object.__getattribute__(self, "_inner"), name)

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Wrapper(Slotted())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * (1.0 if self.counter.take() % 7 else 0.25))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a coroutine-like generator that is sent values (a PID controller)")
def seldom_in_sent_generator(t: Trial) -> None:
    def controller() -> Any:
        total = 0
        while True:
            total += yield total

    def make() -> Count:
        running = controller()
        next(running)
        return lambda: running.send(1)

    _trained(t, make)


@attack("clean", "a random.SystemRandom that the block holds and does not use")
def system_random_held(t: Trial) -> None:
    class Holding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.dice = random.SystemRandom()

    train(t, Net([Holding(), Holding()]))

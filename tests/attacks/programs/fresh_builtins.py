"""Counters on subclasses of built-in types, in large containers, and behind bound methods of built-in objects: effective in every seventh call."""

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


def _seldom(calls: int) -> float:
    return 0.25 if calls % 7 == 6 else 1.0


def _trained(t: Trial, make: Callable[[], Callable[[], int]]) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.count = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * _seldom(self.count()))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter as an attribute of a parameter")
def counted_on_parameter(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide.weight.calls = 0  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.wide.weight.calls += 1  # type: ignore[attr-defined]
            return x + self.inner(x * _seldom(self.wide.weight.calls))  # type: ignore[attr-defined]

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter as an attribute of a list's subclass")
def counted_on_list(t: Trial) -> None:
    class Log(list[float]):
        calls = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.log = Log([1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log.calls += 1
            return x + self.inner(x * _seldom(self.log.calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter as an attribute of a configuration that is a dict's subclass")
def counted_on_dict(t: Trial) -> None:
    class Settings(dict[str, float]):
        pass

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings(scale=1.0)
            self.settings.calls = 0  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.settings.calls += 1  # type: ignore[attr-defined]
            return x + self.inner(x * _seldom(self.settings.calls))  # type: ignore[attr-defined]

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a tensor's subclass with a counter as its attribute")
def counted_on_tensor(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(WIDTH)
            self.table.calls = 0  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.calls += 1  # type: ignore[attr-defined]
            return x + self.inner(x * self.table * _seldom(self.table.calls))  # type: ignore[attr-defined]

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "one number of a list of two thousand counts")
def counted_in_long_list(t: Trial) -> None:
    def make() -> Callable[[], int]:
        counts = [0] * 2_000

        def take() -> int:
            counts[5] += 1
            return counts[5]

        return take

    _trained(t, make)


@attack("recomputation", "one entry of a vocabulary of two thousand words counts")
def counted_in_large_dict(t: Trial) -> None:
    def make() -> Callable[[], int]:
        counts = {f"word{number}": 0 for number in range(2_000)}

        def take() -> int:
            counts["word7"] += 1
            return counts["word7"]

        return take

    _trained(t, make)


@attack("recomputation", "one number of a list of fifty thousand counts")
def counted_in_very_long_list(t: Trial) -> None:
    def make() -> Callable[[], int]:
        counts = [0] * 50_000

        def take() -> int:
            counts[12_345] += 1
            return counts[12_345]

        return take

    _trained(t, make)


@attack("recomputation", "one number of an array of 800 KB counts")
def counted_in_large_array(t: Trial) -> None:
    def make() -> Callable[[], int]:
        counts = np.zeros(100_000)

        def take() -> int:
            counts[1_235] += 1
            return int(counts[1_235])

        return take

    _trained(t, make)


@attack("recomputation", "one number of a tensor that is no buffer, by its numpy view")
def counted_past_torch(t: Trial) -> None:
    def make() -> Callable[[], int]:
        counts = torch.zeros(1_000)
        view = counts.numpy()

        def take() -> int:
            view[3] += 1
            return int(counts[3])

        return take

    _trained(t, make)


@attack("recomputation", "the bound pop of a list, kept as the block's function")
def bound_pop(t: Trial) -> None:
    class Popping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.take = [1.0, 0.25] * 50
            self.take = self.take.pop  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.take())  # type: ignore[operator]

    train(t, Net([Popping(), Popping()]), num_steps=5)


@attack("recomputation", "the bound __next__ of a count, and an operator that writes to a dict")
def bound_next(t: Trial) -> None:
    _trained(t, lambda: itertools.count().__next__)


@attack("recomputation", "a defaultdict whose factory counts")
def counting_factory(t: Trial) -> None:
    class Naming(Block):
        def __init__(self) -> None:
            super().__init__()
            self.numbers: dict[int, int] = collections.defaultdict(itertools.count().__next__)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            number = self.numbers[len(self.numbers)]
            return x + self.inner(x * (1 + 0.1 * number))

    train(t, Net([Naming(), Naming()]), num_steps=5)


@attack("recomputation", "a generator that loops over a list of equal numbers")
def looping_generator(t: Trial) -> None:
    def scales() -> Iterator[float]:
        for scale in [1.0] * 6 + [0.25]:
            yield scale * 1.0

    class Drawing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales: Iterator[float] = itertools.cycle([1.0])
            self.left = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = next(self.scales)
            return x + self.inner(x * scale)

    def endless() -> Iterator[float]:
        while True:
            yield from scales()

    model = Net([Drawing(), Drawing()])
    for block in model.blocks:
        block.scales = endless()  # type: ignore[union-attr, assignment]
    train(t, model, num_steps=9)


@attack("recomputation", "attributes of a partial, and of a method's own function")
def counted_on_partial(t: Trial) -> None:
    def scaled(scale: float, x: torch.Tensor) -> torch.Tensor:
        return x * scale

    class Partial(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = functools.partial(scaled, 0.5)
            self.scaled.calls = 0  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scaled.calls += 1  # type: ignore[attr-defined]
            return x + self.inner(self.scaled(x) * _seldom(self.scaled.calls))  # type: ignore[attr-defined]

    train(t, Net([Partial(), Partial()]), num_steps=9)


class Outside(nn.Module):
    """A module that blocks reach by a tuple, so that it is not their child."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = {"counts": {"calls": 0}}
        self.inner = nn.Identity()
        self.inner.calls = 0  # type: ignore[assignment]


@attack("recomputation", "nested dicts of a module that the block holds in a tuple count")
def counted_in_module_outside(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.outside = (Outside(),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts = self.outside[0].statistics["counts"]
            counts["calls"] += 1
            return x + self.inner(x * _seldom(counts["calls"]))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "the child of a module that the block holds in a tuple counts")
def counted_in_child_outside(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.outside = (Outside(),)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner: Any = self.outside[0].inner
            inner.calls += 1
            return x + self.inner(x * _seldom(inner.calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "an attrgetter and a methodcaller reach the counter")
def counted_by_methodcaller(t: Trial) -> None:
    class Meter:
        def __init__(self) -> None:
            self.calls = 0

        def take(self) -> int:
            self.calls += 1
            return self.calls

    meters: dict[str, Meter] = {}
    take = operator.methodcaller("take")

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.name = f"block{len(meters)}"
            meters[self.name] = Meter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * _seldom(take(meters[self.name])))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a frozen set's member, a dict's key and a tuple's item count")
def counted_on_members(t: Trial) -> None:
    class Key:
        calls = 0

    keys = frozenset({Key()})
    table = {Key(): 1.0}

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for key in (*keys, *table):
                key.calls += 1
            return x + self.inner(x * _seldom(sum(key.calls for key in (*keys, *table)) // 2))

    train(t, Net([Counting(), Counting()]), num_steps=9)


_TOTAL = {"calls": 0}


class _Meter:
    def take(self) -> int:
        _TOTAL["calls"] += 1
        return _TOTAL["calls"]

    def __getitem__(self, number: int) -> float:
        return _seldom(self.take() + number)


@attack("recomputation", "a helper's method counts in a global that only it names")
def counted_by_helper(t: Trial) -> None:
    _TOTAL["calls"] = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.meter = _Meter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * _seldom(self.meter.take()))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a helper's operator [] counts in a global that only it names")
def counted_by_item(t: Trial) -> None:
    _TOTAL["calls"] = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.meter = _Meter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.meter[0])

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "the block's own __getattr__ counts")
def counted_by_getattr(t: Trial) -> None:
    _TOTAL["calls"] = 0

    class Counting(Block):
        def __getattr__(self, name: str) -> Any:
            if name == "scale":
                _TOTAL["calls"] += 1
                return _seldom(_TOTAL["calls"])
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.scale)

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "an OrderedDict keeps what was used last at its end")
def least_recently_used(t: Trial) -> None:
    class Recent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = collections.OrderedDict({name: 1.0 / (number + 1) for number, name in enumerate("abcdefg")})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            name = next(iter(self.scales))
            self.scales.move_to_end(name)
            return x + self.inner(x * self.scales[name])

    train(t, Net([Recent(), Recent()]), num_steps=5)


@attack("recomputation", "a class attribute of another kind: a tuple and a Fraction are replaced")
def replaced_on_class(t: Trial) -> None:
    from fractions import Fraction

    class Counting(Block):
        state = (0, Fraction(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls, part = type(self).state
            type(self).state = (calls + 1, part * Fraction(9, 10))
            return x + self.inner(x * _seldom(calls + 1) * float(part))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a hash object takes in every call")
def hashed_calls(t: Trial) -> None:
    import hashlib

    class Hashing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.hash = hashlib.sha256()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hash.update(b"call")
            return x + self.inner(x * (1.0 + self.hash.digest()[0] / 256))

    train(t, Net([Hashing(), Hashing()]), num_steps=5)


@attack("recomputation", "a file is read on, line by line")
def read_from_file(t: Trial) -> None:
    import tempfile

    with tempfile.TemporaryFile("w+") as file:
        file.write("".join(f"{1 + number % 7}\n" for number in range(200)))
        file.seek(0)

        class Reading(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.inner(x * float(file.readline()))

        train(t, Net([Reading(), Reading()]), num_steps=5)


@attack("recomputation", "a semaphore for seven calls is taken")
def synchronised(t: Trial) -> None:
    import threading

    class Signalling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.left = threading.Semaphore(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * (1.0 if self.left.acquire(blocking=False) else 0.25))

    train(t, Net([Signalling(), Signalling()]), num_steps=11)


@attack("recomputation", "the three-hundredth of many helpers counts")
def counted_in_many(t: Trial) -> None:
    class Helper:
        calls = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.helpers = [Helper() for _ in range(400)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.helpers[300].calls += 1
            return x + self.inner(x * _seldom(self.helpers[300].calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a compressor and a csv reader keep their place")
def streamed_parts(t: Trial) -> None:
    import csv
    import zlib

    class Streaming(Block):
        def __init__(self) -> None:
            super().__init__()
            self.compress = zlib.compressobj()
            self.rows = csv.reader([f"{1 + number % 5}" for number in range(200)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = len(self.compress.compress(bytes(range(256)) * 40) + self.compress.flush(zlib.Z_SYNC_FLUSH))
            return x + self.inner(x * (size % 97) / 97 * float(next(self.rows)[0]))

    train(t, Net([Streaming(), Streaming()]), num_steps=5)


@attack("recomputation", "the block writes to a buffer by a view of it that is an attribute")
def written_by_kept_view(t: Trial) -> None:
    class Viewing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("room", torch.zeros(4))
            self.first = self.room[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.add_(1)
            return x + self.inner(x * _seldom(int(self.room.sum())))

    train(t, Net([Viewing(), Viewing()]), num_steps=9)


@attack("recomputation", "the block writes to a buffer of its own that the other block reads as an attribute")
def written_by_other_block(t: Trial) -> None:
    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.room.add_(1)
            return x + self.inner(x * _seldom(int(self.room[1:].sum() + self.other.room[0])))

    model = Net([Reading(), Reading()])
    one, two = model.blocks
    for block in (one, two):
        block.register_buffer("room", torch.zeros(2))
    object.__setattr__(one, "other", two)
    object.__setattr__(two, "other", one)
    train(t, model, num_steps=9)


@attack("recomputation", "a tensor that numpy reads is written to by torch")
def read_by_numpy(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.counts = torch.zeros(3)
            self.view = self.counts.numpy()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts.add_(1)
            return x + self.inner(x * _seldom(int(self.view[1])))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a view of a view, made anew in every call from a list of tensors, is written to")
def written_in_list(t: Trial) -> None:
    class Listing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rooms = [torch.zeros(4), torch.ones(4)]
            self.rooms.append(self.rooms[0][1:3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rooms[2][0].add_(1)
            return x + self.inner(x * _seldom(int(self.rooms[0].sum())))

    train(t, Net([Listing(), Listing()]), num_steps=9)

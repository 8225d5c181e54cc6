"""Programs that exchange code later, past the names that it is called by: defaults, bases, methods of libraries and of Python, the class of an object. What comes in its place counts."""

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

_LATE = 2
Tensor = torch.Tensor


def _counting() -> Callable[[Tensor], Tensor]:
    calls = []

    def late(x: Tensor) -> Tensor:
        calls.append(None)
        return x * (1 + 0.1 * len(calls))

    return late


def _plain(x: Tensor) -> Tensor:
    return x


def _run(
    t: Trial, block: Callable[[], nn.Module], exchange: Callable[[], Any], undo: Callable[[], Any] = lambda: None
) -> None:
    def before(step: int) -> None:
        if step == _LATE:
            exchange()

    try:
        train(t, Net([block(), block()]), num_steps=5, before=before)
    finally:
        undo()


@attack("changes", "the default of a function's argument is another function from step 3 on", only=EXACT)
def other_defaults(t: Trial) -> None:
    def act(
        x: Tensor, way: Callable[[Tensor], Tensor] = _plain, *, last: Callable[[Tensor], Tensor] = _plain
    ) -> Tensor:
        return last(way(x))

    class Acting(Block):
        def inner(self, x: Tensor) -> Tensor:
            return act(super().inner(x))

    def exchange() -> None:
        act.__defaults__ = (_counting(),)
        act.__kwdefaults__ = {"last": _counting()}

    _run(t, Acting, exchange)


@attack("changes", "a base's method, to which super() leads, is another one from step 3 on", only=EXACT)
def other_base_method(t: Trial) -> None:
    class Middle(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    class Child(Middle):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.0

    late = _counting()
    _run(t, Child, lambda: setattr(Middle, "forward", lambda self, x: x + late(self.inner(x))))


@attack("changes", "a class has another base from step 3 on", only=EXACT)
def other_bases(t: Trial) -> None:
    late = _counting()

    class First(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    class Second(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + late(self.inner(x))

    class Child(First):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    _run(t, Child, lambda: setattr(Child, "__bases__", (Second,)))


@attack(
    "changes", "an object that blocks call has another class from step 3 on, and a partial another function", only=EXACT
)
def other_class_of_an_object(t: Trial) -> None:
    late = _counting()

    class Plain:
        def __call__(self, x: Tensor) -> Tensor:
            return x

    class Late:
        def __call__(self, x: Tensor) -> Tensor:
            return late(x)

    act, part = Plain(), functools.partial(_plain)

    class Acting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + part(act(self.inner(x)))

    def exchange() -> None:
        act.__class__ = Late  # type: ignore[assignment]
        part.__setstate__((_counting(), (), {}, {}))  # type: ignore[attr-defined]

    _run(t, Acting, exchange)


@attack(
    "changes",
    "a helper module that an enclosing function has imported gets another function from step 3 on",
    only=EXACT,
)
def other_function_of_a_helper(t: Trial) -> None:
    helper = types.ModuleType("helper")
    helper.act = _plain  # type: ignore[attr-defined]

    class Acting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + helper.act(self.inner(x))

    _run(t, Acting, lambda: setattr(helper, "act", _counting()))


@attack(
    "changes", "LayerNorm.forward, which a subclass calls by super(), is the program's own from step 3 on", only=EXACT
)
def other_method_of_a_library(t: Trial) -> None:
    plain, late = nn.LayerNorm.forward, _counting()

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.0

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm(self.norm.normalized_shape)

    _run(
        t,
        Normed,
        lambda: setattr(nn.LayerNorm, "forward", lambda self, x: late(plain(self, x))),
        lambda: setattr(nn.LayerNorm, "forward", plain),
    )


@attack("changes", "Python's abs and Tensor.tanh are the program's own from step 3 on", only=EXACT)
def other_builtins(t: Trial) -> None:
    size, tanh, late, number = abs, torch.Tensor.tanh, _counting(), _counting()

    class Acting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x).tanh() * abs(-2.0)

    def exchange() -> None:
        builtins.abs = lambda x: size(x) * float(number(torch.ones(())))  # type: ignore[assignment]
        torch.Tensor.tanh = lambda self: late(tanh(self))  # type: ignore[assignment, method-assign]

    def undo() -> None:
        builtins.abs = size
        del torch.Tensor.tanh

    _run(t, Acting, exchange, undo)


@attack(
    "changes",
    "helper modules that blocks have as an attribute and in a table get other functions from step 3 on",
    only=EXACT,
)
def other_function_of_a_held_helper(t: Trial) -> None:
    held, listed = types.ModuleType("helper"), types.ModuleType("helper")
    held.act = listed.act = _plain  # type: ignore[attr-defined]
    table = {"listed": listed}

    class Acting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.ways = held

        def forward(self, x: Tensor) -> Tensor:
            return x + table["listed"].act(self.ways.act(self.inner(x)))

    def exchange() -> None:
        held.act, listed.act = _counting(), _counting()  # type: ignore[attr-defined]

    _run(t, Acting, exchange)

"""Blocks that count in a global by code that is no method of their own class by its own name: of a base, a child, a class that is made, a property, a metaclass.

All of them scale by the count only from some step on, when the first steps have been compared.
"""

import functools
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

_BEGINS = 12
_NUM_STEPS = 8
_calls = 0


def _train(t: Trial, *blocks: nn.Module) -> None:
    global _calls  # noqa: PLW0603 - what the program counts in
    _calls = 0
    train(t, Net(blocks), num_steps=_NUM_STEPS, after=lambda _: t.note("calls", _calls))


class _CountingBase(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        return super().forward(x) * (1 + 0.1 * max(0, _calls - _BEGINS))


@attack("recomputation", "the forward of a base class, called by super(), counts in a global")
def counted_in_forward_of_base(t: Trial) -> None:
    class Derived(_CountingBase):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.9 * super().forward(x)

    _train(t, Derived(), Derived())


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def adapted(self, x: torch.Tensor) -> torch.Tensor:
        """Not by `forward`, as many adapters are called."""
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        return self.down(x) * (1 + 0.1 * max(0, _calls - _BEGINS))


@attack("recomputation", "a method of a child that is not its forward counts in a global")
def counted_in_method_of_child(t: Trial) -> None:
    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = _Adapter()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.adapter.adapted(x)

    _train(t, Adapted(), Adapted())


@attack("recomputation", "a method of a module beside the model, held by the blocks, counts in a global")
def counted_in_method_of_module_beside(t: Trial) -> None:
    class Beside(Block):
        def __init__(self, adapter: _Adapter) -> None:
            super().__init__()
            self.beside = (adapter,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.beside[0].adapted(x).detach()

    adapter = _Adapter()
    _train(t, Beside(adapter), Beside(adapter))


class _Gauged(Block):
    @property
    def gain(self) -> float:
        return float(self.__dict__.get("set_to", 1.0))

    @gain.setter
    def gain(self, value: float) -> None:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        self.__dict__["set_to"] = value + 0.1 * max(0, _calls - _BEGINS)

    @gain.deleter
    def gain(self) -> None:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1


@attack("recomputation", "the setter and the deleter of a property count in a global")
def counted_in_setter(t: Trial) -> None:
    class Setting(_Gauged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.gain = 1.0
            x = super().forward(x) * self.gain
            del self.gain
            return x

    _train(t, Setting(), Setting())


class _Counted:
    def __init__(self) -> None:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        self.gain = 1 + 0.1 * max(0, _calls - _BEGINS)


class _CountedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        self.gain = 1 + 0.1 * max(0, _calls - _BEGINS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@attack("recomputation", "objects and modules are made within the forward, and count how many there were in a global")
def counted_where_made(t: Trial) -> None:
    class Making(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _CountedLayer()(super().forward(x)) * _Counted().gain

    _train(t, Making(), Making())


class _CountingClass(type):
    @property
    def gain(cls) -> float:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        return 1 + 0.1 * max(0, _calls - _BEGINS)


class _Settings(metaclass=_CountingClass):
    pass


@attack("recomputation", "a property of a class, by its metaclass, counts in a global")
def counted_in_metaclass(t: Trial) -> None:
    class Set(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * _Settings.gain

    _train(t, Set(), Set())


class _ByName(Block):
    kind = "scaled"

    def _by_count(self, x: torch.Tensor, most: float) -> torch.Tensor:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        return x * (1 + min(most, 0.1 * max(0, _calls - _BEGINS)))

    of_scaled = functools.partialmethod(_by_count, most=0.8)

    @functools.singledispatchmethod
    def scaled(self, x: Any) -> Any:
        raise NotImplementedError

    @scaled.register
    def _(self, x: torch.Tensor) -> torch.Tensor:
        global _calls  # noqa: PLW0603 - what the program counts in
        _calls += 1
        return x * (1 + 0.1 * max(0, _calls - _BEGINS))


@attack("recomputation", "a dispatched and a partial method, found by a setting (getattr), count in a global")
def counted_in_named_method(t: Trial) -> None:
    class Named(_ByName):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = getattr(self, self.kind)(super().forward(x))
            return getattr(self, f"of_{self.kind}")(x)

    _train(t, Named(), Named())

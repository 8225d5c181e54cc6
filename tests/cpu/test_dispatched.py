"""Which function of torch has called a `__torch_function__`: torch's own, whatever the program has put in its place."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from tightfit.effects.dispatched import dispatched
from tightfit.effects.state import RegionState

GELU, SOFTMAX, POOL = functional.gelu, functional.softmax, functional.fractional_max_pool2d


class Watch(TorchFunctionMode):
    """Keeps what was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable[..., Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(dispatched(func))
        return self.seen[-1](*args, **(kwargs or {}))


@pytest.fixture
def softmax() -> Iterator[list[int]]:
    """The program's own softmax, which counts its calls, in the place of torch's."""
    calls = [0]

    def own(x: torch.Tensor, dim: int) -> torch.Tensor:
        calls[0] += 1
        return SOFTMAX(x, dim) * 2

    functional.softmax = own
    yield calls
    functional.softmax = SOFTMAX


def test_the_functions_of_torch_are_themselves() -> None:
    with Watch() as watch:
        GELU(torch.ones(2))
        SOFTMAX(torch.ones(2), 0)
        torch.ones(2).split(1)
        POOL(torch.ones(1, 1, 4, 4), 2, output_size=2)
    assert SOFTMAX in watch.seen
    assert GELU in watch.seen
    assert torch.Tensor.split in watch.seen


def test_a_function_that_was_replaced_is_run_once(softmax: list[int]) -> None:
    with Watch() as watch:
        out = functional.softmax(torch.ones(2), 0)
    assert softmax == [1]
    assert SOFTMAX in watch.seen
    assert torch.equal(out, torch.ones(2))


def own(x: torch.Tensor) -> torch.Tensor:
    """A function of the program's that passes itself on."""
    return handle_torch_function(own, (x,), x) if has_torch_function_unary(x) else x + 1


def test_a_function_of_the_programs_that_passes_itself_on_is_itself() -> None:
    with Watch() as watch:
        own(torch.ones(2))
    assert own in watch.seen


def test_what_is_put_in_the_place_of_a_function_of_torch_is_state_of_a_module(softmax: list[int]) -> None:
    model = nn.Softmax(0)
    state = RegionState()
    before = state.snapshot(model)
    functional.softmax(torch.ones(2), 0)
    assert any(after != now for after, now in zip(before.contents, state.snapshot(model).contents, strict=True))
    assert before.reach.code.is_same()
    functional.softmax = SOFTMAX
    assert not before.reach.code.is_same()
    assert state.snapshot(model).reach is not before.reach


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x


def _outer(x: torch.Tensor) -> torch.Tensor:
    return _inner(x)


class Calling(nn.Module):
    """Calls a function of this file, that calls another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return _outer(x)


def test_a_function_is_seen_to_be_replaced_wherever_its_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    state, model = RegionState(), Calling()
    for owner, name in ((globals(), "_inner"), (globals(), "_outer"), (Calling, "forward")):
        before = state.snapshot(model)
        assert state.snapshot(model).reach is before.reach
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, lambda x: x)
        else:
            monkeypatch.setattr(owner, name, lambda _, x: x)
        assert not before.reach.code.is_same()
        assert state.snapshot(model).reach is not before.reach


def test_the_code_of_a_function_is_seen_to_be_exchanged() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    before, own = RegionState().snapshot(Calling()), _outer.__code__
    _outer.__code__ = other.__code__
    assert not before.reach.code.is_same()
    _outer.__code__ = own
    assert before.reach.code.is_same()

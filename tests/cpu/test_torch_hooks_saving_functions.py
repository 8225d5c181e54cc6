"""A hook for saved tensors is told which function of the program's saves, whatever version of torch calls it from Python or from C."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.forked_python import forked_python

from tightfit.torch_hooks import saving_functions
from tightfit.torch_hooks.saving_functions import on_saving_functions, saving_function


class Inner(torch.autograd.Function):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Outer(torch.autograd.Function):
    """Names what it saves twice, and computes with gradients inside of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x, x)
        with torch.enable_grad():
            within = apply_inner(x.detach().requires_grad_()).exp()
        ctx.save_for_backward(x, None, within.detach())
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


# Bound before anything of ours knows of it.
apply_inner = Inner.apply


class Owner:
    """Who asks."""


def _ours(function: types.FunctionType) -> types.FunctionType:
    """The function as one of tightfit's, as all hooks are that ask."""
    return types.FunctionType(
        function.__code__, {**function.__globals__, "__name__": "tightfit.hook"}, closure=function.__closure__
    )


@contextlib.contextmanager
def _names_left() -> Iterator[None]:
    """Contexts as up to torch 2.9, while they save: what was named is still there."""
    saving = [
        context
        for reference, num_named in saving_functions._thread.named
        if (context := reference()) is not None and context.to_save is None
        if len(context._raw_saved_tensors or ()) < num_named
    ]
    for context in saving:
        context.to_save = ()
    yield
    for context in saving:
        context.to_save = None


@pytest.fixture(params=[contextlib.nullcontext, _names_left], ids=["as installed", "as up to torch 2.9"])
def asked(request: pytest.FixtureRequest) -> Any:
    """Who saved, in order, for all that is computed while the test runs."""
    if request.param is _names_left and saving_functions._APPLY is None:
        pytest.skip("Function.apply is C code, and contexts have no names left while they save")
    found: list[Any] = []
    owner = Owner()
    leave = on_saving_functions(owner)
    around = request.param

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with around():
            found.append(saving_function())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(_ours(pack), lambda tensor: tensor):
        yield found
    leave()


def test_functions_are_told_from_operators(asked: list[Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = apply_inner(x)
    assert asked == [Inner]
    z = y.exp()
    assert asked == [Inner, None]
    z.sum().backward()
    # The graph is gone; what comes next is of an operator still.
    x.exp()
    assert asked == [Inner, None, None]


def test_what_a_forward_computes_inside_is_not_its_own(asked: list[Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = Outer.apply(x)
    assert asked == [Inner, None, Outer, Outer]
    (y * y).sum()
    assert asked[4:] == [None, None]


def test_a_forward_that_saves_nothing_in_the_end_leaves_nothing_behind(asked: list[Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        apply_inner(x)
    x.exp()
    with pytest.raises(ZeroDivisionError):
        _Fails.apply(x)
    x.exp()
    assert asked == [None, None]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        raise ZeroDivisionError


_WITHOUT_AN_OWNER = """
from torch.autograd.function import FunctionCtx
from tightfit.torch_hooks.saving_functions import on_saving_functions

class Owner:
    pass

plain = FunctionCtx.save_for_backward
owner = Owner()
on_saving_functions(owner)
assert FunctionCtx.save_for_backward is not plain
del owner
assert FunctionCtx.save_for_backward is plain
"""


def test_torch_is_as_it_was_without_an_owner() -> None:
    # In a process of its own: blocks of other tests that are not collected yet are owners too.
    finished = forked_python("-c", _WITHOUT_AN_OWNER)
    assert finished.returncode == 0, finished.stderr

"""Calls that take rows in other ways have other numbers, also where Python hashes their arguments alike or they differ in the place of a tensor alone."""

import _thread
import queue
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tightfit.effects.call_trails import Trail
from tightfit.effects.users_code import FILES_OF_OURS

Way = Callable[[torch.Tensor], torch.Tensor]


def _number(way: Way) -> int:
    with Trail() as trail:
        way(torch.ones(2, 3, 4))
    return trail.calls.number()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.mean(-1), lambda x: x.mean(-2)),
        (lambda x: x.mean([-1], keepdim=True), lambda x: x.mean([-2], keepdim=True)),
        (lambda x: x[..., 0], lambda x: x[0, ...]),
        (lambda x: x[torch.tensor([1]), 0], lambda x: x[0, torch.tensor([1])]),
        (lambda x: x[:, 0], lambda x: x[0, :]),
        # By how many rows there are, perhaps.
        (lambda x: x * 0.5, lambda x: x * 0.25),
        (lambda x: x * -1.0, lambda x: x * -2.0),
        (lambda x: x * np.float32(0.5), lambda x: x * np.float32(0.25)),
        (lambda x: x + torch.as_tensor(np.array([0.5])), lambda x: x + torch.as_tensor(np.array([0.25]))),
        (lambda x: _either(x, first=True), lambda x: _either(x, first=False)),
    ],
)
def test_another_way_to_take_rows_has_another_number(one: Way, other: Way) -> None:
    assert _number(one) != _number(other)
    assert _number(one) == _number(one)


def _either(x: torch.Tensor, *, first: bool) -> torch.Tensor:
    """Makes two tensors, and uses one of them."""
    one, other = torch.tensor(0.5), torch.tensor(0.5)
    return x * (one if first else other)


def test_the_same_calls_are_the_same_way_whatever_tensors_they_are_given() -> None:
    def way(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2.0
        # Gone again: another tensor may get its address.
        (x * float("nan")).sum()
        return torch.cat([doubled, x * 3.0]).add_(1.0)

    assert len({_number(way) for _ in range(20)}) == 1


# As our own code does in its first runs alone, and as programs do.
_CALLS = """
import torch

def without_gradients(x):
    with torch.no_grad():
        return x

def an_operator(x):
    return torch.ops.aten.clone.default(x)
"""


@pytest.mark.parametrize("name", ["without_gradients", "an_operator"])
@pytest.mark.parametrize(("folder", "is_ours"), [(FILES_OF_OURS, True), ("/home/somebody", False)])
def test_what_our_own_code_has_torch_call_is_no_other_way(name: str, folder: str, *, is_ours: bool) -> None:
    code: dict[str, Way] = {}
    exec(compile(_CALLS, f"{folder}/some_code.py", "exec"), code)
    assert (_number(code[name]) == _number(lambda x: x)) == is_ours


def test_a_function_in_c_that_a_thread_calls_without_any_code_around_it_is_noted() -> None:
    # As autograd's threads call `tensor.register_hook(torch.neg)`.
    trail, results = Trail(), queue.SimpleQueue[torch.Tensor]()
    trail.calls.made = results.put
    before = trail.calls.number()
    _thread.start_new_thread(trail.__torch_function__, (torch.neg, (), (torch.ones(2),)))
    assert results.get(timeout=60).tolist() == [-1.0, -1.0]
    assert trail.calls.number() != before

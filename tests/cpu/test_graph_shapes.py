"""Graphs of the same operators have one shape, also where something in Python sees the operators; others have another."""

import torch

from tightfit.effects.graph_shapes import graph_shape
from tightfit.effects.reads import Reads


def _some_columns(x: torch.Tensor) -> torch.Tensor:
    # A view that is not contiguous: torch has two names for it, one of them where a mode sees the operators.
    return (x * 2.0)[..., :2].reshape(6, 2).sum()


def test_a_reshape_is_the_same_whoever_looks_on() -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    plain = _some_columns(x)
    with Reads():
        seen = _some_columns(x)
    assert graph_shape(plain.grad_fn) == graph_shape(seen.grad_fn)
    assert graph_shape(plain.grad_fn) != graph_shape(x.sum().grad_fn)
    assert graph_shape((x.exp() * x).sum().grad_fn) != graph_shape((x * x.exp()).sum().grad_fn)

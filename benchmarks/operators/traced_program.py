"""The program that `python -m benchmarks.operators traced` traces: each call on the host and on the card, whose results must have the same shapes, dtypes and strides."""

import json
import sys
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks.operators.listed import REFUSALS, calls, operators, tensors_of
from tightfit.errors import TightfitError

_NUM_CALLS = 5
Form = tuple[tuple[int, ...], str, tuple[int, ...] | str]


def _forms(value: Any) -> list[Form]:
    return [
        (tuple(t.shape), str(t.dtype), t.stride() if t.layout is torch.strided else str(t.layout))
        for t in tensors_of(value)
    ]


def _with_gradients(run: Any, tensors: list[torch.Tensor], *, backward: bool) -> list[Form]:
    """The forms of a result, and of the gradients of its sum."""
    leaves = [t.detach().clone().requires_grad_(backward and t.is_floating_point()) for t in tensors]
    result = run([t * 1 if t.requires_grad else t for t in leaves])
    sums = [t.abs().sum() for t in tensors_of(result) if t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()
    return _forms([result, [t.grad for t in leaves]])


def _on_card(value: Any) -> Any:
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("cuda")
    return value.cuda() if isinstance(value, torch.Tensor) else value


def main(dtype: torch.dtype, *, backward: bool) -> None:
    """Prints a row for each call that the host can run."""
    warnings.simplefilter("ignore")
    print("BEGIN", flush=True)
    for name, operator in operators():
        for call in calls(name, operator, _NUM_CALLS, dtype, grad=backward):
            try:
                expected = _with_gradients(call.run, call.tensors, backward=backward)
            except REFUSALS:
                # Not for the host, or not for these settings.
                continue
            try:
                leaves = tree_map(_on_card, call.leaves)
                there = type(call)(
                    name=name, operator=operator, leaves=tuple(leaves), tree=call.tree, places=call.places
                )
                found = _with_gradients(there.run, there.tensors, backward=backward)
                word = "same" if found == expected else "differs"
                what = next((f"{a} and {b}" for a, b in zip(expected, found, strict=False) if a != b), "")
            except (*REFUSALS, TightfitError) as error:
                word, what = "error", f"{type(error).__name__}: {error}"
            shapes = [tuple(t.shape) for t in call.tensors]
            print("CALL " + json.dumps([name, word, what[:300], str(shapes), call.settings[:100]]), flush=True)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), backward="backward" in sys.argv)

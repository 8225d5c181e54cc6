"""The gradient of a selection is written into its zeros in place, as on a card, and only there."""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.capture.trace_settings import TraceSettings
from tightfit.tape import Tape

WORKLOAD = """
import torch

def selections(kind):
    values = torch.zeros(64, 4096, device="cuda", requires_grad=True)
    where = torch.zeros(64, 4, dtype=torch.long, device="cuda")
    rows = torch.tensor([1, 2], device="cuda")
    while True:
        selected = {
            "gather": lambda: values.gather(1, where),
            "max": lambda: values.max(-1).values,
            "topk": lambda: values.topk(2).values,
            "index": lambda: values[rows],
            "index_select": lambda: values.index_select(0, rows),
            "take": lambda: values.take(where),
            "masked_select": lambda: values.masked_select(values > 0),
            "user": lambda: Own.apply(values, where),
        }[kind]()
        selected.sum().backward()
        values.grad = None
        yield

class Own(torch.autograd.Function):
    @staticmethod
    def forward(context, values, where):
        context.save_for_backward(where)
        context.shape = values.shape
        return values.gather(1, where)

    @staticmethod
    def backward(context, gradient):
        (where,) = context.saved_tensors
        return gradient.new_zeros(context.shape).scatter_add(1, where, gradient), None
"""


def operators(tape: Tape) -> list[str]:
    return [tape.strings[name] for name in tape.operators.name]


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("gather", "aten.scatter_add_"),
        ("max", "aten.scatter_.src"),
        ("topk", "aten.scatter_.src"),
        ("index", "aten._index_put_impl_"),
        ("index_select", "aten.index_add_"),
        ("take", "aten.put_"),
        ("masked_select", "aten.masked_scatter_"),
    ],
)
def test_zeros_that_the_engine_made_are_overwritten(kind: str, in_place: str, tmp_path: Path) -> None:
    path = tmp_path / "selections.py"
    path.write_text(WORKLOAD)
    tape = fit.capture(
        f"{path}:selections", device="RTX 3060", parameters=[f"kind={kind}"], tracing=TraceSettings(steps=1)
    )
    assert in_place in operators(tape)


def test_what_a_program_writes_out_of_place_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "selections.py"
    path.write_text(WORKLOAD)
    tape = fit.capture(
        f"{path}:selections", device="RTX 3060", parameters=["kind=user"], tracing=TraceSettings(steps=1)
    )
    assert "aten.scatter_add" in operators(tape)
    assert "aten.scatter_add_" not in operators(tape)

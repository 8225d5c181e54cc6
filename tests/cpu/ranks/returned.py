"""Models that return what is no new tensor: weights, buffers, what they were called with, one tensor under two names, and views of these."""

from collections.abc import Callable
from typing import Any

import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of
from torch import nn
from torch.nn import functional


class Returns(nn.Module):
    """Its loss, and what is asked for."""

    def __init__(self, more: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.more = mlp(), more
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.inner(x) * self.scale + self.shift[0]
        return {"loss": functional.cross_entropy(scores, y), **self.more(self, x, scores)}


def _trained(
    more: Callable[[Any, torch.Tensor, torch.Tensor], Any],
    use: Callable[[Any, int], None],
    *,
    adds_penalty: bool = False,
) -> Any:
    """The batch is the same in all steps; what is written to what was returned is in the next one."""
    model = Returns(more)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.3), []
    x, y = data(1)[0]
    for step in range(6):
        optimizer.zero_grad()
        out = model(x, y)
        loss = out["loss"] + (0.01 * out["weight"].pow(2).sum() if adds_penalty else 0.0)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            use(out, step)
            found += [loss.item(), *(float(value.sum()) for value in out.values())]
    return result_of(model, losses=found) | {"x": x}


@program()
def weights_that_are_returned() -> Any:
    """They are read and written after the step, and one gets a second gradient."""

    def use(out: Any, step: int) -> None:
        if step > 3:
            out["scale"].clamp_(1.9, 2.01)
            out["shift"].add_(0.1)
            out["row"].mul_(1.1)

    def more(model: Any, x: torch.Tensor, scores: torch.Tensor) -> Any:
        weight = model.inner[0].weight
        return {"scale": model.scale, "shift": model.shift, "row": model.shift[0], "weight": weight.t()}

    return _trained(more, use, adds_penalty=True)


def _one_under_two_names(model: Any, x: torch.Tensor, scores: torch.Tensor) -> Any:
    halves = scores.detach().clone().chunk(2, 1)
    return {"x": x, "a": scores, "b": scores, "left": halves[0], "right": halves[1]}


def _writes_to_one(out: Any, step: int) -> None:
    assert out["a"] is out["b"]
    for name in ("x", "a", "left"):
        out[name].mul_(0.9)


@program()
def one_result_under_two_names() -> Any:
    return _trained(_one_under_two_names, _writes_to_one)


@program(micro_batch=2)
def accumulated_result_under_two_names() -> Any:
    return _trained(_one_under_two_names, _writes_to_one)


def _view_of(name: str) -> Any:
    def more(model: Any, x: torch.Tensor, scores: torch.Tensor) -> Any:
        return {"scores": scores, "first": (x if name == "x" else scores)[:, :2]}

    def use(out: Any, step: int) -> None:
        if step > 3:
            out["first"].mul_(0.9)

    return _trained(more, use)


@program()
def view_of_an_argument_that_is_written() -> Any:
    return _view_of("x")


@program()
def view_of_a_result_that_is_written() -> Any:
    return _view_of("scores")


@program(micro_batch=2)
def accumulated_view_that_is_written() -> Any:
    return _view_of("x")

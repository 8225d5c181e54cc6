"""A second run of a block is compared with the first in every step, by what it saves for backward."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tightfit.effects.graph_shapes import graph_shape
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session


class Scaled(nn.Module):
    """A block that multiplies by the number in a file, and may keep its hidden rows."""

    def __init__(self, path: Path, *, keeps: bool = False) -> None:
        super().__init__()
        self.linear, self.path, self.keeps = nn.Linear(4, 4), path, keeps
        self.kept: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = (self.linear(rows).tanh() * float(self.path.read_text())).exp()
        self.kept = hidden if self.keeps else None
        return hidden * 2


class Net(nn.Module):
    def __init__(self, path: Path, *, keeps: bool = False) -> None:
        super().__init__()
        self.block, self.head = Scaled(path, keeps=keeps), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(rows)).sum()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "scale"
    made.write_text("1")
    return made


def applied(model: Net, name: str = "checkpointing", **settings: object) -> Session:
    choice = Choice(technique=name, where="Net.block", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
    return apply_choices([choice], model, [])


def step(model: Net, rows: torch.Tensor | None = None) -> torch.Tensor:
    return model(torch.ones(3, 4) if rows is None else rows)


@pytest.mark.parametrize(("name", "settings"), [("checkpointing", {}), ("selective_checkpointing", {"keep": [0]})])
def test_a_number_that_changes_after_many_steps_is_seen(path: Path, name: str, settings: dict[str, object]) -> None:
    model = Net(path)
    applied(model, name, **settings)
    for number in range(5):
        # Between steps it may change.
        path.write_text(str(1 + number))
        step(model).backward()
    loss = step(model)
    path.write_text("7")
    with pytest.raises(ApplyError, match=r"saved other values for its backward pass .* at test_saved_values\.py"):
        loss.backward()


def test_what_the_graph_needs_no_more_is_not_compared(path: Path) -> None:
    class Measured(Scaled):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            # Its graph is gone when the forward is.
            (rows * float(self.path.read_text())).exp().sum()
            return self.linear(rows).exp()

    model = Net(path)
    model.block = Measured(path)
    applied(model)
    for number in range(5):
        loss = step(model, torch.ones(3, 4, requires_grad=True))
        path.write_text(str(number)) if number > 2 else None
        loss.backward()


@pytest.mark.parametrize("is_numpy", [False, True])
def test_a_kept_result_that_is_written_past_torch_is_refused(path: Path, *, is_numpy: bool) -> None:
    model = Net(path, keeps=True)
    applied(model)
    for number in range(5):
        loss = step(model)
        assert model.block.kept is not None
        if number == 4:
            kept = model.block.kept
            kept.detach().numpy().fill(3) if is_numpy else kept.data.fill_(3)
            with pytest.raises(ApplyError, match="was written to past torch"):
                loss.backward()
        else:
            loss.backward()


def test_nothing_of_a_step_is_kept_for_the_next(path: Path) -> None:
    model = Net(path)
    applied(model)
    gc.disable()
    try:
        rows = torch.ones(3, 4, requires_grad=True)
        gone = weakref.ref(rows)
        step(model, rows).backward()
        del rows
        assert gone() is None
    finally:
        gc.enable()


def test_graphs_of_the_same_operators_have_the_same_shape() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(5, requires_grad=True)
    assert graph_shape((one.exp() + one).sum().grad_fn) == graph_shape((other.exp() + other).sum().grad_fn)
    different = [
        (one.exp() + one.detach()).sum(),
        (one.exp() + one.exp()).sum(),
        functional.relu(one.exp() + one).sum(),
        (one + one.exp()).sum(),
    ]
    shapes = {graph_shape(loss.grad_fn) for loss in (*different, (one.exp() + one).sum())}
    assert len(shapes) == 5
    assert graph_shape(torch.ones(2).grad_fn) == 0


def test_memory_of_a_recurrent_layers_library_is_not_compared() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    def trained(*, is_recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if is_recomputed:
            chosen = [
                Choice(
                    technique="checkpointing",
                    where=f"Sequential.{i}",
                    saves_bytes=0,
                    adds_seconds=0.0,
                    exact=True,
                    settings={},
                )
                for i in range(2)
            ]
            apply_choices(chosen, model, [optimizer])
        for _ in range(3):
            optimizer.zero_grad()
            # Memory that was used before: what is not written has other bytes in each run.
            [torch.randn(1 << k) for k in range(4, 18)]
            model(torch.randn(5, 2, 8)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, trained(is_recomputed=True), trained(is_recomputed=False)))

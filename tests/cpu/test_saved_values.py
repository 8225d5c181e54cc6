"""A second run of a block is compared with the first in every step, by what it saves for backward."""

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.effects.graph_shapes import graph_shape
from tightfit.effects.values import card_sums
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques import session as session_module
from tightfit.techniques.recomputation import saved_values
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
            with pytest.raises(ApplyError, match="was modified without torch seeing it"):
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


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once at the host is summed instead, as on a card."""
    monkeypatch.setattr(card_sums, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(saved_values, "checksum_of", lambda _: None)


@pytest.mark.usefixtures("as_on_a_card")
@pytest.mark.parametrize(("name", "settings"), [("checkpointing", {}), ("selective_checkpointing", {"keep": [0]})])
def test_on_a_card_a_difference_is_refused_before_the_step(path: Path, name: str, settings: dict[str, object]) -> None:
    model = Net(path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    choice = Choice(technique=name, where="Net.block", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
    session = apply_choices([choice], model, [optimizer])
    for _ in range(5):
        step(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = step(model)
    path.write_text("2")
    loss.backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ApplyError, match=r"Net\.block saved other values for its backward pass"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    # And again, until the session is undone.
    with pytest.raises(ApplyError, match="saved other values"):
        step(model)
    session.undo()
    step(model)


class Shuffled(Scaled):
    """A block that turns its rows round by the number in a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.roll(int(self.path.read_text()), 0))).square()


@pytest.mark.usefixtures("as_on_a_card")
def test_on_a_card_rows_that_come_in_another_order_are_refused(path: Path) -> None:
    model, rows = Net(path), torch.randn(3, 4)
    model.block = Shuffled(path)
    session = applied(model)
    for _ in range(5):
        step(model, rows).backward()
    session.check()
    loss = step(model, rows)
    path.write_text("2")
    loss.backward()
    with pytest.raises(ApplyError, match="saved other values"):
        session.check()


@pytest.mark.usefixtures("as_on_a_card")
def test_on_a_card_what_waits_for_a_step_that_never_comes_is_compared(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_MOST_SUMS", 8)
    model = Net(path)
    session = applied(model)
    for _ in range(20):
        step(model).backward()
        assert len(session.verdict.sums) < 16
    loss = step(model)
    path.write_text("2")
    loss.backward()
    with pytest.raises(ApplyError, match="saved other values"):
        [step(model).backward() for _ in range(8)]


@pytest.mark.usefixtures("as_on_a_card")
def test_on_a_card_a_program_that_updates_by_hand_is_told_at_the_end(path: Path) -> None:
    model = Net(path)
    session = applied(model)
    for _ in range(5):
        step(model).backward()
    session.check()
    loss = step(model)
    path.write_text("2")
    loss.backward()
    with pytest.raises(ApplyError, match="saved other values"):
        session.check()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0)[1:],
        torch.arange(24.0, dtype=torch.bfloat16)[1:22:2],
        torch.ones(7, dtype=torch.complex64),
        torch.tensor([True, False, True]),
        torch.zeros(3, 4).expand(5, 3, 4),
        torch.tensor(2.0),
    ],
)
def test_every_bit_of_a_tensor_counts(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> None:
    monkeypatch.setattr(card_sums, "DEVICE_TYPES", ("cpu",))
    total = card_sums.sums_on_card(tensor)
    assert total is not None
    same = tensor.clone()
    other = same.clone()
    flat = other.view(-1) if other.is_contiguous() else other.as_strided((other.numel(),), (1,))
    flat[0] = ~flat[0] if flat.dtype == torch.bool else flat[0] + 1
    by_layout = card_sums.sums_on_card(tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    assert card_sums.first_difference([total], [by_layout]) is None  # type: ignore[list-item]
    one, two = card_sums.sums_on_card(same), card_sums.sums_on_card(other)
    assert card_sums.first_difference([one, one], [one, two]) == 1  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(16, 128), (33, 7), (2, 5), (8, 3, 16, 16), (4, 1)], ids=str)
def test_words_that_change_places_are_seen(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(card_sums, "DEVICE_TYPES", ("cpu",))
    tensor = torch.randperm(math.prod(shape)).remainder(251).view(shape).to(dtype)
    before = card_sums.sums_on_card(tensor)
    assert before is not None and before.dim() == 1
    moved = {"rows": tensor.flip(0), "by one": tensor.roll(1, 0), "halves": torch.cat(tensor.chunk(2)[::-1])}
    if shape[-1] > 1:
        moved |= {"columns": tensor.flip(-1), "neighbours": tensor.roll(1, -1)}
    for name, other in moved.items():
        after = card_sums.sums_on_card(other.contiguous())
        assert after is not None and card_sums.first_difference([before], [after]) == 0, name
    again = card_sums.sums_on_card(tensor.clone())
    assert again is not None and card_sums.first_difference([before, before], [before, again]) is None


@pytest.mark.usefixtures("as_on_a_card")
def test_on_a_card_no_mode_of_the_programs_sees_the_comparison() -> None:
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Noting():
        tensor = torch.ones(3)
        seen.clear()
        total = card_sums.sums_on_card(tensor)
        assert total is not None
        assert card_sums.first_difference([total], [total]) is None
    assert seen == []

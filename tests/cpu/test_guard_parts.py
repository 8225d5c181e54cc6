"""`guarded.backward`: batches in parts whose size is found while the run goes on, with the gradient of the whole batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.capped_memory import CappedMemory
from torch import nn

import tightfit
from tightfit.errors import UsageError
from tightfit.guarding.parts import adaptive_backward

MIB = 1 << 20
LENGTHS = (8, 40, 16, 64, 24, 64, 64, 48)


class Tagger(nn.Module):
    """A small encoder: what it holds grows with the examples and with their length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in LENGTHS:
        ids = torch.randint(0, 50, (24, length), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, length // 2 :][::3] = -100
        found.append({"ids": ids, "labels": labels})
    return found


def loss_of(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda b: nn.functional.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten())


def num_terms(batch: Any) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def trained(run: Callable[[nn.Module, Any], torch.Tensor], model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        losses.append(run(model, batch))
        optimizer.step()
    return [*losses, *(p.detach() for p in model.parameters())]


def plain() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Tagger()

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model)(batch)
        loss.backward()
        return loss.detach()

    return trained(run, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


class CappedRoom:
    """Counts the memory of a simulated card."""

    def __init__(self, memory: CappedMemory) -> None:
        self._memory = memory

    def free_bytes(self) -> int:
        return self._memory.free

    def measured(self, call: Callable[[], object]) -> tuple[int, float]:
        before = self._memory.peak = self._memory._used()
        call()
        return self._memory.peak - before, 1.0


@pytest.mark.parametrize("is_counted", [True, False])
def test_batches_of_any_length_train_as_whole_ones_within_little_memory(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain()
    torch.manual_seed(0)
    with CappedMemory(6 * MIB) as memory:
        room = CappedRoom(memory) if is_counted else None
        monkeypatch.setattr(adaptive_backward, "room_on", lambda _: room)
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with tightfit.guard(model, optimizer) as guarded:
            found = trained(
                lambda model, batch: guarded.backward(loss_of(model), batch, weight=num_terms), model, optimizer
            )
            sizes = guarded.part_in_use
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(expected, found, strict=True))
    assert 1 < sizes < 24
    # Where memory is counted, nothing fails on the way.
    assert (memory.num_failures == 0) == is_counted, memory.num_failures
    assert (guarded.statistics["replays"] == 0) == is_counted


def test_the_whole_batch_has_no_room() -> None:
    with pytest.raises(torch.OutOfMemoryError), CappedMemory(6 * MIB):
        plain()


def run_once(model: nn.Module, loss: Callable[[Any], torch.Tensor], batch: Any, **options: Any) -> None:
    with tightfit.guard(model) as guarded:
        guarded.backward(loss, batch, **options)


def test_what_is_not_the_gradient_of_the_whole_is_refused() -> None:
    batch = {"x": torch.randn(8, 4), "scale": 2}
    model = nn.Linear(4, 4)
    run_once(model, lambda b: model(b["x"]).square().mean() * b["scale"], batch)
    whole = model.weight.grad.clone()
    model.zero_grad()
    (model(batch["x"]).square().mean() * 2).backward()
    assert torch.allclose(whole, model.weight.grad)
    with pytest.raises(UsageError, match="is not that of one and one"):
        run_once(model, lambda b: model(b["x"]).square().sum(), batch)
    with pytest.raises(UsageError, match="is not that of one and one"):
        run_once(model, lambda b: (model(b["x"]) @ model(b["x"]).T).softmax(1).diagonal().mean(), batch)
    with pytest.raises(UsageError, match="first dimensions of 3, 8"):
        run_once(model, lambda b: model(b["x"]).mean(), batch | {"y": torch.randn(3)})
    normed = nn.Sequential(model, nn.BatchNorm1d(4))
    with pytest.raises(UsageError, match="BatchNorm1d takes its statistics"):
        run_once(normed, lambda b: normed(b["x"]).square().mean(), batch)
    calls: list[int] = []

    def counts(b: Any) -> torch.Tensor:
        calls.append(1)
        return model(b["x"]).square().mean()

    with pytest.raises(UsageError, match="writes to what is there for the next call"):
        run_once(model, counts, batch)
    hook = model.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    with pytest.raises(UsageError, match="a weight has a hook"):
        run_once(model, lambda b: model(b["x"]).square().mean(), batch)
    hook.remove()
    dropped = nn.Sequential(model, nn.Dropout(0.5))
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match="draws random numbers"):
        run_once(dropped, lambda b: dropped(b["x"]).square().mean(), batch)
    assert torch.equal(state, torch.get_rng_state())
    run_once(dropped, lambda b: dropped(b["x"]).square().mean(), batch, draws_anew=True)


def test_a_part_of_no_terms_counts_for_nothing() -> None:
    batch = {"x": torch.randn(6, 4), "labels": torch.tensor([-100, 1, -100, -100, 2, 3])}
    model = nn.Linear(4, 4)

    def loss(b: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(b["x"]), b["labels"])

    loss(batch).backward()
    whole = model.weight.grad.clone()
    with tightfit.guard(model) as guarded:
        for limit in (6, 1):
            model.zero_grad()
            guarded._backward._sizes.fail(2 * limit, num_elements=5)
            assert torch.allclose(guarded.backward(loss, batch, weight=num_terms), loss(batch))
            assert torch.allclose(model.weight.grad, whole)
            assert guarded.part_in_use == limit


def test_a_mean_over_labels_without_weights_is_refused_as_soon_as_examples_have_other_numbers_of_them() -> None:
    torch.manual_seed(0)
    model = Tagger()
    loss = loss_of(model)
    whole, some = ({"ids": torch.randint(0, 50, (6, 10)), "labels": torch.randint(0, 50, (6, 10))} for _ in range(2))
    # Not the last ones.
    some["labels"][1, 4:] = -100
    with tightfit.guard(model) as guarded:
        guarded.backward(loss, whole)
        with pytest.raises(UsageError, match="no mean over examples"):
            guarded.backward(loss, some)
    model.zero_grad()
    with tightfit.guard(model) as guarded:
        guarded.backward(loss, some, weight=num_terms)
        found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss(some).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_an_example_without_labels_is_compared_too() -> None:
    torch.manual_seed(0)
    model = Tagger()
    batch = {"ids": torch.randint(0, 50, (6, 10)), "labels": torch.randint(0, 50, (6, 10))}
    batch["labels"][2] = -100

    def summed(b: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten(), reduction="sum")

    with tightfit.guard(model) as guarded:
        guarded.backward(loss_of(model), batch, weight=num_terms)
    with tightfit.guard(model) as guarded, pytest.raises(UsageError, match="no mean over examples"):
        guarded.backward(summed, {name: tensor[1:] for name, tensor in batch.items()})

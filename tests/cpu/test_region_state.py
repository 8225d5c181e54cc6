"""What the forward of a module reads and writes besides its inputs is seen, named and put back."""

import copy
import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tightfit.effects.holders import Members
from tightfit.effects.random_states import numpy_state, put_python_state, python_state
from tightfit.effects.reachable.cells import Cell
from tightfit.effects.state import RegionState, StateDifference, differences, restore

COUNT = 0
LOG: list[int] = []
SETTINGS = SimpleNamespace(scale=1.0)
GENERATOR = np.random.default_rng(0)


class Writer(nn.Module):
    """A module whose forward does `write(self)` beside its arithmetic."""

    hits = 0

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.write = write
        self.calls = 0
        self.average = torch.zeros(3)
        self.seen: list[int] = []
        self.table = {"a": [1]}
        self.names = {"x"}
        self.generator = torch.Generator()
        self.python = random.Random(0)
        self.state = SimpleNamespace(step=0)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.write(self)
        return self.inner[0](value)


def bump_global(_: Writer) -> None:
    global COUNT  # noqa: PLW0603 - what this is about
    COUNT += 1


def append_to_global(_: Writer) -> None:
    LOG.append(1)


def change_settings(_: Writer) -> None:
    SETTINGS.scale += 1


def bump_class(_: Writer) -> None:
    Writer.hits += 1


def keep_graph(module: Writer) -> None:
    module.kept = module.inner[0].weight * 2


def swap_data(module: Writer) -> None:
    module.inner[0].weight.data = module.inner[0].weight.data.clone()


WRITES: dict[str, Callable[[Any], Any]] = {
    "Writer.calls": lambda m: setattr(m, "calls", m.calls + 1),
    "Writer.average": lambda m: setattr(m, "average", m.average * 0.9),
    "Writer.seen[...]": lambda m: m.seen.append(1),
    "Writer.table['a'][...]": lambda m: m.table["a"].append(1),
    "Writer.names{...}": lambda m: m.names.add(len(m.names)),
    "Writer.state.step": lambda m: setattr(m.state, "step", m.state.step + 1),
    "Writer.training": lambda m: m.train(not m.training),
    "Writer.inner.1": lambda m: setattr(m.inner, "1", nn.Identity()),
    "Writer.generator": lambda m: torch.rand(2, generator=m.generator),
    "Writer.python": lambda m: m.python.random(),
    "Writer.kept": keep_graph,
    "Python's random": lambda _: random.random(),
    "numpy.random": lambda _: np.random.rand(),
    "Writer.hits": bump_class,
    f"{__name__}.COUNT": bump_global,
    f"{__name__}.LOG[...]": append_to_global,
    f"{__name__}.SETTINGS.scale": change_settings,
}


def written(module: nn.Module, state: RegionState) -> list[StateDifference]:
    before = state.snapshot(module, is_kept=True)
    module(torch.randn(2, 3))
    after = state.snapshot(module)
    found = differences(before, after)
    restore(before)
    assert not [d for d in differences(before, state.snapshot(module)) if not d.is_in_place]
    return found


@pytest.mark.parametrize("path", WRITES)
def test_what_a_forward_writes_is_named_and_put_back(path: str) -> None:
    module, state = Writer(WRITES[path]), RegionState()
    for _ in range(3):
        assert path in [d.path for d in written(module, state)]


def test_a_forward_that_writes_nothing_has_no_differences() -> None:
    module, state = Writer(lambda _: None), RegionState()
    for _ in range(3):
        assert written(module, state) == []


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda m: m.average.mul_(0.9), "Writer.average was written to"),
        (swap_data, "Writer.inner.0.weight had its data replaced"),
        (lambda m: m.inner[1](torch.randn(2, 3)), "Writer.inner.1.num_batches_tracked was written to"),
    ],
)
def test_a_tensor_that_is_written_to_is_seen_and_cannot_be_put_back(write: Callable[[Any], Any], what: str) -> None:
    found = written(Writer(write), RegionState())
    assert what in map(str, found)
    assert all(each.is_in_place for each in found)


def test_a_variable_shared_with_the_function_around_is_seen() -> None:
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    module = nn.Linear(3, 3)
    module.register_forward_hook(hook)
    (found,) = written(module, RegionState())
    assert found.path.endswith(":count")
    assert count == 0


def test_a_variable_is_still_what_it_was_by_its_object_and_not_while_it_is_empty() -> None:
    def make() -> types.CellType:
        value = [1]
        held = (lambda: value).__closure__
        assert held
        return held[0]

    cell = make()
    holder = Cell("value", cell)
    before = holder.content(is_kept=False)
    assert holder.is_still(before)
    del cell.cell_contents
    assert not holder.is_still(before) and holder.is_still({})
    cell.cell_contents = 2
    assert not holder.is_still(before) and not holder.is_still({})
    cell.cell_contents = 3
    assert not holder.is_still({"cell_contents": 2}) and holder.is_still({"cell_contents": 3})


class Irrep(tuple[int, int]):
    """A tuple that is one object (e3nn), and has no length for the program."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_whose_class_has_no_length_is_looked_at() -> None:
    module = nn.Linear(3, 3)
    module.kinds = [Irrep((1, 2)), {"a": Irrep((0, 1))}]  # type: ignore[assignment]
    assert written(module, RegionState()) == []


def test_a_set_with_another_table_is_not_still_what_it_was() -> None:
    numbers = {1, 2}
    holder = Members("numbers", numbers)
    before = holder.content(is_kept=False)
    numbers.update(range(1, 99))
    numbers.difference_update(range(3, 99))
    # Which member `pop` gives may be another one in a table of another size.
    assert numbers == before and not holder.is_still(before)


def test_a_hook_that_is_added_and_a_module_that_is_replaced_are_seen() -> None:
    module, state = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), RegionState()
    before = state.snapshot(module)
    module[1].register_forward_hook(lambda *_: None)
    module[0] = nn.Linear(3, 3)
    found = {d.path for d in differences(before, state.snapshot(module))}
    assert found == {"Sequential.0", "Sequential.1._forward_hooks"}
    restore(before)
    assert not module[1]._forward_hooks


@pytest.mark.parametrize("numbers", [itertools.count(), iter([1, 2, 3]), iter(range(3)), (n for n in (1, 2, 3))])
def test_iterators_are_seen_to_go_on(numbers: Any) -> None:
    module, state = nn.Linear(3, 3), RegionState()
    module.numbers = numbers
    before = state.snapshot(module)
    next(module.numbers)
    (found,) = differences(before, state.snapshot(module))
    assert found.is_in_place


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_that_is_written_to_is_seen(size: int) -> None:
    module, state = nn.Linear(3, 3), RegionState()
    module.table = np.zeros(size)
    before = state.snapshot(module)
    module.table += 1
    (found,) = differences(before, state.snapshot(module))
    assert found.path == "Linear.table"


def test_a_snapshot_does_not_keep_the_graph_of_an_earlier_call_alive() -> None:
    module, state = Writer(keep_graph), RegionState()
    module(torch.randn(2, 3))
    kept = weakref.ref(module.kept)
    snapshot = state.snapshot(module, is_kept=True)
    module.kept = None
    gc.collect()
    assert kept() is None
    assert snapshot.contents


def test_the_state_does_not_keep_its_module_alive() -> None:
    module, state = Writer(lambda _: None), RegionState()
    state.snapshot(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_copies_of_a_module_have_a_state_of_their_own() -> None:
    module, state = Writer(WRITES["Writer.calls"]), RegionState()
    before = state.snapshot(module)
    copy.deepcopy(module)(torch.randn(2, 3))
    assert differences(before, state.snapshot(module)) == []


def test_python_and_numpy_draw_again_what_they_drew() -> None:
    np.random.randn()  # leaves the second half of a pair
    first, second = python_state(), numpy_state.get()
    drawn = [random.random(), random.gauss(0, 1), np.random.randn(), np.random.randn(), np.random.rand()]
    put_python_state(first)
    numpy_state.put(second)
    assert drawn == [random.random(), random.gauss(0, 1), np.random.randn(), np.random.randn(), np.random.rand()]


def test_the_second_half_of_a_pair_counts_as_drawn_once_anybody_draws() -> None:
    np.random.randn()
    assert not numpy_state.same(numpy_state.get(), (np.random.rand(), numpy_state.get())[1])
    np.random.randn()
    before = numpy_state.get()
    np.random.randn()
    assert not numpy_state.same(before, numpy_state.get())

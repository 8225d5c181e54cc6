"""Turns of a loop that a trace left out are put into its tape: rows like those before, with numbers that grow on."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tightfit.tape import Copies, EventKind, Events, Geometry, Operators, Source, Spans, Storages, Tape, Waits, Weights
from tightfit.tape.left_out import LeftOut, with_left_out
from tightfit.tape.loader_use import LoaderUse
from tightfit.tape.verify import verify_tape


@dataclasses.dataclass
class _Rows:
    operators: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    storages: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    events: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    geometry: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    copies: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    waits: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def lengths(self) -> dict[str, int]:
        return {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def operator(self, name: int, num_bytes: int) -> None:
        self.operators.append((name, 0, 0, 0, 0, 0, 2.0 * num_bytes, num_bytes, 8))

    def allocate(self, num_bytes: int, source: int = Source.TENSOR) -> int:
        self.storages.append((num_bytes, num_bytes, num_bytes, 4, source, len(self.operators) - 1, 0))
        self.events.append((EventKind.ALLOCATE, len(self.storages) - 1, len(self.operators), 0))
        return len(self.storages) - 1

    def free(self, storage: int) -> None:
        self.events.append((EventKind.FREE, storage, len(self.operators), 0))


def _tape(turns: Iterable[int], left_out: tuple[int, int] | None = None) -> Tape:
    """A loop whose cache is a token longer in each of the `turns`. With `left_out`, a turn and a number, so many turns are noted as left out behind it."""
    rows, noted = _Rows(), ()
    rows.operator(0, 100)
    weight, cache = rows.allocate(100), -1
    begins, batches = [], []
    for turn in turns:
        begins.append(rows.lengths())
        batches.append(len(rows.operators))
        rows.operator(1, 64 * turn)
        longer = rows.allocate(64 * turn)
        if cache >= 0:
            rows.free(cache)
        cache = longer
        rows.operator(2, 512)
        temporary, scratch = rows.allocate(512), rows.allocate(16, Source.SCRATCH)
        rows.geometry.append((len(rows.operators) - 1, 1, 4, turn, 8, 0, 1, 0, False, 0))
        rows.free(scratch)
        rows.free(temporary)
        rows.operator(3, 8)
        rows.copies.append((len(rows.operators) - 1, 1, False, True, 8))
        rows.waits.append((5, len(rows.operators), 0, -1))
        if left_out is not None and turn == left_out[0]:
            ranges = {name: (begins[-1][name], end) for name, end in rows.lengths().items()}
            noted = (LeftOut(number=left_out[1], moving=(cache,), **ranges),)
    end = len(rows.events)
    rows.operator(4, 8)
    rows.free(cache)
    rows.free(weight)
    return Tape(
        target="loop.py",
        versions={},
        traced_for="a card",
        strings=("", "cat", "mm", "copy", "end"),
        operators=Operators.from_rows(rows.operators),
        storages=Storages.from_rows(rows.storages),
        events=Events.from_rows(rows.events),
        spans=Spans.from_rows([(0, 1, 0, end), (0, 2, end, len(rows.events))]),
        operators_of_steps=((0, len(rows.operators) - 1),),
        copies=Copies.from_rows(rows.copies),
        waits=Waits.from_rows(rows.waits),
        geometry=Geometry.from_rows(rows.geometry),
        weights=Weights.from_rows([(weight, 0, True)]),
        assumptions=(),
        host_peak_bytes=0,
        left_out=noted,
        loaders=(
            LoaderUse(
                line="loop.py:3",
                num_workers=0,
                pins_memory=False,
                prefetch_factor=None,
                is_persistent=False,
                batch_size=1,
                num_examples=None,
                batches=(*batches, len(rows.operators)),
            ),
        ),
    )


def _are_equal(one: Tape, other: Tape) -> bool:
    for field in dataclasses.fields(Tape):
        a, b = getattr(one, field.name), getattr(other, field.name)
        is_table = hasattr(a, "columns")
        if is_table and not all(np.array_equal(c, b.columns()[name]) for name, c in a.columns().items()):
            return False
        if is_table and any(c.dtype != b.columns()[name].dtype for name, c in a.columns().items()):
            return False
        if not is_table and a != b:
            return False
    return True


@pytest.mark.parametrize("last", [3, 5])
@pytest.mark.parametrize("number", [1, 2, 40])
def test_it_is_the_tape_of_all_turns(last: int, number: int) -> None:
    rest = range(last + number + 1, last + number + 4)
    short = _tape([*range(1, last + 1), *rest], (last, number))
    whole = _tape(range(1, last + number + 4))
    assert not _are_equal(short, whole)
    made = with_left_out(short)
    assert _are_equal(made, whole)
    assert not verify_tape(made)


def test_a_tape_without_any_stays_itself() -> None:
    tape = _tape(range(1, 5))
    assert with_left_out(tape) is tape


def test_it_is_saved_with_what_was_left_out(tmp_path: Any) -> None:
    short = _tape([1, 2, 3, 14, 15], (3, 10))
    short.save(tmp_path / "tape.npz")
    assert _are_equal(Tape.load(tmp_path / "tape.npz"), short)

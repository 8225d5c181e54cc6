"""What loading batches costs per step, on hand-made steps with known answers, and what is advised."""

import dataclasses

import numpy as np
import pytest
from tests.timelines import Copy, Kernel, Row, priced_steps, read

from tightfit.devices.catalogue import find
from tightfit.diagnosis.suggestions.from_loading import suggestions_on_loading
from tightfit.simulate.input_pipeline import InputPipeline, LoaderCost, input_pipeline
from tightfit.tape import Phase, Tape
from tightfit.tape.loader_use import LoaderUse
from tightfit.units import MIB

CARD = find("RTX 4090")


def use(*seconds: float, batches: tuple[int, ...] = (), num_workers: int = 0) -> LoaderUse:
    return LoaderUse(
        line="train.py:7",
        num_workers=num_workers,
        pins_memory=False,
        prefetch_factor=2 if num_workers else None,
        is_persistent=False,
        batch_size=16,
        num_examples=1600,
        batches=batches,
        load_seconds=seconds,
    )


def pipeline_of(step: list[Row], *loaders: LoaderUse, num_steps: int = 4, backward: int | None = None) -> InputPipeline:
    prices = priced_steps(*[step] * num_steps)
    tape = dataclasses.replace(prices.tape, loaders=loaders)
    if backward is not None:
        # One operator of each step.
        phase = np.zeros(len(tape.operators), np.int8)
        phase[backward :: len(phase) // num_steps] = Phase.BACKWARD
        tape = dataclasses.replace(tape, operators=dataclasses.replace(tape.operators, phase=phase))
    found = input_pipeline(dataclasses.replace(prices, tape=tape), CARD)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("step", "num_workers", "expected"),
    [
        # The host loads the next batch while the card computes this one, as far as nothing makes it wait.
        ([Kernel(seconds=4)], 0, 4),
        ([Kernel(seconds=2)], 0, 3),
        ([Kernel(seconds=4), read()], 0, 7.25),
        ([Kernel(seconds=4), read()], 1, 4.25),
        ([Kernel(seconds=1)], 2, 1.5),
    ],
)
def test_a_step_with_loading(step: list[Row], num_workers: int, expected: float) -> None:
    num_operators = 4 * sum(isinstance(row, Kernel) for row in step)
    found = pipeline_of(step, use(9, 3, 3, batches=tuple(range(num_operators)), num_workers=num_workers))
    (cost,) = found.loaders
    assert cost.load_seconds == 3 * cost.batches
    assert found.with_loading_seconds == pytest.approx(expected)
    assert found.async_seconds == found.step_seconds


def test_a_loader_that_steps_take_nothing_from_costs_nothing() -> None:
    # Before the first step, and none at all.
    prices = priced_steps([Kernel()], [Kernel()])
    tape = dataclasses.replace(prices.tape, loaders=(use(5, 5, batches=(0,)), use(5, 5)))
    assert input_pipeline(dataclasses.replace(prices, tape=tape), CARD) is None


@pytest.mark.parametrize(
    ("batches", "evaluated"),
    [
        # Three steps of two operators, each behind the copy of its batch; the loop goes on, or an evaluation follows with a loader of its own.
        ((0, 2, 5, 8), ()),
        ((0, 2, 5), (8, 9, 9)),
    ],
)
def test_a_loader_of_an_evaluation_behind_the_steps_feeds_none_of_them(batches, evaluated) -> None:
    step: list[Row] = [Kernel(seconds=2), Kernel(seconds=2), Copy(seconds=1, is_blocking=True)]
    training, evaluation = use(5, 5, 5, batches=batches), use(7, 7, 7, batches=evaluated)
    found = pipeline_of(step, training, evaluation, num_steps=3, backward=1)
    (cost,) = found.loaders
    assert cost.use == training and cost.batches == 1 and cost.load_seconds == 5
    # The copy at the end of the last step is the evaluation's there.
    assert found.step_seconds == 5 and found.with_loading_seconds == 10


def test_a_tape_keeps_its_loaders(tmp_path) -> None:
    tape = dataclasses.replace(priced_steps([Kernel()]).tape, loaders=(use(0.5, 0.25, batches=(1, 2), num_workers=2),))
    tape.save(tmp_path / "x.npz")
    assert Tape.load(tmp_path / "x.npz").loaders == tape.loaders


def given(step: float, load: float, num_workers: int = 0, **others: float) -> InputPipeline:
    cost = LoaderCost(use=use(load, num_workers=num_workers), batches=1, load_seconds=load, batch_bytes=MIB)
    beside = load / num_workers if num_workers else step + load
    values = {"async_seconds": step, "copied_bytes": 0, "num_pageable": 0} | others
    return InputPipeline(
        loaders=(cost,),
        step_seconds=step,
        with_loading_seconds=max(step, beside),
        copy_line="train.py:9",
        **values,  # type: ignore[arg-type]
    )


def test_workers_are_advised_as_many_as_keep_up() -> None:
    workers, cached = suggestions_on_loading(given(0.1, 0.3))
    assert workers.what == "num_workers=4, persistent_workers=True in the DataLoader"
    assert workers.where == "train.py:7" and workers.adds_seconds == pytest.approx(-0.3)
    assert (
        "would take up to 300.0 ms off a step of 400.0 ms" in workers.effect
        and "8.0 MiB of batches ahead" in workers.note
    )
    assert "would need 100.0 MiB for 1,600 samples" in cached.effect
    # Of several loaders a sentence alone, as a plan prints it, says which one it is about.
    assert workers.sentence.startswith(f"{workers.what} (train.py:7) would take up to ")
    assert cached.sentence.startswith(f"{cached.what} (train.py:7) would need ")
    assert [s.what for s in suggestions_on_loading(given(0.1, 0.3, num_workers=4))] == []
    assert next(suggestions_on_loading(given(0.1, 0.3, num_workers=2))).what.startswith("num_workers=4")
    # Too many of them: only what is kept helps.
    assert [s.what.partition(",")[0] for s in suggestions_on_loading(given(0.01, 0.5))] == [
        "keep decoded samples in host memory"
    ]


def test_what_is_hidden_or_small_is_no_advice() -> None:
    assert list(suggestions_on_loading(None)) == []
    assert list(suggestions_on_loading(given(1.0, 0.01))) == []
    hidden = dataclasses.replace(given(1.0, 0.5), with_loading_seconds=1.0)
    assert list(suggestions_on_loading(hidden)) == []


@pytest.mark.parametrize(
    ("num_pageable", "begin"), [(1, "pin_memory=True in the DataLoader and .to(device"), (0, ".to(device")]
)
def test_copies_that_the_host_waits_for(num_pageable: int, begin: str) -> None:
    pipeline = given(1.0, 0.0, async_seconds=0.9, copied_bytes=64 * MIB, num_pageable=num_pageable)
    (advice,) = suggestions_on_loading(pipeline)
    assert advice.what.startswith(begin) and advice.where == "train.py:9" and advice.is_one_line
    assert "would take 100.0 ms off a step of 1.00 s" in advice.effect and "64.0 MiB" in advice.note
    # A program that has no loader may write to what it copies from.
    assert list(suggestions_on_loading(dataclasses.replace(pipeline, loaders=()))) == []

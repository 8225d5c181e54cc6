"""The timeline of a step: hand-made steps with known answers, and what holds of any step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_steps import steps, waits
from tests.timelines import (
    READ_SECONDS,
    Copy,
    Kernel,
    Row,
    Wait,
    priced_steps,
    read,
    record,
    replayed_one_by_one,
    update,
    wait,
)

from tightfit.cost.copies import copy_seconds
from tightfit.devices.catalogue import find
from tightfit.simulate.timeline import StepTimeline, busy_seconds_of_steps, seconds_of_steps, step_timeline
from tightfit.tape import CopyDirection, WaitKind
from tightfit.tape.verify import verify_tape

TO_CARD, TO_HOST, TO_DISK, FROM_DISK = CopyDirection


def timeline(*rows: Row) -> StepTimeline:
    """The timeline of a step, in a long row of steps like it."""
    prices = priced_steps(rows)
    assert verify_tape(prices.tape) == []
    return step_timeline(prices)


def test_a_copy_hides_behind_kernels_of_another_stream() -> None:
    step = timeline(Copy(stream=1, seconds=2.0), Kernel(seconds=5.0))
    assert step.seconds == pytest.approx(5.0)
    assert step.hidden_seconds(TO_CARD) == pytest.approx(2.0) == step.copy_seconds(TO_CARD)
    assert step.idle_seconds == pytest.approx({"host": 5.0, "stream 0": 0.0, "copy engine to the GPU": 3.0})


def test_the_host_updates_parameters_beside_copies_that_it_has_issued_and_before_those_that_it_has_not() -> None:
    # The second gradient comes down while the host updates with the first, and a weight goes up while it updates with the second.
    rows = [
        Copy(stream=1, seconds=2.0, direction=TO_HOST),
        record(1, 0),
        Copy(stream=1, seconds=2.0, direction=TO_HOST),
        record(1, 1),
    ]
    rows += [Wait(kind=WaitKind.HOST_FOR_EVENT, event=0), update(5), Copy(stream=2, seconds=2.0)]
    rows += [
        Wait(kind=WaitKind.HOST_FOR_EVENT, event=1),
        update(5),
        Copy(stream=2, seconds=2.0),
        record(2, 2),
        wait(0, 2),
    ]
    step = timeline(*rows, Wait(kind=WaitKind.HOST_FOR_DEVICE))
    assert step.seconds == pytest.approx(2 + 5 + 5 + 2)
    assert step.idle_seconds["host"] == pytest.approx(4.0)
    assert [(part.resource, part.seconds) for part in step.critical_path if part.resource == "host"] == [
        ("host", 5.0),
        ("host", 5.0),
    ]


def test_a_copy_on_the_stream_of_the_kernels_hides_nothing() -> None:
    step = timeline(Copy(seconds=2.0), Kernel(seconds=5.0))
    assert step.seconds == pytest.approx(7.0)
    assert step.hidden_seconds(TO_CARD) == pytest.approx(0.0)
    assert step.idle_seconds["stream 0"] == pytest.approx(2.0)


def test_a_kernel_that_waits_for_its_input_shows_the_copy() -> None:
    # The copy may not run ahead into the step before: it waits for the kernel that has read the buffer.
    rows = [wait(1, 1), Copy(stream=1, seconds=2.0), record(1, 0), wait(0, 0), Kernel(seconds=5.0), record(0, 1)]
    step = timeline(*rows)
    assert step.seconds == pytest.approx(7.0)
    assert [(part.resource, part.seconds) for part in step.critical_path] == [
        ("copy engine to the GPU", pytest.approx(2.0)),
        ("stream 0", pytest.approx(5.0)),
    ]


def test_with_a_second_buffer_the_same_copy_is_hidden() -> None:
    # Two batches a step, each with its buffer: a copy waits for the kernel before the last one.
    rows = []
    for buffer in (0, 1):
        ready, read_ = buffer, 2 + buffer
        rows += [wait(1, read_), Copy(stream=1, seconds=2.0), record(1, ready)]
        rows += [wait(0, ready), Kernel(seconds=5.0), record(0, read_)]
    step = timeline(*rows)
    assert step.seconds == pytest.approx(10.0)
    assert step.hidden_seconds(TO_CARD) == pytest.approx(4.0)


def test_copies_in_one_direction_follow_each_other_and_those_in_two_overlap() -> None:
    both = [Copy(stream=1, seconds=3.0, direction=TO_CARD), Copy(stream=2, seconds=3.0, direction=TO_HOST)]
    assert timeline(*both).seconds == pytest.approx(3.0)
    same = [Copy(stream=1, seconds=3.0), Copy(stream=2, seconds=3.0)]
    assert timeline(*same).seconds == pytest.approx(6.0)


def test_the_disk_works_beside_the_link_and_either_reads_or_writes() -> None:
    both = [Copy(stream=1, seconds=3.0, direction=TO_HOST), Copy(stream=2, seconds=4.0, direction=TO_DISK)]
    step = timeline(*both, Kernel(seconds=1.0))
    assert step.seconds == pytest.approx(4.0)
    assert step.idle_seconds["disk"] == pytest.approx(0.0)
    assert step.hidden_seconds(TO_DISK) == pytest.approx(1.0)
    ways = [Copy(stream=1, seconds=3.0, direction=FROM_DISK), Copy(stream=2, seconds=4.0, direction=TO_DISK)]
    assert timeline(*ways).seconds == pytest.approx(7.0)


def test_a_wait_for_an_event_that_is_recorded_later_waits_for_nothing_in_the_first_step() -> None:
    rows = [Kernel(seconds=5.0, stream=1), wait(0, 0), Kernel(seconds=4.0)]
    # Recorded nowhere: the streams overlap.
    assert timeline(*rows).seconds == pytest.approx(5.0)
    # Recorded after the wait: it is the record of the step before, which is over.
    assert timeline(*rows, record(1, 0)).seconds == pytest.approx(5.0)
    assert timeline(rows[0], record(1, 0), *rows[1:], record(0, 1), wait(1, 1)).seconds == pytest.approx(9.0)


def test_a_read_makes_the_host_wait_and_then_the_gpu_for_the_host() -> None:
    kernels = [Kernel(seconds=1.0, issue=0.5)] * 10
    # The host is faster, and runs ahead without the read.
    assert timeline(*kernels).seconds == pytest.approx(10.0)
    step = timeline(*kernels, read())
    assert step.seconds == pytest.approx(10.0 + READ_SECONDS + 0.5)
    assert step.idle_seconds["stream 0"] == pytest.approx(READ_SECONDS + 0.5)
    assert sum(part.seconds for part in step.critical_path) == pytest.approx(step.seconds)
    assert [part.resource for part in step.critical_path].count("host") == 2


def test_the_gpu_is_busy_while_the_stream_with_the_most_kernels_is() -> None:
    step = [Kernel(seconds=3.0), Kernel(seconds=1.0, stream=1), Copy(seconds=9.0), Kernel(seconds=2.0)]
    assert busy_seconds_of_steps(priced_steps(step, step[:2])) == pytest.approx([5.0, 3.0])


def test_a_step_that_the_host_cannot_issue_faster() -> None:
    step = timeline(*[Kernel(seconds=1.0, issue=2.0)] * 10, Wait(kind=WaitKind.STREAM_FOR_EVENT, stream=0, event=0))
    assert step.seconds == pytest.approx(20.0)
    assert step.idle_seconds == pytest.approx({"host": 0.0, "stream 0": 10.0})
    assert {part.resource for part in step.critical_path} == {"host"}


def test_without_a_read_the_host_uses_the_time_of_long_kernels_to_run_ahead() -> None:
    small, large = [Kernel(seconds=1.0, issue=2.0)] * 10, [Kernel(seconds=15.0, issue=2.0)]
    assert timeline(*small, *large, wait(0, 7)).seconds == pytest.approx(25.0)
    # With one it starts from nothing in each step: the small kernels take as long as the host.
    assert timeline(*small, *large, read()).seconds == pytest.approx(22.0 + 15.0 + READ_SECONDS)


def test_a_copy_that_blocks_costs_what_one_that_does_not_hides() -> None:
    kernels = [Kernel(seconds=5.0, issue=1.0)]
    prefetched = [Copy(stream=1, seconds=3.0, issue=1.0), *kernels]
    assert timeline(*prefetched).seconds == pytest.approx(5.0)
    # The host comes back to the kernels when the copy is over; the kernels of the step before run meanwhile.
    blocking = [Copy(stream=1, seconds=3.0, issue=1.0, is_blocking=True), *kernels]
    assert timeline(*blocking).seconds == pytest.approx(5.0)
    assert timeline(*blocking, read()).seconds == pytest.approx(1.0 + 3.0 + 1.0 + 5.0 + READ_SECONDS)


@pytest.mark.parametrize(
    "stop",
    [
        Wait(kind=WaitKind.HOST_FOR_STREAM, stream=0),
        Wait(kind=WaitKind.HOST_FOR_DEVICE),
        Wait(kind=WaitKind.HOST_FOR_EVENT, event=3),
    ],
)
def test_every_way_in_which_the_host_waits(stop: Wait) -> None:
    rows = [Kernel(seconds=4.0, issue=1.0), record(0, 3)]
    assert timeline(*rows, stop).seconds == pytest.approx(5.0)
    assert timeline(*rows, Wait(kind=WaitKind.HOST_FOR_STREAM, stream=7)).seconds == pytest.approx(4.0)


def test_events_that_are_new_in_each_step_order_it_after_the_step_before() -> None:
    # Step n waits for what step n - 1 has recorded last: a copy to the card in the background.
    steps = [
        [wait(0, n), Kernel(seconds=5.0), record(0, 100 + n), wait(1, 100 + n), Copy(stream=1), record(1, n + 1)]
        for n in range(3)
    ]
    assert seconds_of_steps(priced_steps(*steps))[-1] == pytest.approx(6.0)


def test_delays_that_pass_through_many_streams_are_not_taken_for_the_period() -> None:
    # From one stream to the next with each step: the step after the fifth has all of them.
    rows = [Kernel(seconds=1.0, stream=stream) for stream in range(6)]
    chain = [
        row for stream in range(5, 0, -1) for row in (wait(stream, stream - 1), rows[stream], record(stream, stream))
    ]
    assert timeline(*chain, Kernel(seconds=3.0), record(0, 0)).seconds == pytest.approx(3.0)


@pytest.mark.parametrize("card", ["RTX 4090", "A100", "H200"])
def test_pageable_memory_takes_longer_and_blocks(card: str) -> None:
    pinned, pageable = (copy_seconds(1 << 30, find(card), is_pinned=is_pinned) for is_pinned in (True, False))
    assert pageable > 1.9 * pinned
    rows = [Kernel(seconds=1.0), Copy(stream=1, seconds=pinned)]
    assert timeline(*rows).seconds == pytest.approx(1.0)


@given(steps)
def test_the_timeline_is_that_of_a_replay_one_by_one(rows: list[Row]) -> None:
    step = timeline(*rows)
    assert step.seconds == pytest.approx(replayed_one_by_one(rows, 120), rel=1e-6, abs=1e-9)
    assert seconds_of_steps(priced_steps(rows)) == [pytest.approx(step.seconds)]
    for copy in step.copies:
        assert 0 <= copy.hidden_seconds <= copy.seconds + 1e-9


@given(steps)
def test_a_step_is_no_shorter_than_its_busiest_resource_and_no_longer_than_all_together(rows: list[Row]) -> None:
    step = timeline(*rows)
    issued = [row for row in rows if not isinstance(row, Wait)]
    num_reads = sum(isinstance(row, Wait) and row.kind == WaitKind.HOST_READS for row in rows)
    on_host = sum(row.event for row in rows if isinstance(row, Wait) and row.kind == WaitKind.HOST_UPDATES)
    every = sum(row.seconds + row.issue for row in issued) + num_reads * READ_SECONDS + on_host
    assert step.seconds <= every + 1e-9
    assert all(idle >= 0 for idle in step.idle_seconds.values())
    busy = [sum(row.issue for row in issued) + on_host]
    busy += [sum(row.seconds for row in issued if row.stream == stream) for stream in range(3)]
    engines = [(TO_CARD,), (TO_HOST,), (TO_DISK, FROM_DISK)]
    busy += [sum(row.seconds for row in issued if isinstance(row, Copy) and row.direction in e) for e in engines]
    assert step.seconds >= max(busy) - 1e-9
    assert sum(part.seconds for part in step.critical_path) == pytest.approx(step.seconds, rel=1e-6, abs=1e-9)


@given(steps, waits.filter(lambda row: row.kind != WaitKind.RECORD), st.integers(0, 14))
def test_another_wait_never_makes_a_step_shorter(rows: list[Row], another: Wait, at: int) -> None:
    more = [*rows[:at], another, *rows[at:]]
    assert timeline(*more).seconds >= timeline(*rows).seconds - 1e-9

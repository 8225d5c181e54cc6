"""What runs when in a step: one period of a settled step, on a track for each resource, with its critical path."""

import pytest
from hypothesis import given
from tests.random_steps import steps
from tests.timelines import READ_SECONDS, Copy, Kernel, Row, Wait, priced_steps, read, record, update, wait

from tightfit.devices.catalogue import find
from tightfit.simulate.step_tracks import READING, UPDATING, StepTracks, step_tracks
from tightfit.tape import WaitKind

CARD = find("A100")


def tracks_of(*rows: Row) -> StepTracks:
    return step_tracks(priced_steps(rows), CARD)


def drawn(tracks: StepTracks, resource: str) -> list[tuple[float, float, bool]]:
    (track,) = [track for track in tracks.tracks if track.resource == resource]
    return [(work.begin_seconds, work.end_seconds, work.is_critical) for work in track.work]


def test_a_copy_that_hides_stands_beside_the_kernel_and_is_not_critical() -> None:
    found = tracks_of(Copy(stream=1, seconds=2.0), Kernel(seconds=5.0), Wait(kind=WaitKind.HOST_FOR_DEVICE))
    assert [track.resource for track in found.tracks] == ["host", "stream 0", "copy engine to the GPU"]
    assert drawn(found, "stream 0") == [(0.0, 5.0, True)]
    assert drawn(found, "copy engine to the GPU") == [(0.0, 2.0, False)]
    assert found.critical_seconds == {("other kernels", "stream 0"): 5.0}


def test_a_copy_that_is_waited_for_comes_before_its_kernel() -> None:
    rows = [wait(1, 1), Copy(stream=1, seconds=2.0), record(1, 0), wait(0, 0), Kernel(seconds=5.0), record(0, 1)]
    found = tracks_of(*rows)
    # The period begins with the first kernel, so the copy for the next one ends it.
    assert drawn(found, "stream 0") == [(0.0, 5.0, True)]
    assert drawn(found, "copy engine to the GPU") == [(5.0, 7.0, True)]


def test_a_host_that_reads_a_value_is_drawn_where_it_waits() -> None:
    found = tracks_of(Kernel(seconds=5.0, issue=0.5), Kernel(seconds=1.0, issue=0.5), read())
    assert drawn(found, "stream 0") == [(0.5, 5.5, True), (5.5, 6.5, True)]
    # It issues the second kernel behind the first one's back, which nothing waits for.
    assert drawn(found, "host") == [(0.0, 0.5, True), (0.5, 1.0, False), (6.5, 6.5 + READ_SECONDS, True)]
    assert found.critical_seconds[READING, "host"] == READ_SECONDS


def test_a_host_that_nothing_makes_wait_is_drawn_from_the_beginning() -> None:
    found = tracks_of(Kernel(seconds=5.0, issue=0.5), Kernel(seconds=5.0, issue=0.5))
    assert drawn(found, "host") == [(0.0, 0.5, False), (0.5, 1.0, False)]


def test_a_step_that_its_host_issues_too_slowly_waits_for_the_host() -> None:
    found = tracks_of(*[Kernel(seconds=0.25, issue=1.0)] * 4)
    assert found.seconds == pytest.approx(4.0)
    assert found.critical_seconds == {("the host issues operators", "host"): pytest.approx(4.0)}
    assert [critical for _, _, critical in drawn(found, "stream 0")] == [False] * 4


def test_updates_at_the_host_have_a_name_of_their_own() -> None:
    found = tracks_of(Kernel(seconds=1.0), Wait(kind=WaitKind.HOST_FOR_DEVICE), update(5))
    assert found.critical_seconds[UPDATING, "host"] == pytest.approx(5.0)


@given(steps)
def test_every_track_is_one_period_without_overlaps_and_idle_for_the_rest(rows: list[Row]) -> None:
    found = tracks_of(*rows)
    assert sum(found.critical_seconds.values()) == pytest.approx(found.seconds, abs=1e-6)
    for track in found.tracks:
        at = 0.0
        for work in track.work:
            assert work.begin_seconds >= at - 1e-6
            at = work.end_seconds
        assert at <= found.seconds + 1e-6
        # A host that reads a value back is idle meanwhile.
        busy = sum(work.end_seconds - work.begin_seconds for work in track.work if work.what != READING)
        assert busy == pytest.approx(found.seconds - track.idle_seconds, abs=1e-6)

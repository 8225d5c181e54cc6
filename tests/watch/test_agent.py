"""The agent: one reading after the other, whatever the driver, the clock and the processes do."""

import itertools
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.watch.machines import ScriptedSource, bench, simulated

from tightfit.units import GIB
from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.agent.reading_clock import ReadingClock
from tightfit.watch.clock import SimulatedClock
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.store.folder import StoreFolder
from tightfit.watch.store.stored_history import StoredHistory
from tightfit.watch.store.stored_state import stored_state
from tightfit.watch.watching import Watching

WITHOUT_FORECASTS = AgentSettings(outlooks=OutlookSettings(share=0.0))


class TestReading:
    def test_others_see_what_the_agent_sees(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated())
        found.ticks(70)
        state = found.agent.state()
        assert state is not None
        stored = stored_state(found.database)
        assert stored.cards == state.cards
        assert sorted(stored.processes, key=str) == sorted(state.processes, key=str)
        assert (stored.host, stored.source, stored.time) == (state.host, state.source, state.time)

    def test_a_driver_that_vanishes_is_said_with_its_time_and_comes_back(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: GIB})
        found = bench(tmp_path, source)
        found.ticks(3)
        lost_at = found.clock.wall()
        source.is_lost = True
        found.ticks(100)
        for state in (found.agent.state(), stored_state(found.database)):
            assert state is not None
            assert (state.lost_since, state.lost_reason) == (lost_at, "GPU is lost")
            # What was seen last stays in view.
            assert state.processes[0].used_bytes == GIB
        source.is_lost = False
        found.ticks(31)
        assert stored_state(found.database).lost_since is None
        assert stored_state(found.database).time > lost_at + 99

    def test_a_pid_that_passes_to_another_process_is_another_series(self, tmp_path: Path) -> None:
        source = ScriptedSource({7: GIB})
        found = bench(tmp_path, source)
        found.ticks(60)
        source.identities[7], source.commands[7] = "boot:later", "python other.py"
        source.used[7] = 2 * GIB
        found.ticks(60)
        history = StoredHistory(found.database).of_card("GPU-0", seconds=119, bins=20, num_layers=5)
        assert {layer.command for layer in history.layers} == {"python train.py", "python other.py"}

    def test_a_process_whose_memory_the_driver_does_not_say_is_listed(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({7: None}))
        found.ticks(2)
        for state in (found.agent.state(), stored_state(found.database)):
            assert state is not None
            assert [(each.facts.pid, each.used_bytes) for each in state.processes] == [(7, None)]

    def test_late_readings_are_not_made_up_for(self, tmp_path: Path) -> None:
        """A reading of 5 seconds is followed by the next at once, and then one a second: never by five."""
        source, times = ScriptedSource({}), []
        found = bench(tmp_path, source)
        stop, plain = threading.Event(), source.read

        def read(now: float):
            times.append(found.clock.now)
            if len(times) == 3:
                found.clock.now += 5.0
            if len(times) == 8:
                stop.set()
            return plain(now)

        source.read = read  # type: ignore[method-assign]
        found.agent.run(stop)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert gaps == [1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0]


class TestClocks:
    def test_a_clock_that_is_set_back_costs_no_order_and_no_history(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: GIB})
        found = bench(tmp_path, source)
        found.ticks(100)
        found.clock.offset = -10 * 365 * 86400.0
        source.used[1] = 2 * GIB
        found.ticks(100)
        state = stored_state(found.database)
        # The label is what the wall clock says, the order that of the readings.
        assert state.time == found.clock.wall() - 1
        assert any("set back by 315,360,000 seconds" in note for note in state.notes)
        used = StoredHistory(found.database).of_card("GPU-0", seconds=199, bins=199, num_layers=1).used
        assert used[:99].tolist() == [GIB] * 99
        assert used[-99:].tolist() == [2 * GIB] * 99

    def test_a_clock_that_is_set_forward_by_years_costs_no_history(self, tmp_path: Path) -> None:
        """What is kept is counted: by age, all that came before would be too old at once."""
        found = bench(tmp_path, ScriptedSource({1: GIB}))
        found.ticks(10, seconds=60.0)
        found.clock.offset = 10 * 365 * 86400.0
        found.ticks(10, seconds=60.0)
        minutes = StoredHistory(found.database).minutes_of(1, count=10_000_000)
        assert len(minutes.values) == 20

    @settings(max_examples=30)
    @given(
        st.lists(
            st.tuples(st.floats(-1e9, 1e9), st.floats(0.0, 1e5)),
            min_size=1,
            max_size=20,
        )
    )
    def test_times_always_grow(self, steps: list[tuple[float, float]]) -> None:
        timeline, monotonic, times = ReadingClock(1_700_000_000_000), 0.0, [1_700_000_000_000]
        for offset, elapsed in steps:
            monotonic += elapsed
            times.append(timeline.advance(1.7e9 + monotonic + offset, monotonic))
        assert times == sorted(set(times))

    def test_a_clock_that_only_goes_on_is_taken_as_it_is(self) -> None:
        timeline, clock = ReadingClock(0), SimulatedClock()
        for _ in range(50):
            assert timeline.advance(clock.wall(), clock.monotonic()) == round(clock.wall() * 1000)
            clock.now += 0.999
            clock.offset -= 0.0004
        assert timeline.note == ""


class TestForecasts:
    def test_cards_and_processes_have_a_bound_for_the_next_hour_also_after_a_restart(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated(), WITHOUT_FORECASTS)
        found.ticks(60, seconds=60.0)
        found.agent.close()
        second = bench(tmp_path, simulated(), AgentSettings(outlooks=OutlookSettings(share=1e9)))
        second.clock.now = found.clock.now
        second.ticks(1)
        before = second.agent.state()
        assert before is not None
        for outlook in (before.cards[0].outlook, before.processes[0].outlook):
            assert outlook is not None
            assert 0 < outlook.median_bytes <= outlook.upper_bytes
            assert (outlook.horizon_seconds, outlook.quantile) == (3600.0, 0.975)
        second.agent.close()
        third = bench(tmp_path, simulated(), WITHOUT_FORECASTS)
        third.clock.now = second.clock.now
        third.ticks(1)
        after = third.agent.state()
        assert after is not None
        assert after.cards[0].outlook == before.cards[0].outlook

    def test_they_cost_no_more_than_their_share(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forecast that takes 50 ms of the processor, at 0.3 % of it, is followed by the next one after 17 seconds."""
        found = bench(tmp_path, simulated(4, 10), AgentSettings(outlooks=OutlookSettings(share=0.003)))
        planner, spent = found.agent._planner, [0.0]
        monkeypatch.setattr("tightfit.watch.outlook.planner.time.thread_time", lambda: spent[0])

        def forecast(history: StoredHistory, series: int, wall: float, used: int, *, is_card: bool) -> None:
            spent[0] += 0.05

        monkeypatch.setattr(planner, "_forecast", forecast)
        found.ticks(600)
        assert spent[0] == pytest.approx(0.003 * (600 + 60), abs=0.06)


def test_a_fault_of_the_agent_is_raised_where_the_state_is_asked_for(tmp_path: Path) -> None:
    source = ScriptedSource({})
    watching = Watching(StoreFolder(tmp_path), lambda: source, WITHOUT_FORECASTS)
    source.used = None  # type: ignore[assignment]
    watching.start()
    with pytest.raises(AttributeError):
        ask_until_it_raises(watching)
    watching.close()


def ask_until_it_raises(watching: Watching) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watching.state()
        time.sleep(0.01)


def test_of_many_threads_that_find_the_agent_gone_one_takes_over(tmp_path: Path) -> None:
    """Readers ask from all threads of the server."""
    ours, other = StoreFolder(tmp_path), StoreFolder(tmp_path)
    assert other.lock()
    opened: list[ScriptedSource] = []

    def open_source() -> ScriptedSource:
        opened.append(ScriptedSource({1: GIB}))
        time.sleep(0.05)
        return opened[-1]

    watching = Watching(ours, open_source, WITHOUT_FORECASTS)
    # The other one has the lock, and has not made its history yet.
    watching.start()
    assert watching.state() is None
    other.unlock()
    bench(tmp_path, ScriptedSource({1: GIB}), WITHOUT_FORECASTS).ticks(1)
    watching._next_try = 0.0
    threads = [threading.Thread(target=watching.state) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert watching.is_agent
    watching.close()

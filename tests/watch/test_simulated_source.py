"""The simulated machine: the same for a seed, within its memory, with processes that come, go, burst and leak."""

import numpy as np
import pytest
from tests.watch.machines import simulated

from tightfit.errors import UsageError
from tightfit.watch.sources.abstract_source import SourceLost
from tightfit.watch.sources.simulated import SimulatedMachine, SimulatedSource, parse_machine

START = 1_700_000_000.0


def test_the_same_seed_is_the_same_machine_whenever_it_is_asked() -> None:
    first, second, other = simulated(seed=3), simulated(seed=3), simulated(seed=4)
    for moment in (START, START + 7.5, START + 86_400):
        first.read(moment - 1)
        assert first.read(moment) == second.read(moment)
        assert first.facts(first.read(moment).processes[0].pid) == second.facts(second.read(moment).processes[0].pid)
    assert first.read(START).cards[0].used_bytes != other.read(START).cards[0].used_bytes


def test_memory_adds_up_and_stays_within_the_card() -> None:
    source = simulated(cards=3, processes=20)
    for minute in range(0, 24 * 60, 23):
        reading = source.read(START + 60 * minute)
        for card in reading.cards:
            of_processes = sum(each.used_bytes or 0 for each in reading.processes if each.card == card.uuid)
            assert of_processes < card.used_bytes <= card.total_bytes  # type: ignore[operator]


def test_processes_come_go_and_grow() -> None:
    source = simulated(cards=1, processes=20)
    lives: dict[int, list[int]] = {}
    for minute in range(0, 12 * 60, 2):
        for each in source.read(START + 60 * minute).processes:
            lives.setdefault(each.pid, []).append(each.used_bytes or 0)
    assert len(lives) > 40
    whole = [np.array(sizes[3:]) for sizes in lives.values() if len(sizes) > 40]
    assert any((np.diff(sizes) >= 0).all() and sizes[-1] > 1.3 * sizes[0] for sizes in whole), "nothing leaks"
    assert any(len(set(sizes.tolist())) <= 3 for sizes in whole), "nothing holds its levels"


def test_a_process_is_whom_it_was() -> None:
    source = simulated()
    pids = {each.pid for each in source.read(START).processes}
    facts = {pid: source.facts(pid) for pid in pids}
    for each in source.read(START + 60).processes:
        if each.pid in pids:
            assert source.facts(each.pid) == facts[each.pid]
    assert source.facts(1).command == "?"


def test_the_driver_can_be_away() -> None:
    source = SimulatedSource(SimulatedMachine(lost_between=(START + 5, START + 10)))
    source.read(START)
    with pytest.raises(SourceLost):
        source.read(START + 7)
    assert source.read(START + 10).cards


@pytest.mark.parametrize(
    ("text", "machine"),
    [("8x50", (8, 50, 0)), ("1x1:7", (1, 1, 7)), (" 2X6 ", (2, 6, 0)), ("4x0", (4, 0, 0))],
)
def test_machines_are_written_as_cards_times_processes(text: str, machine: tuple[int, int, int]) -> None:
    found = parse_machine(text)
    assert (found.num_cards, found.num_processes, found.seed) == machine
    assert len(SimulatedSource(found).read(START).cards) == machine[0]


@pytest.mark.parametrize("text", ["", "8", "0x5", "x", "8x50:", "-1x3", "2000x1", "1000x1000", "8x50; rm"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--simulate"):
        parse_machine(text)

"""The screen: whatever the size, the names and the keys, it has the lines of the terminal, and none is too wide."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.hostile_text import HOSTILE_TEXTS
from tests.watch.machines import bench, simulated
from tests.watch.states import NOW, machine, process

from tightfit.units import GIB
from tightfit.watch.machine.machine_state import Episode, MachineState
from tightfit.watch.store.stored_history import CardHistory, Layer
from tightfit.watch.terminal.charts import chart, resampled, sparkline
from tightfit.watch.terminal.keys import KeyDecoder
from tightfit.watch.terminal.screen import ScreenContent, screen
from tightfit.watch.terminal.tables import tables
from tightfit.watch.terminal.view import HELP, View, ordered, pressed, selected

KEYS = [
    *("up", "down", "page up", "page down", "home", "end", "left", "right", "escape", "enter", "h", "a", "f", "c", "o"),
    *("g", "G", "n", "t", "x", ",", ".", "/", "I", "T", "K", "y", "é", "refresh", "line start", "line end"),
]


def shown(state: MachineState, *, advice: tuple[str, ...] = ()) -> ScreenContent:
    values = np.linspace(0, 60 * GIB, 50)
    layer = Layer(pid=10, user="ada", command="python", container="", values=values / 2)
    history = CardHistory(times=values, used=values, layers=(layer,), others=values)
    return ScreenContent(state=state, histories={"GPU-0": history}, advice=advice, now=NOW)


def text_of(state: MachineState, view: View, width: int = 100, height: int = 30) -> str:
    return "\n".join(line.plain for line in screen(shown(state), view, width, height))


def test_plain_tables_cut_no_figure_in_80_columns() -> None:
    long = process(2345678, 30 * GIB, command="python -m train " + "--option value " * 9)
    state = machine(1, (long,))
    console = Console(file=io.StringIO(), width=80)
    console.print(tables(state, NOW))
    _, _, _, headings, row = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert headings.split()[:7] == ["GPU", "PID", "user", "memory", "next", "hour", "time"]
    assert "…" not in row[: headings.index("container")]
    assert {str(long.facts.pid), long.facts.user} <= set(row.split())


class TestScreen:
    @settings(max_examples=60)
    @given(
        width=st.integers(1, 250),
        height=st.integers(1, 70),
        num_cards=st.integers(0, 40),
        keys=st.lists(st.sampled_from(KEYS), max_size=8),
        is_ascii=st.booleans(),
    )
    def test_it_has_the_size_of_the_terminal(
        self, width: int, height: int, num_cards: int, keys: list[str], is_ascii: bool
    ) -> None:
        view, state = View(), machine(num_cards)
        for key in keys:
            view, _ = pressed(view, key, state)
        lines = screen(shown(state, advice=("a job fits",) * 3), view, width, height, is_ascii=is_ascii)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width

    def test_80_by_24_has_all_that_matters(self) -> None:
        text = text_of(machine(), View(), 80, 24)
        for words in (
            "node-1",
            "q quit",
            "10.0/80.0G",
            "12%",
            "12.0G ≤70.0G",
            "PID",
            "ada",
            "6.0G",
            "python train.py",
            "▅",
        ):
            assert words in text

    def test_what_is_wrong_stands_where_it_is_seen(self) -> None:
        episode = Episode(rule="full", subject="GPU 0", message="99 % used", fired_at=NOW - 60, resolved_at=None)
        over = dataclasses.replace(episode, subject="GPU 1", resolved_at=NOW)
        state = dataclasses.replace(
            machine(),
            lost_since=NOW - 90,
            lost_reason="GPU is lost",
            episodes=(episode, over),
            notes=("no space for the history",),
        )
        text = text_of(state, View(), 80, 10)
        assert "the driver has not answered for 2 min: GPU is lost" in text
        assert "no space for the history" in text
        assert "full: GPU 0: 99 % used" in text
        assert "GPU 1: 99 % used" not in text
        old = dataclasses.replace(machine(), time=NOW - 120)
        assert "the last reading is 2 min old" in text_of(old, View())

    def test_many_alerts_leave_room_for_the_advice_that_was_asked_for(self) -> None:
        episodes = tuple(
            Episode(rule="full", subject=f"GPU {i}", message="99 % used", fired_at=NOW, resolved_at=None)
            for i in range(20)
        )
        state = dataclasses.replace(machine(), episodes=episodes)
        text = "\n".join(line.plain for line in screen(shown(state, advice=("a job fits",)), View(), 80, 24))
        assert "18 more alerts" in text
        assert "a job fits" in text

    @pytest.mark.parametrize("hostile", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
    def test_names_that_would_harm_are_shown_as_they_are(self, hostile: str) -> None:
        for text in (f"\x1b[2J\x1b]0;x\x07\x9b31m{hostile}", f"[bold red]{hostile}[/]", "漢字" * 300):
            state = machine(processes=(process(10, GIB, command=text),))
            lines = screen(shown(state), View(), 90, 20)
            assert all(sign.isprintable() for line in lines for sign in line.plain)
            assert max(line.cell_len for line in lines) <= 90
            console = Console(file=io.StringIO(), width=90)
            console.print(tables(state, NOW))
            output = console.file.getvalue()  # type: ignore[attr-defined]
            assert all(sign.isprintable() or sign == "\n" for sign in output)
            if text.startswith("[bold"):
                assert "[bold red]" in output

    def test_thousands_of_processes_and_cards_scroll_with_the_selection(self) -> None:
        many = tuple(process(pid, GIB, index=pid % 300) for pid in range(5000))
        state = machine(300, many)
        view, _ = pressed(View(), "end", state)
        text = text_of(state, view, 80, 24)
        last = ordered(state, view)[-1]
        assert f" {last.facts.pid} " in text
        assert "of 300" in text


class TestKeys:
    @pytest.mark.parametrize(
        ("data", "keys"),
        [
            (b"q", ["q"]),
            (b"\x1b[A\x1b[B\x1bOC", ["up", "down", "right"]),
            (b"\x1b[5~\x1b[6~\x1b[15~", ["page up", "page down", "refresh"]),
            (b"\x1bj\x1bk\x1b[Z\t", ["down", "up", "up", "down"]),
            ("é?".encode(), ["é", "h"]),
            (b"\x1b[<35;12;9M\x1b[200~", []),
            (b"\x1b[1;5A", []),
            (b"\xff\x00\x07", []),
        ],
    )
    def test_of_a_terminal(self, data: bytes, keys: list[str]) -> None:
        assert KeyDecoder().feed(data) == keys

    def test_halves_wait_and_an_escape_alone_is_the_escape_key(self) -> None:
        decoder = KeyDecoder()
        assert decoder.feed(b"\x1b[") == []
        assert decoder.feed(b"A") == ["up"]
        assert decoder.feed(b"\x1b") == []
        assert decoder.flush() == ["escape"]
        assert decoder.flush() == []

    @given(st.binary(max_size=200))
    def test_no_bytes_break_it(self, data: bytes) -> None:
        decoder = KeyDecoder()
        for at in range(0, len(data), 3):
            decoder.feed(data[at : at + 3])
        assert len(decoder.flush()) <= 1

    def test_as_nvitops_users_know_them(self) -> None:
        state = machine()
        view = View()
        for key, pid in (("down", 12), ("down", 10), ("end", 13), ("up", 11), ("home", 12)):
            view, _ = pressed(view, key, state)
            assert selected(state, view).facts.pid == pid  # type: ignore[union-attr]
        for keys, order in (
            ("og", [11, 12, 10, 13]),
            ("op", [10, 11, 12, 13]),
            ("oP", [13, 12, 11, 10]),
            ("on", [12, 10, 11, 13]),
        ):
            for key in keys:
                view, _ = pressed(view, key, state)
            assert [each.facts.pid for each in ordered(state, view)] == order
        view, _ = pressed(view, "/", state)
        assert view.is_reversed
        view, _ = pressed(view, "escape", state)
        assert selected(state, view) is None
        view, _ = pressed(view, "h", state)
        assert all(words in text_of(state, view) for _, words in HELP)
        assert all(word in text_of(state, view, width=60) for _, words in HELP for word in words.split())
        view, _ = pressed(view, "q", state)
        assert not view.is_help and not view.has_quit
        assert pressed(view, "q", state)[0].has_quit

    def test_a_signal_is_sent_after_a_yes_alone(self) -> None:
        state = machine()
        view, request = pressed(View(), "T", state)
        assert request is None
        assert "select a process first" in view.message
        view, _ = pressed(view, "down", state)
        for answer, signal in (("n", None), ("Y", None), ("escape", None), ("y", "SIGTERM")):
            view, request = pressed(view, "T", state)
            assert request is None
            assert "send SIGTERM to process 12" in text_of(state, view)
            view, request = pressed(view, answer, state)
            assert (request.signal if request else None) == signal
        view, _ = pressed(view, "K", state)
        gone = machine(processes=())
        assert pressed(view, "y", gone)[1] is None


class TestCharts:
    def test_a_peak_survives_however_narrow(self) -> None:
        values = np.zeros(1000)
        values[617] = 8.0
        assert "█" in sparkline(values, 10, 8.0)
        assert max(resampled(values, 7)) == 8.0

    def test_nothing_is_a_blank_and_little_is_seen(self) -> None:
        values = np.array([np.nan, 0.0, 1e-9, 4.0, 8.0, 80.0])
        assert sparkline(values, 6, 8.0) == "  ▁▄██"
        assert sparkline(np.empty(0), 6, 8.0) == ""
        assert chart([0.0, 1.0, 4.0, 8.0], 2, 8.0) == ["   █", " ▂██"]

    def test_of_a_real_history(self, tmp_path: Path) -> None:
        found = bench(tmp_path, simulated())
        found.ticks(90)
        state = found.agent.state()
        assert state is not None
        assert "Simulated" in text_of(state, View(mode="full"), 120, 40)

"""Sinks: the cards as numbers, in TensorBoard's own files and in a run of Weights & Biases."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.watch.machines import ScriptedSource
from tests.watch.states import machine

from tightfit.cli.main import run
from tightfit.units import GIB
from tightfit.watch.background import Background
from tightfit.watch.sinks.scalars import scalars
from tightfit.watch.sinks.tensorboard import TensorBoardSink
from tightfit.watch.sinks.weights_and_biases import WeightsAndBiasesSink


def test_a_card_is_a_few_numbers() -> None:
    state = machine(1)
    assert dict(scalars(state)) == {
        "gpu0/memory_gib": 10.0,
        "gpu0/utilization": 0.5,
        "gpu0/power_watts": 310.0,
        "gpu0/next_hour_gib": 70.0,
    }
    (card,) = state.cards
    unknown = dataclasses.replace(card.reading, used_bytes=None, utilization=None, power_watts=None)
    assert (
        dict(scalars(dataclasses.replace(state, cards=(dataclasses.replace(card, reading=unknown, outlook=None),))))
        == {}
    )


def test_tensorboards_own_reader_finds_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for seconds in (0.0, 10.0):
        sink(dataclasses.replace(machine(1), time=1000.0 + seconds))
    sink.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    events = found.Tensors("gpu0/memory_gib")
    assert [(event.step, event.wall_time, event.tensor_proto.float_val[0]) for event in events] == [
        (0, 1000.0, 10.0),
        (10, 1010.0, 10.0),
    ]


def test_weights_and_biases_gets_a_row_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, float]] = []
    started: list[dict[str, Any]] = []
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **words: started.append(words) or types.SimpleNamespace(log=rows.append, finish=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sink = WeightsAndBiasesSink("gpus", "node-1")
    sink(machine(1))
    sink.close()
    assert started[0]["project"] == "gpus"
    assert (rows[0]["gpu0/memory_gib"], rows[0]["time"]) == (10.0, 1_700_000_000.0)


@pytest.mark.parametrize(("option", "package"), [("--tensorboard", "tensorboard"), ("--wandb", "wandb")])
def test_a_package_that_is_missing_is_said(
    option: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.summary", None)
    assert run(["watch", "--simulate", "1x1", option, "x"]) == 3
    assert f"pip install {package}" in capsys.readouterr().err


def test_the_agent_feeds_them_every_ten_seconds(tmp_path: Path) -> None:
    from tightfit.watch.agent.agent import Agent, AgentSettings
    from tightfit.watch.clock import SimulatedClock

    times: list[float] = []
    sink = Background("list", lambda state: times.append(state.time), max_waiting=100)
    clock = SimulatedClock(0.0)
    agent = Agent(ScriptedSource({1: GIB}), tmp_path / "history.sqlite", clock, AgentSettings(), [sink])
    for _ in range(31):
        agent.tick()
        clock.now += 1.0
    agent.close()
    sink.close()
    assert times == [0.0, 10.0, 20.0, 30.0]

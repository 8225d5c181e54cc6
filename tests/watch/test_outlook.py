"""What the next hour needs: growth that goes on is carried on, a job is advised about, and nothing else grows."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.watch.machines import ScriptedSource, bench

from tightfit.forecast.admission import Admission
from tightfit.forecast.series import Series
from tightfit.units import GIB, MIB
from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.outlook import admission_advice
from tightfit.watch.outlook.admission_advice import JobAdvice, advise
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.outlook.steady_growth import steady_growth

UNLIMITED = AgentSettings(outlooks=OutlookSettings(share=1e9))
WITHOUT = AgentSettings(outlooks=OutlookSettings(share=0.0))
MINUTES = 60.0 * np.arange(60)


def series(values: np.ndarray) -> Series:
    return Series(name="a", times=MINUTES[: len(values)], values=values.astype(np.float64))


class TestGrowth:
    def test_a_leak_has_its_slope_bursts_or_not(self) -> None:
        leak = 10 * GIB + 100 * MIB * np.arange(60)
        bursts = np.where(np.arange(60) % 7 == 3, 8 * GIB, 0)
        assert steady_growth(series(leak)) == pytest.approx(100 * MIB / 60)
        assert steady_growth(series(leak + bursts)) == pytest.approx(100 * MIB / 60, rel=0.05)

    @pytest.mark.parametrize(
        "values",
        [
            np.full(60, 10.0 * GIB),
            np.where(np.arange(60) < 30, 10.0, 20.0) * GIB,
            10 * GIB + 5 * GIB * np.sin(np.arange(60) / 5),
            np.maximum(0, 20 * GIB - 100 * MIB * np.arange(60)),
            10 * GIB + 0.1 * MIB * np.arange(60),
            10 * GIB + 100 * MIB * np.arange(23),
            np.random.default_rng(0).integers(8, 12, 60) * GIB,
        ],
        ids=["flat", "one step", "wave", "falling", "too little", "too short", "noise"],
    )
    def test_nothing_else_grows(self, values: np.ndarray) -> None:
        assert steady_growth(series(values)) == 0.0

    def test_a_leaking_process_is_forecast_above_all_that_it_has_used(self, tmp_path: Path) -> None:
        source = ScriptedSource({7: 10 * GIB, 8: 5 * GIB})
        found = bench(tmp_path, source, WITHOUT)
        for _ in range(60):
            source.used[7] = (source.used[7] or 0) + 100 * MIB
            found.ticks(1, seconds=60.0)
        found.agent.close()
        again = bench(tmp_path, source, UNLIMITED)
        again.clock.now = found.clock.now
        again.ticks(1)
        state = again.agent.state()
        assert state is not None
        leaking, other = state.processes
        assert leaking.outlook is not None and other.outlook is not None
        used = leaking.used_bytes or 0
        assert leaking.outlook.upper_bytes == pytest.approx(used + 60 * 100 * MIB, rel=0.03)
        assert (leaking.outlook.model, leaking.outlook.note) == ("growth", "grows by 5.86 GiB an hour")
        assert other.outlook.upper_bytes == 5 * GIB
        # A card grows with its processes.
        assert state.cards[0].outlook is not None
        assert state.cards[0].outlook.model == "growth"


def test_an_hour_is_an_hour_however_often_the_agent_reads(tmp_path: Path) -> None:
    """Readings every ten minutes: six of them are the next hour, and not sixty."""
    source = ScriptedSource({1: 10 * GIB})
    found = bench(tmp_path, source, WITHOUT)
    for turn in range(140):
        source.used[1] = (30 if turn % 40 == 20 else 10) * GIB
        found.ticks(1, seconds=600.0)
    found.agent.close()
    wide = dataclasses.replace(UNLIMITED.outlooks, card_minutes=10_000, quantile=0.7)
    again = bench(tmp_path, source, AgentSettings(outlooks=wide))
    again.clock.now = found.clock.now
    again.ticks(1)
    (card,) = again.agent.state().cards  # type: ignore[union-attr]
    # A peak every 400 minutes is in one hour of seven, and in each stretch of sixty readings.
    assert card.outlook is not None
    assert card.outlook.upper_bytes < 30 * GIB


class TestAdmission:
    @pytest.mark.parametrize(
        ("job", "fits", "words"),
        [
            (20 * GIB, True, "fits now and for the next hour with 99.5 %"),
            (39 * GIB, False, "fits now, but for the next hour with less than 50 %"),
            (60 * GIB, False, "does not fit now (40.00 GiB free)"),
        ],
    )
    def test_a_job_fits_now_or_for_the_hour_or_not(self, tmp_path: Path, job: int, fits: bool, words: str) -> None:
        """A card whose processes use 40 of 80 GiB, and 50 in every other quarter of an hour."""
        source = ScriptedSource({1: 40 * GIB})
        found = bench(tmp_path, source, WITHOUT)
        for minute in range(181):
            source.used[1] = (50 if minute // 15 % 2 else 40) * GIB
            found.ticks(1, seconds=60.0)
        state = found.agent.state()
        assert state is not None
        (advice,) = advise(found.database, state, job, OutlookSettings())
        assert (advice.fits, advice.index) == (fits, 0)
        assert words in advice.sentence

    def test_a_job_that_fits_with_less_than_is_asked_for_is_said_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = {"job_bytes": GIB, "capacity_bytes": 80 * GIB, "now_bytes": 70 * GIB, "upper_bytes": 80 * GIB}
        monkeypatch.setattr(admission_advice, "admit", lambda *_, **__: Admission(**sizes, probability=0.9))
        found = bench(tmp_path, ScriptedSource({1: GIB}), WITHOUT)
        found.ticks(61)
        (advice,) = advise(found.database, found.agent.state(), GIB, OutlookSettings())  # type: ignore[arg-type]
        assert not advice.fits
        assert "fits now, but for the next hour with 90 %, below the 97.5 % asked for (peak" in advice.sentence

    def test_without_a_job_there_is_no_advice(self, tmp_path: Path) -> None:
        found = bench(tmp_path, ScriptedSource({1: GIB}), WITHOUT)
        found.ticks(1)
        state = found.agent.state()
        assert state is not None
        assert JobAdvice(found.database, None, OutlookSettings()).of(state) == ()
        assert JobAdvice(tmp_path / "none", GIB, OutlookSettings()).of(state) == ()

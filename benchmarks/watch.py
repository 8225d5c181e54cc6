"""What the agent of `tightfit watch` costs and withstands: a simulated day, a hundred kills, a thousand forecasts, a minute of real time.

python -m benchmarks.watch [--hours 24] [--interval 1] [--machine 8x50] [--kills 100] [--seconds 60] [--csv docs/watch.csv]

* day: an agent reads a simulated machine once a second of a simulated clock, in this process. Its processor time per simulated second is its share of a core; the part of
  the simulated source, which no real machine has, is given beside it. Memory is this process's resident set.
* kills: agents in processes of their own write as fast as they can and say what they have written; each is killed with SIGKILL at a random moment. Lost is what was said and is not in the history.
* growth: how often steady growth is seen in the traces of `benchmarks.forecast`, where nothing leaks.
* forecasts: a thousand series of twelve hours of minutes, from the simulated machine, forecast for the next hour by one thread.
* real time: `tightfit watch --agent` as it is, with its processor time as the kernel counts it.
"""

import argparse
import csv
import dataclasses
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tightfit.forecast.forecasts import forecast_series
from tightfit.forecast.read_series import read_series
from tightfit.forecast.series import Series
from tightfit.units import MIB
from tightfit.watch.agent.agent import Agent, AgentSettings
from tightfit.watch.clock import SimulatedClock
from tightfit.watch.outlook.steady_growth import steady_growth
from tightfit.watch.sources.simulated import SimulatedMachine, SimulatedSource, parse_machine
from tightfit.watch.store.schema import open_to_read

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TRACES = Path(__file__).parents[2] / "shared" / "data" / "memory_traces" / "gpu_memory_per_pod.csv.gz"
_START = 1_700_000_000.0
_KILLED = """
import sys
from pathlib import Path
from benchmarks.watch import agent_of
agent, clock = agent_of(Path(sys.argv[1]), "2x20")
clock.now += float(sys.argv[2])
while True:
    agent.tick()
    print(round(clock.wall() * 1000), flush=True)
    clock.now += 1.0
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure, and what was wanted of it."""

    part: str
    name: str
    value: float
    unit: str
    wanted: str = ""


def agent_of(folder: Path, machine: str) -> tuple[Agent, SimulatedClock]:
    """An agent of a simulated machine, with its history in a folder."""
    clock = SimulatedClock(_START)
    return Agent(SimulatedSource(parse_machine(machine)), folder / "history.sqlite", clock, AgentSettings()), clock


def day(machine: str, hours: int, interval: int) -> list[Figure]:
    """A reading every `interval` seconds for so many simulated hours."""
    with tempfile.TemporaryDirectory() as name:
        agent, clock = agent_of(Path(name), machine)
        # What an import or the first forecast loads is there before it is measured.
        for _ in range(120):
            agent.tick()
            clock.now += 1.0
        begin, wall = time.process_time(), time.perf_counter()
        resident = [_resident_mib()]
        for _ in range(hours):
            for _ in range(3600 // interval):
                agent.tick()
                clock.now += interval
            resident.append(_resident_mib())
            sys.stderr.write(f"{len(resident) - 1} h: {time.perf_counter() - wall:,.0f} s, {resident[-1]:.1f} MiB\n")
        spent, elapsed = time.process_time() - begin, time.perf_counter() - wall
        state = agent.state()
        size = sum(path.stat().st_size for path in Path(name).glob("history.sqlite*")) / MIB
        agent.close()
        assert state is not None
        num_forecast = sum(each.outlook is not None for each in state.processes)
    source = _source_seconds(machine)
    per_second = spent / (3600 * hours)
    return [
        Figure(
            part="day",
            name=f"{hours} h of {machine}, every {interval} s",
            value=elapsed / 60,
            unit="min",
            wanted="minutes",
        ),
        Figure(part="day", name="processor time", value=spent / 60, unit="min"),
        Figure(part="day", name="share of a core", value=100 * per_second, unit="%", wanted="< 1"),
        Figure(part="day", name="of which the simulated source", value=100 * source, unit="%"),
        Figure(part="day", name="resident after 1 h", value=resident[1], unit="MiB"),
        Figure(part="day", name=f"resident after {hours} h", value=resident[-1], unit="MiB", wanted="flat"),
        Figure(part="day", name="largest resident", value=max(resident), unit="MiB"),
        Figure(part="day", name="history on disk", value=size, unit="MiB"),
        Figure(part="day", name="processes with a forecast", value=100 * num_forecast / len(state.processes), unit="%"),
    ]


def kills(count: int) -> list[Figure]:
    """Agents that are killed at random moments, one after the other on the same history."""
    chance = random.Random(0)
    lost, worst, damaged, written = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "history.sqlite"
        for turn in range(count):
            command = [sys.executable, "-c", _KILLED, name, str(turn * 100_000)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                said = [int(process.stdout.readline())]
                time.sleep(chance.uniform(0.0, 0.5))
                process.send_signal(signal.SIGKILL)
                # The last line may be cut off.
                said += [int(line) for line in process.stdout.read().splitlines()[:-1]]
            missing, is_whole = _missing(path, said)
            lost, worst, written = lost + missing, max(worst, missing), written + len(said)
            damaged += not is_whole
    return [
        Figure(part="kills", name="agents killed", value=count, unit=""),
        Figure(part="kills", name="readings said to be written", value=written, unit=""),
        Figure(part="kills", name="of these lost, all kills", value=lost, unit="", wanted="0"),
        Figure(part="kills", name="of these lost, worst kill", value=worst, unit="", wanted="<= 1"),
        Figure(part="kills", name="histories damaged", value=damaged, unit="", wanted="0"),
    ]


def _missing(path: Path, said: list[int]) -> tuple[int, bool]:
    connection = open_to_read(path)
    try:
        rows = connection.execute("SELECT time FROM moments WHERE level = 'readings' AND time >= ?", (min(said),))
        there = {time for (time,) in rows}
        is_whole = connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    except sqlite3.DatabaseError:
        return len(said), False
    finally:
        connection.close()
    return len(set(said) - there), is_whole


def forecasts(count: int) -> list[Figure]:
    """The next hour of so many series."""
    source = SimulatedSource(SimulatedMachine(num_cards=20, num_processes=count // 20))
    minutes = _START + 60.0 * np.arange(720)
    table: dict[int, list[tuple[float, float]]] = {}
    places = count // 20 * 20
    for minute in minutes.tolist():
        for each in source.read(minute).processes:
            # A place of the machine has a process after the other: here it is one series.
            table.setdefault(each.pid % places, []).append((minute, float(each.used_bytes or 0)))
    series = [
        Series(name=str(key), times=np.array(rows)[:, 0], values=np.array(rows)[:, 1]) for key, rows in table.items()
    ]
    begin = time.process_time()
    for each in series:
        forecast_series(each, horizon=60, quantile=0.975)
        steady_growth(each)
    spent = time.process_time() - begin
    return [
        Figure(part="forecasts", name=f"{len(series)} series of 12 h", value=spent, unit="s", wanted="< 60"),
        Figure(part="forecasts", name="one", value=1000 * spent / len(series), unit="ms"),
    ]


def growth(data: Path) -> list[Figure]:
    """How often growth is seen in pods of a serving cluster, none of which leaks."""
    if not data.exists():
        return []
    found, count = 0, 0
    for each in read_series(str(data)).series:
        for end in range(len(each.values) // 3, len(each.values) - 60, 12):
            past = Series(name=each.name, times=each.times[: end + 1], values=each.values[: end + 1])
            found, count = found + (steady_growth(past) > 0), count + 1
    return [Figure(part="growth", name=f"seen at {count} moments of real pods", value=found, unit="", wanted="0")]


def real_time(machine: str, seconds: int) -> list[Figure]:
    """The program itself, from half a minute after its start."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tightfit", "watch", "--agent", "--simulate", machine, "--store", name]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            time.sleep(30)
            spent, written, begin = _processor_seconds(process.pid), _written(process.pid), time.monotonic()
            time.sleep(seconds)
            spent, written = _processor_seconds(process.pid) - spent, _written(process.pid) - written
            elapsed = time.monotonic() - begin
            process.terminate()
        connection = open_to_read(Path(name) / "history.sqlite")
        (count,) = connection.execute("SELECT count(*) FROM moments WHERE level = 'readings'").fetchone()
        connection.close()
    return [
        Figure(part="real time", name="share of a core", value=100 * spent / elapsed, unit="%", wanted="< 1"),
        Figure(part="real time", name="written to the disk", value=written / elapsed / 1024, unit="KiB/s"),
        Figure(part="real time", name="readings", value=count, unit=f"in about {elapsed + 30:.0f} s"),
    ]


def _source_seconds(machine: str, count: int = 2000) -> float:
    source = SimulatedSource(parse_machine(machine))
    begin = time.process_time()
    for second in range(count):
        source.read(_START + second)
    return (time.process_time() - begin) / count


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / MIB


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _written(pid: int) -> int:
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"])


def main() -> None:
    """Measures, prints, and writes the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--interval", type=int, default=1, help="seconds between the readings of the day")
    parser.add_argument("--machine", default="8x50")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--data", type=Path, default=_TRACES, help="traces of real pods, left out where there are none")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    figures = []
    for part in (
        lambda: forecasts(1000),
        lambda: growth(options.data),
        lambda: kills(options.kills),
        lambda: real_time(options.machine, options.seconds),
        lambda: day(options.machine, options.hours, options.interval),
    ):
        for figure in part():
            figures.append(figure)
            print(
                f"{figure.part:<10} {figure.name:<38} {figure.value:>10,.2f} {figure.unit:<6} {figure.wanted}",
                flush=True,
            )
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in dataclasses.fields(Figure)])
            writer.writerows(
                [figure.part, figure.name, f"{figure.value:.3f}", figure.unit, figure.wanted] for figure in figures
            )


if __name__ == "__main__":
    main()

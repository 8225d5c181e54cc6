"""`tightfit watch`: the GPUs of this machine, their processes, and what the next hour needs; as an agent, on a terminal, as JSON."""

import contextlib
import functools
import json as json_module
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from tightfit.cli.arguments.sizes import Size, with_unit
from tightfit.errors import UsageError
from tightfit.errors.faults import internal_error
from tightfit.forecast.horizon import parse_horizon
from tightfit.units import parse
from tightfit.watch.agent.agent import MIN_INTERVAL_SECONDS, AgentSettings
from tightfit.watch.agent.simulated_past import write_past
from tightfit.watch.alerts.alert_rules import DEFAULT, read_alerts
from tightfit.watch.background import Background
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.outlook.admission_advice import JobAdvice
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.publishing.socket_path import listening_path
from tightfit.watch.sinks.tensorboard import TensorBoardSink
from tightfit.watch.sinks.weights_and_biases import WeightsAndBiasesSink
from tightfit.watch.sources.abstract_source import AbstractSource
from tightfit.watch.sources.open_source import open_source
from tightfit.watch.sources.simulated import SimulatedMachine, SimulatedSource, parse_machine
from tightfit.watch.store.folder import StoreFolder, usual_folder
from tightfit.watch.terminal.live import run_screen
from tightfit.watch.terminal.raw_terminal import is_interactive
from tightfit.watch.terminal.tables import tables
from tightfit.watch.watching import Watching, one_reading, stored_state_or_none
from tightfit.watch.web.access import Access
from tightfit.watch.web.answers import Answers
from tightfit.watch.web.server import WatchServer

# rich takes 80 columns where stdout is no terminal, and would cut the table's columns.
_PIPED_WIDTH = 160


def watch(
    *,
    once: bool = False,
    json: bool = False,
    agent: bool = False,
    web: bool = False,
    port: int = 8778,
    bind: str = "127.0.0.1",
    token: str | None = None,
    simulate: bool | str | None = None,
    store: Path | None = None,
    interval: str = "1s",
    job: Size | None = None,
    quantile: float = 0.975,
    alerts: Path | None = None,
    tensorboard: Path | None = None,
    wandb: str | None = None,
) -> int:
    """Watch the GPUs of this machine: who uses how much memory, and what the next hour needs.

    With --job and --once, the exit code is 1 if the job fits on no GPU.

    Args:
        once: print one table and end; so it is where stdout is no terminal.
        json: print one JSON object and end.
        agent: only read and keep the history, until it is ended by a signal.
        web: serve a page (/), its data as JSON, and metrics for Prometheus (/metrics), until it is ended.
        port: of the page (default 8778; 0 is any that is free).
        bind: address of the page (default 127.0.0.1, which this machine alone reaches); any other needs --token.
        token: secret that the page asks for, 16 characters or more; also from the environment variable TIGHTFIT_WATCH_TOKEN.
        simulate: cards and processes that do not exist, such as 8x50 (cards x processes of each) or 8x50:7 (with a seed); 2x6 if none are named.
        store: folder of the history (default: /var/lib/tightfit/watch for root, else one in the home folder).
        interval: time between two readings, at least 1s (default 1s).
        job: say of each GPU whether a job that needs this much fits, now and for the next hour.
        quantile: the share of forecasts that the next hour is to stay within (default 0.975).
        alerts: TOML file of rules, and where their notices go (default: a card that is full, or will be within the hour, and a driver that is away).
        tensorboard: folder to which the cards are written for TensorBoard, every ten seconds.
        wandb: project of Weights & Biases to which the cards are logged, every ten seconds.
    """
    if not 0.5 <= quantile < 1:
        raise UsageError(f"--quantile {quantile:g}: write a share from 0.5 up to, but not including, 1, such as 0.975")
    job_bytes = None if job is None else parse(with_unit("--job", job))
    machine = None if not simulate else SimulatedMachine() if simulate is True else parse_machine(simulate)
    settings = AgentSettings(
        interval_seconds=_interval(interval),
        outlooks=OutlookSettings(quantile=quantile),
        alerts=DEFAULT if alerts is None else read_alerts(alerts),
        # A machine that does not exist has no programs.
        listen_at=None if machine is not None else listening_path(),
    )
    access = Access(bind, token or os.environ.get("TIGHTFIT_WATCH_TOKEN")) if web else None
    is_once = not web and not agent and (once or json or not is_interactive())
    with _folder(machine, store) as path, _sinks(tensorboard, wandb) as sinks:
        folder, is_own = StoreFolder(path), machine is not None and store is None
        if machine is not None and is_own:
            path.mkdir(exist_ok=True)
            write_past(machine, folder.database, settings)
        source = open_source if machine is None else functools.partial(SimulatedSource, machine)
        if is_once:
            return _print_once(folder, source, settings, job_bytes, is_own=is_own, json=json)
        watching = Watching(folder, source, settings, sinks)
        if access is not None:
            return _serve(watching, folder, settings, access, bind, port)
        return _run_agent(watching, folder, settings) if agent else _show(watching, settings, job_bytes)


def _interval(text: str) -> float:
    try:
        horizon = parse_horizon(text)
    except UsageError:
        # Its words are of another option.
        horizon = None
    if horizon is None or not horizon.is_time or not MIN_INTERVAL_SECONDS <= horizon.count <= 3600:
        raise UsageError(f"--interval {text}: write a time from 1s to 1h")
    return horizon.count


@contextlib.contextmanager
def _folder(machine: SimulatedMachine | None, store: Path | None) -> Iterator[Path]:
    """The folder of the history; for a simulation that names none, one that is gone afterwards."""
    if machine is None or store is not None:
        yield store or usual_folder()
        return
    with tempfile.TemporaryDirectory(prefix="tightfit-watch-") as folder:
        yield Path(folder)


def _until_a_signal() -> threading.Event:
    """Set by what ends this process."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    return ended


@contextlib.contextmanager
def _sinks(tensorboard: Path | None, wandb: str | None) -> Iterator[list[Background[MachineState]]]:
    """What the agent's figures are also written to."""
    handlers: dict[str, TensorBoardSink | WeightsAndBiasesSink] = {}
    if tensorboard is not None:
        handlers["TensorBoard"] = TensorBoardSink(tensorboard)
    if wandb is not None:
        handlers["Weights & Biases"] = WeightsAndBiasesSink(wandb, socket.gethostname())
    sinks = [Background(name, handle, max_waiting=1) for name, handle in handlers.items()]
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()
        for handler in handlers.values():
            handler.close()


def _run_agent(watching: Watching, folder: StoreFolder, settings: AgentSettings) -> int:
    ended = _until_a_signal()
    watching.start()
    try:
        _say_role(watching, folder)
        while not ended.wait(settings.interval_seconds):
            watching.state()
    finally:
        watching.close()
    return 0


def _serve(
    watching: Watching, folder: StoreFolder, settings: AgentSettings, access: Access, bind: str, port: int
) -> int:
    ended = _until_a_signal()
    # Before the agent is there: a port that is taken is a usage error, and starts nothing.
    with WatchServer(bind, port, Answers(watching, settings.outlooks), access) as server:
        watching.start()
        threading.Thread(target=server.serve_forever, name="tightfit watch server", daemon=True).start()
        try:
            _say_role(watching, folder)
            sys.stderr.write(f"tightfit: {server.url}{'?token=...' if access.needs_token else ''}\n")
            is_said = False
            while not ended.wait(settings.interval_seconds):
                watching.state()
                if server.fault is not None and not is_said:
                    is_said = True
                    fault = internal_error(server.fault, "a request to the page")
                    sys.stderr.write(f"tightfit: {fault} (the agent and the page go on)\n")
        finally:
            server.shutdown()
            watching.close()
    return 0


def _say_role(watching: Watching, folder: StoreFolder) -> None:
    role = f"reads; history in {folder.path}" if watching.is_agent else f"waits for process {folder.holder()}"
    sys.stderr.write(f"tightfit: the agent {role}\n")


def _show(watching: Watching, settings: AgentSettings, job_bytes: int | None) -> int:
    watching.start()
    try:
        run_screen(watching, JobAdvice(watching.database, job_bytes, settings.outlooks).sentences)
    finally:
        watching.close()
    return 0


def _print_once(
    folder: StoreFolder,
    source: Callable[[], AbstractSource],
    settings: AgentSettings,
    job_bytes: int | None,
    *,
    is_own: bool,
    json: bool,
) -> int:
    """What the agent of this folder knows; without an agent, a reading that is not kept, unless the history is `is_own` and goes away anyhow."""
    state = stored_state_or_none(folder.database) if folder.is_locked() else None
    with tempfile.TemporaryDirectory(prefix="tightfit-watch-") as other:
        path = folder.path if is_own or state is not None else Path(other)
        if state is None:
            state = one_reading(source(), path, settings)
        advice = JobAdvice(StoreFolder(path).database, job_bytes, settings.outlooks).of(state)
    if json:
        answer = state.to_json()
        if job_bytes is not None:
            answer["admission"] = [each.to_json() for each in advice]
        sys.stdout.write(json_module.dumps(answer) + "\n")
    else:
        console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
        console.print(tables(state, time.time()), highlight=False)
        for each in advice:
            console.print(each.sentence, highlight=False, markup=False)
    return 0 if job_bytes is None or any(each.fits for each in advice) else 1

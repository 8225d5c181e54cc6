"""The process that measures: reads a request file, and writes the content of a calibration file or one line that says why it failed.

    python -m tightfit.calibration.card_process REQUEST.json PARENT

A process of its own, because the size of a CUDA context can be measured once per process, and because the virtual GPU patches torch for good.
"""

import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tightfit import __version__
from tightfit.calibration import disk, host, kernels, links, memory
from tightfit.calibration import launch_costs as launches
from tightfit.calibration.instruments import Findings, Instruments
from tightfit.calibration.measured_card import CardInstruments
from tightfit.calibration.simulated_instruments import SimulatedInstruments
from tightfit.capture.processes.children import die_with_parent
from tightfit.devices.calibration import SCHEMA
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import TightfitError, UnknownDevice, UsageError
from tightfit.errors.faults import internal_error


def main(path: str, parent: str) -> None:
    """Measures what the request at `path` says and leaves the answer beside it; ends with the process `parent`."""
    die_with_parent(int(parent))
    request = json.loads(Path(path).read_text())
    try:
        answer = {"ok": True, "content": _content(request)}
    except TightfitError as error:
        answer = {"ok": False, "kind": type(error).__name__, "message": str(error), "trace": error.trace}
    except Exception as error:  # noqa: BLE001 - only our own code runs here
        own = internal_error(error, "the calibration")
        answer = {"ok": False, "kind": "InternalError", "message": str(own), "trace": own.trace}
    Path(f"{path}.answer").write_text(json.dumps(answer))


def _content(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["disk_folder"])
    if not request["virtual"]:
        instruments = CardInstruments(lambda name: measured_card(request["device"], name))
        return _measured(instruments, folder, driver=instruments.driver)
    from tightfit.capture.child_process.capture_session import CaptureSession

    # The steps of a capture are not used: measurements run on its virtual GPU.
    session = CaptureSession(request["device"], sys.maxsize, by_yield=True)
    with session.gpu:
        return _measured(SimulatedInstruments(session.device, session.recorder), folder, driver="")


def measured_card(asked_for: str | None, reported: str) -> Device:
    """The card that `asked_for` describes, which has to be the one that the driver has `reported`, if the catalogue knows that: figures of one card under the name of another would be believed.

    Raises:
        UsageError: it is another card.
        UnknownDevice: neither is known.
    """
    card = _card(asked_for or reported)
    try:
        own = find(reported)
    except UnknownDevice:
        return card
    # A file may describe the machine's card better than the catalogue does, under its name.
    if own.name != card.name and not str(asked_for).endswith(".toml"):
        raise UsageError(
            f"--device {asked_for}: the GPU of this machine is {own.name}; leave --device out to measure it"
        )
    return card


def _card(name: str) -> Device:
    try:
        return find(name)
    except UnknownDevice as error:
        raise UnknownDevice(
            f"{error}; describe the card in a TOML file (docs/how-it-works/devices.md) and give it with --device"
        ) from error


class _Taken:
    """The results so far, in the form of the calibration file."""

    def __init__(self, instruments: Instruments) -> None:
        self._is_virtual = instruments.is_virtual
        self.tables: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []

    def take(self, name: str, measure: Callable[[], Findings]) -> None:
        """Adds the results of a group of measurements; logs on stderr what is being measured."""
        if not self._is_virtual:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
        found = measure()
        self.rows.extend(dataclasses.asdict(row) for row in found.rows)
        for table, entries in found.tables.items():
            self.tables[table] = self.tables.get(table, {}) | entries

    def take_where_possible(self, name: str, measure: Callable[[], Findings]) -> None:
        """The same for what a machine may refuse, such as registered memory in a container; the file then lacks this group."""
        try:
            self.take(name, measure)
        except (OSError, RuntimeError) as error:
            if self._is_virtual:
                raise
            print(f"{name} could not be measured: {error}", file=sys.stderr, flush=True)


def _measured(instruments: Instruments, folder: Path, *, driver: str) -> dict[str, Any]:
    """The content of a calibration file, from all groups of measurements in the order in which they do not disturb each other."""
    began = time.monotonic()
    taken = _Taken(instruments)
    # First, while no library is loaded: each one that is loaded later, for whatever reason, would be counted as another's.
    taken.take("what libraries hold", lambda: memory.context(instruments))
    taken.take("cudaMalloc and cudaFree", lambda: memory.allocation(instruments))
    taken.take("launches", lambda: launches.launches(instruments))
    taken.take("kernels", lambda: kernels.efficiencies(instruments, taken.tables["seconds"]))
    torch.cuda.empty_cache()
    taken.take_where_possible("the host link", lambda: links.links(instruments))
    taken.take_where_possible("the host's optimizer", lambda: host.host(instruments))
    taken.take_where_possible("the disk", lambda: disk.disk(instruments, folder))
    taken.take("the context at the end", lambda: memory.context_at_the_end(instruments))
    tables, rows = taken.tables, taken.rows
    context = tables["context"]
    # Lazily loaded kernels make the context grow, so it is read once more when all of them have run.
    context["high_bytes"] = max(context["high_bytes"], context["num_bytes"])
    made = {
        "date": datetime.date.today().isoformat(),
        "tightfit": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": f"{time.monotonic() - began:.0f}",
    }
    head = {"schema": SCHEMA, "device": instruments.card.name, "virtual": instruments.is_virtual, "made": made}
    return head | tables | {"measured": rows}


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`tightfit calibrate`: measures the GPU of this machine, writes its calibration file, and prints measured beside predicted figures."""

import json as jsonlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tightfit.devices.calibration import Calibration, Measured
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs, write_text
from tightfit.units import format_bytes, format_seconds

_DEFAULT_VIRTUAL_DEVICE = "H200"
_WIDTH = 60


def calibrate(
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    device: str | None = None,
    disk: Path | None = None,
    virtual: bool = False,
    json: bool = False,
) -> int:
    """Measure the GPU of this machine, in under two minutes, for more accurate estimates.

    Parameters
    ----------
    output
        The calibration file (TOML). Default: the name of the GPU, such as nvidia-h200.toml.
    device
        The name of the GPU in the catalogue, or its TOML file. Default: the name that the driver reports.
    disk
        A folder on the disk to measure. Default: where the calibration file goes.
    virtual
        Run the same code on a simulated GPU, to try it without one. No figure is a measurement then.
    json
        Print JSON instead of a table.
    """
    from tightfit.calibration.calibrate import measure
    from tightfit.devices.calibration_file import to_toml

    # Measured where data will be: the working folder may lie on another disk than /tmp.
    folder = (output.parent if output is not None else Path.cwd()) if disk is None else disk
    # Without a name the file is called after the card, which is known later; the folder is tried all the same.
    check_outputs({"--output": output or Path("card.toml")}, inputs=(device,))
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--disk {disk}: there is no such folder")
    simulated = device or _DEFAULT_VIRTUAL_DEVICE
    content = measure(device=simulated if virtual else device, virtual=virtual, disk_folder=folder)
    # The file is checked like any other before it is written, so what a later estimate reads is valid.
    found = Calibration.from_content(content, where="what was measured")
    # The name of the GPU, so that calibrations of several machines can lie in one folder.
    path = output or Path(f"{re.sub(r'[^a-z0-9]+', '-', found.device.lower())}{'-virtual' if virtual else ''}.toml")
    remark = f"made by tightfit calibrate{' --virtual: simulated, no measurement' if virtual else ''}"
    try:
        write_text(path, to_toml(content, remark=remark))
    finally:
        _print(found, content, path, virtual=virtual, json=json)
    sys.stderr.write(f"wrote {path}{' (simulated: estimates refuse it)' if virtual else ''}\n")
    return 0


def _print(found: Calibration, content: Mapping[str, Any], path: Path, *, virtual: bool, json: bool) -> None:
    if json:
        answer = {"schema": 1, "device": found.device, "virtual": virtual, "file": str(path)}
        sys.stdout.write(jsonlib.dumps(answer | {"measured": content["measured"]}) + "\n")
    else:
        sys.stdout.write("\n".join(_table(found)) + "\n")


def _table(found: Calibration) -> list[str]:
    head = f"{found.device}{', simulated' if found.is_virtual else ''}"
    lines = [f"{head:<{_WIDTH}} {'measured':>12} {'quartiles':>27} {'predicted':>12} {'difference':>11}"]
    for row in found.measured:
        spread = f"{_figure(row, row.low)} to {_figure(row, row.high)}" if row.num_samples > 1 else "once"
        predicted = "-" if row.predicted is None else _figure(row, row.predicted)
        difference = f"{100 * (row.median / row.predicted - 1):+.1f} %" if row.predicted else "-"
        lines.append(
            f"{row.name:<{_WIDTH}} {_figure(row, row.median):>12} {spread:>27} {predicted:>12} {difference:>11}"
        )
    return lines


def _figure(row: Measured, value: float) -> str:
    if row.unit == "bytes":
        return format_bytes(round(value))
    if row.unit == "s":
        return format_seconds(value)
    if row.unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    return f"{value / 1e9:.3f} G/s" if row.unit == "parameters/s" else f"{value:.3f}"

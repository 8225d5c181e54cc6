"""Has a machine measured, in a process of its own. Imports no torch: the process does."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tightfit import errors

# Under two minutes on a card; a machine that takes five times as long hangs.
_TIMEOUT_SECONDS = 600


def measure(*, device: str | None, virtual: bool, disk_folder: Path) -> dict[str, Any]:
    """The content of a calibration file for the card of this machine, or of a simulated `device`.

    `device` is a name of the catalogue or the path of a card's TOML file; None is the card that the driver names.

    Raises:
        UsageError: there is no card, or one that neither the catalogue nor `device` describes.
        CaptureError: the process that measures died.
    """
    with tempfile.TemporaryDirectory(prefix="tightfit-") as folder:
        request = Path(folder, "request.json")
        request.write_text(json.dumps({"device": device, "virtual": virtual, "disk_folder": str(disk_folder)}))
        command = [sys.executable, "-m", "tightfit.runtime.calibrate.child", str(request)]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stderr=None if not virtual else subprocess.PIPE,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        answer = Path(f"{request}.answer")
        if not answer.exists():
            said = (done.stderr or b"").decode(errors="replace").strip().splitlines()
            raise errors.CaptureError(
                f"the process that measures ended with exit code {done.returncode}: {said[-1] if said else 'see above'}"
            )
        result = json.loads(answer.read_text())
    if not result["ok"]:
        error = getattr(errors, result["kind"])(result["message"])
        error.trace = result["trace"]
        raise error
    return result["content"]

"""Has a machine measured, in a process of its own. Imports no torch: the process does."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tightfit import errors
from tightfit.capture.processes.children import child, shared_folder

# Under two minutes on a card; a machine that takes five times as long hangs.
_TIMEOUT_SECONDS = 600


def measure(*, device: str | None, virtual: bool, disk_folder: Path) -> dict[str, Any]:
    """The content of a calibration file for the card of this machine, or of a simulated `device`.

    `device` is a name of the catalogue or the path of a card's TOML file; None is the card that the driver names.

    Raises:
        UsageError: there is no card, or one that neither the catalogue nor `device` describes.
        CaptureError: the process that measures died.
    """
    with shared_folder() as folder:
        request = folder / "request.json"
        request.write_text(json.dumps({"device": device, "virtual": virtual, "disk_folder": str(disk_folder)}))
        with child("tightfit.calibration.child", request, reads_errors=virtual) as process:
            try:
                said = (process.communicate(timeout=_TIMEOUT_SECONDS)[1] or b"").decode(errors="replace")
            except subprocess.TimeoutExpired:
                raise errors.CaptureError(
                    f"the process that measures had not ended after {_TIMEOUT_SECONDS} s, and was ended"
                ) from None
        answer = Path(f"{request}.answer")
        if not answer.exists():
            lines = said.strip().splitlines()
            raise errors.CaptureError(
                f"the process that measures ended with exit code {process.returncode}: {lines[-1] if lines else 'see above'}"
            )
        result = json.loads(answer.read_text())
    if not result["ok"]:
        error = getattr(errors, result["kind"])(result["message"])
        error.trace = result["trace"]
        raise error
    return result["content"]

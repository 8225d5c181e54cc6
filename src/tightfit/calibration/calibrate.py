"""Runs the measurements in a child process, so that this module imports no torch."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tightfit import errors
from tightfit.capture.processes.children import child, shared_folder

# It takes under two minutes on a GPU; a process that takes five times as long hangs.
_TIMEOUT_SECONDS = 600


def measure(*, device: str | None, virtual: bool, disk_folder: Path) -> dict[str, Any]:
    """The content of a calibration file for the GPU of this machine, or of a simulated `device`.

    `device` is a name of the catalogue or the path of a TOML file; None is the GPU that the driver names.

    Raises:
        UsageError: there is no GPU, or one that neither the catalogue nor `device` describes.
        CaptureError: the child process died.
    """
    with shared_folder() as folder:
        request = folder / "request.json"
        request.write_text(json.dumps({"device": device, "virtual": virtual, "disk_folder": str(disk_folder)}))
        # Its stderr is read only in virtual mode; on a real GPU it goes through, as progress over two minutes.
        with child("tightfit.calibration.card_process", request, reads_errors=virtual) as process:
            try:
                said = (process.communicate(timeout=_TIMEOUT_SECONDS)[1] or b"").decode(errors="replace")
            except subprocess.TimeoutExpired:
                raise errors.CaptureError(
                    f"the process that measures had not ended after {_TIMEOUT_SECONDS} s, and was ended"
                ) from None
        answer = Path(f"{request}.answer")
        if not answer.exists():
            # A crash in the driver or an out-of-memory kill leaves no answer; the last line of stderr is the best that is known.
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

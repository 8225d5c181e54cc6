"""Runs a script as `python SCRIPT ARGUMENTS...` does, in a process that was forked with torch imported. The request is a JSON file."""

import json
import runpy
import sys
from pathlib import Path


def main(request: str, _server: str) -> None:
    """Runs the script of `request`, a path; what it prints goes where the request says."""
    asked = json.loads(Path(request).read_text())
    sys.stdout = open(asked["stdout"], "w", buffering=1)  # noqa: SIM115 - the process ends with the script
    sys.argv = asked["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.stdout.flush()

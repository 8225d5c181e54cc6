"""The process that a workload is traced in. Told what to do by a request file; leaves a tape, or one line that says why not.

    python -m tightfit.capture.child REQUEST.json

It imitates a card in torch's name throughout, so it is used for one capture and then ends.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tightfit.capture import targets
from tightfit.errors import TightfitError

_REPORTED_PACKAGES = ("transformers", "accelerate", "peft", "diffusers", "lightning", "torchvision", "timm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of the child. `device` is a name of the catalogue or a path; `target` is a `targets.Target` as a dict with its `kind`,
    `preparation` a `tightfit.capture.trace.Preparation` as a dict.
    """

    target: dict[str, Any]
    label: str
    device: str
    num_steps: int
    tape: str
    show_output: bool
    preparation: dict[str, Any] | None
    with_effects: bool = False


def main(path: str) -> None:
    """Traces what the request at `path` says, and ends the process."""
    request = Request(**json.loads(Path(path).read_text()))
    answer: dict[str, Any]
    terminal = os.dup(2)
    try:
        with quiet(request.show_output):
            answer = {"ok": True, "report": _trace(request, terminal)}
    except TightfitError as error:
        answer = {"ok": False, "kind": type(error).__name__, "message": str(error), "details": vars(error)}
    except SystemExit as error:
        answer = {"ok": False, "kind": "CaptureError", "message": _ended_itself(request.label, error.code)}
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        answer = {"ok": False, "kind": "CaptureError", "message": _one_line(request.label, error)}
    Path(f"{path}.answer").write_text(json.dumps(answer))
    os._exit(0)


def _trace(request: Request, terminal: int) -> Any:
    try:
        from tightfit.capture.session import Session
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from tightfit.errors import MissingExtra

        raise MissingExtra(
            "tracing runs your code with torch, which is not installed here; install it: pip install 'tightfit[torch]'"
        ) from error
    by_yield = request.target["kind"] != "Script"
    session = Session(request.device, request.num_steps, by_yield=by_yield, with_effects=request.with_effects)
    session.gpu.progress = progress = Progress(request.label, terminal)
    report = prepare(request.preparation)
    session.run(target_of(request.target))
    progress.end()
    session.tape(target=request.label, versions=_versions()).save(request.tape)
    return report()


def prepare(preparation: dict[str, Any] | None) -> Callable[[], Any]:
    """Does what a `tightfit.capture.trace.Preparation` says; what it returns is to be called when the run is over."""
    if preparation is None:
        return lambda: None
    module, _, name = preparation["function"].partition(":")
    return getattr(importlib.import_module(module), name)(preparation["argument"])


def target_of(fields: dict[str, Any]) -> targets.Target:
    """The target whose fields, with its `kind`, a request has."""
    kinds: dict[str, Any] = {
        c.__name__: c for c in (targets.Script, targets.GeneratorFunction, targets.HuggingFaceConfig)
    }
    return kinds[fields["kind"]](**{k: v for k, v in fields.items() if k != "kind"})


def _versions() -> dict[str, str]:
    import torch

    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }
    for package in _REPORTED_PACKAGES:
        if package in sys.modules:
            versions[package] = metadata.version(package)
    return versions


class Progress:
    """One line on the terminal, rewritten, for a trace that takes longer than two seconds."""

    SILENT_SECONDS = 2.0
    INTERVAL_SECONDS = 0.5

    def __init__(self, label: str, terminal: int) -> None:
        self._label = label
        self._terminal = terminal if os.isatty(terminal) else None
        self._next = time.monotonic() + self.SILENT_SECONDS

    def __call__(self, span: str, num_operators: int) -> None:
        now = time.monotonic()
        if self._terminal is not None and now >= self._next:
            self._next = now + self.INTERVAL_SECONDS
            os.write(self._terminal, f"\r\x1b[Ktracing {self._label}: {span}, {num_operators:,} operators".encode())

    def end(self) -> None:
        """Takes the line away."""
        if self._terminal is not None:
            os.write(self._terminal, b"\r\x1b[K")


@contextmanager
def quiet(show_output: bool) -> Iterator[None]:
    """The script's own output goes to stderr, or nowhere: stdout belongs to the answer."""
    faulthandler.enable(os.dup(2))
    sink = os.dup(2) if show_output else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    yield
    sys.stdout.flush()


def _ended_itself(label: str, code: object) -> str:
    how = code if isinstance(code, str) else f"exit code {code or 0}"
    return f"{label} ended itself before its steps were over: {how} (--show-output shows what it printed)"


def _one_line(label: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{label} has a syntax error at {os.path.relpath(error.filename)}:{error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "tightfit" not in f.filename.split(os.sep)]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    place = own[-1] if own else frames[-1] if frames else None
    where = f" at {os.path.relpath(place.filename)}:{place.lineno}" if place else ""
    said = str(error).strip().splitlines()
    return f"{label} raised {type(error).__name__}{where}: {said[0] if said else '(no message)'}"


if __name__ == "__main__":
    main(sys.argv[1])

"""Every error that tightfit raises for its users, in one small tree.

    TightfitError           exit code, and one line: what is wrong, where, what to do
    ├── UsageError          2  a wrong argument, path, name or setting
    │   └── UnknownDevice   2  no such GPU; lists the nearest names
    ├── CaptureError        3  the workload could not be traced to its end
    │   ├── ProgramError    3  the workload itself raised an exception
    │   ├── MissingExtra    3  a package that this target needs is not installed
    │   ├── NoStep          3  the workload took no step on the GPU
    │   ├── Generates       3  a traced script has come to the call of `generate` that was looked for
    │   └── WaitsForRank    3  a traced rank needs an object that another rank sends
    ├── UnsupportedTorch    3  the installed torch lacks a name that is needed
    ├── RecordingError      3  a recording could not be read
    ├── OutputError         3  a file could not be written
    ├── DoesNotFit          1  the answer is no
    ├── PlanError           3  no plan could be made
    ├── WatchError          3  nothing could be watched: no driver, or no history that can be read
    ├── ApplyError          3  a plan could not be applied to this model
    └── InternalError       4  a bug in tightfit itself (`tightfit.errors.faults`)

The message is one line for a person; the command line shows a traceback for these only with `--debug`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class TightfitError(Exception):
    """The base class: `exit_code` is the exit code of a command that this error ends.

    `trace` is the traceback as text, where the error was raised in another process or replaces another exception.
    """

    exit_code: ClassVar[int] = 3
    trace: str = ""


class UsageError(TightfitError):
    """A wrong argument, path, name or setting."""

    exit_code: ClassVar[int] = 2


class UnknownDevice(UsageError):
    """No GPU of that name; the message lists the nearest names."""


class CaptureError(TightfitError):
    """The workload could not be traced to its end."""


class ProgramError(CaptureError):
    """The workload raised an exception; `trace` is its traceback, with the program's frames and those of the libraries that it called."""


class MissingExtra(CaptureError):
    """A package that this target needs is not installed; the message says what to install."""


class NoStep(CaptureError):
    """The workload took no step, or none with a tensor on the GPU."""


class Generates(CaptureError):
    """A traced script has come to the call of `generate` that was looked for, which is no fault: `call` has what it generates with
    (`tightfit.fit.generating_scripts.GeneratingCall`)."""

    def __init__(self, message: str, *, call: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.call = call


class WaitsForRank(CaptureError):
    """A traced rank needs the object number `index` of `channel`, which another rank sends; `channel` is empty where the rank has sent all that was asked for.

    `sent` are the objects that it has sent so far, by their channels (`tightfit.capture.collectives.objects`).
    """

    def __init__(
        self, message: str, *, channel: str = "", index: int = 0, sent: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        super().__init__(message)
        self.channel = channel
        self.index = index
        self.sent = {name: list(objects) for name, objects in (sent or {}).items()}


class UnsupportedTorch(TightfitError):
    """The installed torch lacks a name of its own that tightfit uses; the message says which, and which versions have it."""


class RecordingError(TightfitError):
    """A recording could not be read."""


class OutputError(TightfitError):
    """A file could not be written; what was there before is unchanged."""


class DoesNotFit(TightfitError):
    """The workload does not fit the budget."""

    exit_code: ClassVar[int] = 1


class PlanError(TightfitError):
    """No plan could be made."""


class ApplyError(TightfitError):
    """A plan could not be applied to this model: because of `technique`, if it is known, and only at `places` (`Option.where`), if given."""

    def __init__(self, message: str, *, technique: str = "", places: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.technique = technique
        self.places = tuple(places)
        # A program that swallows this error goes on without the plan, or without training, so the caller asks `apply_error` afterwards.
        # One that is made once more may name more places.
        _, known = _apply_errors.get(message, ("", ()))
        _apply_errors[message] = (technique, tuple(dict.fromkeys((*known, *self.places))))


class WatchError(TightfitError):
    """Nothing could be watched: no driver answers, or the history cannot be read; the message says which and what to do."""


class InternalError(TightfitError):
    """A bug in tightfit itself. `technique` is the one whose code failed, if known; `file` has the traceback, "" if none was written."""

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, *, technique: str = "", file: str = "") -> None:
        super().__init__(message)
        self.technique = technique
        self.file = file


_apply_errors: dict[str, tuple[str, Sequence[str]]] = {}


def forget_apply_errors(said: str | None = None) -> None:
    """Clears the errors that `apply_error` reports: all of them, or with a message that one alone, in each form in which it was raised."""
    for message in [message for message in _apply_errors if said is None or said.endswith(message)]:
        del _apply_errors[message]


def apply_errors_said() -> set[str]:
    """The messages of the errors that `apply_error` chooses from."""
    return set(_apply_errors)


def forget_apply_errors_since(said: set[str]) -> None:
    """Clears the errors that were made since `apply_errors_said` gave `said`: they were an answer, and ended nothing."""
    for message in apply_errors_said() - said:
        del _apply_errors[message]


def apply_error() -> ApplyError | None:
    """The first `ApplyError` created in this process, as it was last re-raised, or None. A new instance: tracebacks keep tensors alive."""
    messages = list(_apply_errors)
    # Who re-raises an ApplyError puts words in front of its message, so the longest form of the first one ends with it.
    for message in reversed(messages):
        if message.endswith(messages[0]):
            technique, places = _apply_errors[message]
            return ApplyError(message, technique=technique, places=places)
    return None

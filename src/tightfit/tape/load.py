"""Reads a tape from a file and verifies it: a truncated or edited file, or one of other code, must not become an estimate."""

import os

from tightfit.errors import RecordingError
from tightfit.tape.columns import Tape
from tightfit.tape.verify import verify_tape


def read_tape(path: str | os.PathLike[str]) -> Tape:
    """The tape that `Tape.save` wrote to `path`.

    Raises:
        RecordingError: the file is not a tape, one of another schema, or one that breaks a rule of `verify_tape`.
    """
    tape = Tape.load(path)
    faults = verify_tape(tape)
    if faults:
        raise RecordingError(f"{os.fspath(path)} is not a valid tape: {faults[0]}; trace the program again")
    return tape

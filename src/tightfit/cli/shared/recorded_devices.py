"""Which GPU of a recording is shown: a process with several has one history for each."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tightfit.recordings.read import Recording

_INDEX = re.compile(r"cuda:(\d{1,4})", re.IGNORECASE)


def recorded_index(name: str | None) -> int | None:
    """The GPU of a recording that `--device cuda:1` means; None for the name of a GPU."""
    found = None if name is None else _INDEX.fullmatch(name)
    return None if found is None else int(found.group(1))


def shown_device(recording: "Recording", names: Sequence[str | None]) -> int:
    """The index of the GPU to show: the one that `names` name, or the one that failed or is busiest; then the others are said on stderr.

    Raises:
        UsageError: the recording does not have that one.
    """
    from tightfit.diagnosis.histories import device_of
    from tightfit.recordings.read import Action

    asked = next((index for index in map(recorded_index, names) if index is not None), None)
    shown = device_of(recording, asked)
    others = [f"cuda:{one.device}" for one in recording.busy if one.device != shown.device]
    if others and asked is None:
        has_failed = bool((shown.action == Action.OOM).any())
        why = "ran out of memory" if has_failed else "has the most events"
        sys.stderr.write(
            f"tightfit: showing cuda:{shown.device}, which {why}; --device {others[0]} shows another (available: {', '.join(others)})\n"
        )
    return shown.device

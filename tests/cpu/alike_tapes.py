"""Compares the tape of a trace that repeats the rows of micro-batches that are alike with that of one that runs them all."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import Preparation, trace
from tightfit.planner.plan import Choice
from tightfit.tape import EventKind, Tape

_REPEATED = "the micro-batches of a step are alike"


def tape_differences(one: Tape, other: Tape) -> list[str]:
    """The columns in which two tapes differ; `other` is the one that may say that rows are repeated."""
    found = []
    for field in dataclasses.fields(Tape):
        name = field.name
        a, b = getattr(one, name), getattr(other, name)
        if name == "assumptions":
            b = tuple(each for each in b if _REPEATED not in each.what)
        if not dataclasses.is_dataclass(a):
            found += [name] if a != b and name != "strings" else []
            continue
        for column in (each.name for each in dataclasses.fields(a)):
            x, y = getattr(a, column), getattr(b, column)
            if (name, column) in _NAMES:
                x, y = np.array(one.strings)[x], np.array(other.strings)[y]
            if (name, column) == ("events", "storage"):
                x, y = _frees_in_order(one), _frees_in_order(other)
            if not np.array_equal(x, y):
                found.append(f"{name}.{column}")
    return found


def _frees_in_order(tape: Tape) -> list[int]:
    """The storages of the events. Autocast's copies of weights are freed in the order of their addresses, which is another one in each run."""
    rows = list(
        zip(tape.events.operator.tolist(), tape.events.kind.tolist(), tape.events.storage.tolist(), strict=True)
    )
    groups = itertools.groupby(rows, key=lambda row: (row[:2], None if row[1] == EventKind.FREE else row[2]))
    return [storage for _, group in groups for storage in sorted(row[2] for row in group)]


# Indices of strings, which are found in another order.
_NAMES = {
    *(("operators", name) for name in ("name", "module", "line", "dtype")),
    *(("weights", "module"), ("spans", "name"), ("spans", "kind")),
}


def both_tapes(
    folder: Path, program: str, choices: Sequence[Choice] | None = None, *, with_effects: bool = False
) -> tuple[Tape, Tape]:
    """The tape of a trace that runs all micro-batches, and that of one that may repeat some; with `choices` put on the program."""
    path = folder / "train.py"
    path.write_text(program)
    script = Script(path=str(path), arguments=())
    preparation = None
    if choices is not None:
        given = {"choices": [dataclasses.asdict(choice) for choice in choices]}
        preparation = Preparation(function="tightfit.runtime.run_script:prepare", argument=given)
    return tuple(
        trace(
            script,
            label="train.py",
            device="RTX 4090",
            with_effects=with_effects,
            preparation=preparation,
            runs_all_batches=runs_all,
        ).tape
        for runs_all in (True, False)
    )


def is_repeated(tape: Tape) -> bool:
    """Whether some were."""
    return any(_REPEATED in each.what for each in tape.assumptions)

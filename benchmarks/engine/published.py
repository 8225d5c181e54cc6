"""Published ladders of techniques for one card, beside what plans of the same kinds of techniques are traced to need.

`python -m benchmarks.engine published [--only NAME ...]`. Ratios to the row before are compared, and the GiB that a technique frees: sources measure other versions, and some of them compiled
programs, which a trace in eager mode is not. torchtune's chunks keep all logits, ours none.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import published_workloads
from benchmarks.engine.published_ladders import LADDERS, Ladder
from benchmarks.engine.traffic import write_rows
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Tape
from tightfit.techniques.registry import technique
from tightfit.units import GIB


def published(path: Path | None = None, only: Sequence[str] = ()) -> None:
    """Prints a row for each rung, and writes them."""
    rows: list[dict[str, Any]] = []
    for ladder in LADDERS:
        if not only or any(ladder.name.startswith(name) for name in only):
            print(f"{ladder.name}: {ladder.source}; {ladder.card}{', compiled' if ladder.is_compiled else ''}")
            for row in _rows_of(ladder):
                rows.append(row)
                print(
                    "  ".join(f"{v!s:>28}" if k == "row" else f"{v!s:>8}" for k, v in row.items() if k != "ladder"),
                    flush=True,
                )
    if path is not None:
        write_rows(path, rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Of one row, published or ours."""

    gib: float
    items_per_second: float


def _rows_of(ladder: Ladder) -> Iterator[dict[str, Any]]:
    plain = Profile(_traced(ladder, ()), find(ladder.card))
    taken: list[Option] = []
    for name, takes in ladder.base:
        taken += _offered(plain, name, takes)
    before: tuple[_Figures, _Figures] | None = None
    for rung in ladder.rungs:
        if rung.technique:
            new = _offered(plain, rung.technique, rung.takes)
            taken = [option for option in taken if not _conflicts(option, new)] + new
        estimate = estimate_peak(_traced(ladder, taken), plain.device)
        peak = estimate.peak.allocated_bytes if ladder.is_allocated else estimate.peak.reserved_bytes
        ours = _Figures(gib=peak / GIB, items_per_second=ladder.items_per_step / estimate.seconds_per_step)
        theirs = _Figures(gib=rung.gib, items_per_second=rung.items_per_second)
        row: dict[str, Any] = {
            "ladder": ladder.name,
            "row": rung.name,
            "published_gib": round(theirs.gib, 2),
            "gib": round(ours.gib, 2),
        }
        row |= {
            "published_per_second": round(theirs.items_per_second, 1),
            "per_second": round(ours.items_per_second, 1),
        }
        for kind, compare in _COMPARED.items():
            for whose, now in (("published_", 0), ("", 1)):
                row[whose + kind] = round(compare((theirs, ours)[now], before[now]), 3) if before is not None else ""
        before = theirs, ours
        yield row


_COMPARED: dict[str, Callable[[_Figures, _Figures], float]] = {
    "freed_gib": lambda now, before: before.gib - now.gib,
    "memory_ratio": lambda now, before: now.gib / before.gib,
    "time_ratio": lambda now, before: before.items_per_second / now.items_per_second,
}


def _offered(plain: Profile, name: str, takes: Callable[[Option], bool]) -> list[Option]:
    """The technique's options that are taken, and go together: of each place the one that saves most."""
    offered = [o for o in technique(name).options(plain) if takes(o)]
    found: list[Option] = []
    for option in sorted(offered, key=lambda o: min((c.num_bytes for c in o.changes), default=0)):
        if not _conflicts(option, found):
            found.append(option)
    if not found:
        raise ValueError(f"{name} is not offered")
    return found


def _conflicts(option: Option, taken: Sequence[Option]) -> bool:
    return any(option.slots & other.slots for other in taken)


def _traced(ladder: Ladder, options: Sequence[Option]) -> Tape:
    choices = [
        Choice(
            technique=o.technique, where=o.where, settings=o.settings, saves_bytes=0, adds_seconds=0.0, exact=o.exact
        )
        for o in options
    ]
    return trace(
        GeneratorFunction(
            location=published_workloads.__file__, function=ladder.workload, parameters=dict(ladder.parameters)
        ),
        label="published",
        device=ladder.card,
        num_steps=3,
        preparation=Preparation(
            function="tightfit.runtime.attach:prepare",
            argument={"choices": [dataclasses.asdict(c) for c in choices]},
            imports=("tightfit.runtime.attach", "tightfit.techniques.registry:import_ours"),
        ),
    ).tape

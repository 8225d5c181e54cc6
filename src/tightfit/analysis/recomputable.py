"""Which modules of a run are worth running twice, found by structure alone, and what that is worth: for all techniques that recompute.

Candidates are the modules that contain others and leave something behind for the backward pass; the model itself too where it is called several
times before a backward pass, as a policy is in a loop. Those that repeat, with the same operators
and the same bytes, are alike: a planner may count them instead of naming them.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable

import numpy as np

from tightfit.analysis.modules import Anatomy, Visit
from tightfit.cost.steps import step_operators
from tightfit.planner.option import Change, Option
from tightfit.tape import Column

# A candidate that is worth less than this share of all that waits is noise in a plan.
SMALLEST_SHARE = 0.002


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A module that could be run twice, with all its visits; `alike` is the same for modules that do the same."""

    path: str
    alike: str
    visits: tuple[Visit, ...]
    slots: frozenset[str]


def blocks(anatomy: Anatomy) -> list[Block]:
    """The candidates of a run, outermost first."""
    total = anatomy.bytes_of(np.flatnonzero(anatomy.waits)) / max(1, anatomy.num_rounds)
    found = []
    for path in anatomy.paths:
        inside = anatomy.modules_inside(path)
        is_root = "." not in path
        if inside == [path] or (not is_root and _is_list(path, inside)):
            continue
        visits = anatomy.visits(path)
        if is_root and len(visits) <= anatomy.num_rounds:
            continue
        if visits and anatomy.bytes_of(visits[-1].waiting) >= SMALLEST_SHARE * total:
            slots = frozenset(f"activations@{module}" for module in inside)
            found.append(Block(path=path, alike=_likeness(anatomy, path, visits[-1]), visits=visits, slots=slots))
    return found


def recompute_option(
    technique: str, anatomy: Anatomy, block: Block, seconds: Column, kept: Callable[[Visit], Column] | None = None
) -> Option:
    """Running `block` twice, but for what `kept` says of its waiting storages; `seconds` are those of each operator.

    A visit's waiting storages are gone from the end of its forward to the beginning of its backward, where they come back all at once; what
    the forward had beyond them at its highest moment is there once more then. The input is kept until then, if the plain run does not.
    """
    changes, added = [], 0.0
    for visit in block.visits:
        stays = np.zeros(len(visit.waiting), dtype=bool) if kept is None else kept(visit)
        gone = visit.waiting[~stays]
        changes.append(Change(begin=visit.end_event, end=visit.back_event, num_bytes=-anatomy.bytes_of(gone)))
        changes += input_kept(anatomy, visit)
        again = np.ones(visit.end - visit.begin, dtype=bool)
        if len(gone):
            # The second run ends when it has made the last thing that is missing.
            again[int(anatomy.tape.storages.operator[gone].max()) + 1 - visit.begin :] = False
        if kept is not None:
            again[anatomy.tape.storages.operator[visit.waiting[stays]] - visit.begin] = False
        added += float(seconds[visit.begin : visit.end][again].sum())
    return Option(
        technique=technique,
        where=block.path,
        alike=f"{technique}:{block.alike}",
        changes=tuple(changes),
        seconds=added / num_steps(anatomy),
        exact=True,
        slots=block.slots,
    )


def input_kept(anatomy: Anatomy, visit: Visit) -> list[Change]:
    """What it holds to keep the input of a visit for its backward pass; nothing where the plain run keeps it anyway."""
    died = int(anatomy.died[visit.input]) if visit.input >= 0 else visit.back_event
    if died >= visit.back_event:
        return []
    return [Change(begin=died, end=visit.back_end_event, num_bytes=int(anatomy.block_bytes[visit.input]))]


def num_steps(anatomy: Anatomy) -> int:
    """Steps of the program's loop; 1 where there are none."""
    return max(1, len(step_operators(anatomy.tape)))


def _is_list(path: str, inside: list[str]) -> bool:
    """Whether `path` looks like a ModuleList, which is never called: nothing of its own, and numbered children."""
    depth = path.count(".") + 1
    return path not in inside and all(module.split(".")[depth].isdigit() for module in inside)


def _likeness(anatomy: Anatomy, path: str, visit: Visit) -> str:
    tape = anatomy.tape
    content = (
        anatomy.operator_names(visit.begin, visit.end),
        tape.operators.flops[visit.begin : visit.end].tolist(),
        anatomy.block_bytes[visit.waiting].tolist(),
    )
    return re.sub(r"\d+", "*", path) + "#" + hashlib.sha1(repr(content).encode()).hexdigest()[:8]

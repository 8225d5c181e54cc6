"""Which modules are worth recomputing, found from the tape alone, and what that saves and costs: for all techniques that recompute.

Candidates are modules that have submodules and save something for backward; the model itself too where it is called several times before a
backward pass, as a policy is in a rollout. Modules with the same operators and the same bytes form an equivalence class, by which a planner
counts them instead of naming them.
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

# A candidate that saves less than this share of what is saved for backward only adds noise to a plan.
SMALLEST_SHARE = 0.002


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A module that could be recomputed, with all its calls; `alike` names its equivalence class."""

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
        # A leaf module mostly saves its own input, which recomputing it would have to retain.
        if inside == [path] or (not is_root and _is_list(path, inside)):
            continue
        visits = anatomy.visits(path)
        # Called once per round, the model recomputed as a whole saves nothing at the peak: all of it is back at once in backward.
        if is_root and len(visits) <= anatomy.num_rounds:
            continue
        if visits and anatomy.bytes_of(visits[-1].waiting) >= SMALLEST_SHARE * total:
            slots = frozenset(f"activations@{module}" for module in inside)
            found.append(Block(path=path, alike=_likeness(anatomy, path, visits[-1]), visits=visits, slots=slots))
    return found


def recompute_option(
    technique: str, anatomy: Anatomy, block: Block, seconds: Column, kept: Callable[[Visit], Column] | None = None
) -> Option:
    """The option of recomputing `block`, except for the saved storages that `kept` marks; `seconds` holds the time of each operator.

    The storages that a call saves for backward are freed from the end of its forward to the beginning of its backward pass, where all of them are
    allocated again. The input is retained until then if the plain run frees it earlier.
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
        # Selective checkpointing serves the kept results from its cache instead of computing them again.
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
    """The cost of retaining the input of a module call until its backward pass; none where the plain run retains it anyway."""
    died = int(anatomy.died[visit.input]) if visit.input >= 0 else visit.back_event
    if died >= visit.back_event:
        return []
    return [Change(begin=died, end=visit.back_end_event, num_bytes=int(anatomy.block_bytes[visit.input]))]


def num_steps(anatomy: Anatomy) -> int:
    """Steps of the program's loop; 1 where there are none, as it is a divisor."""
    return max(1, len(step_operators(anatomy.tape)))


def _is_list(path: str, inside: list[str]) -> bool:
    """Whether `path` looks like a ModuleList, which is never called: no operator of its own, and numbered children."""
    depth = path.count(".") + 1
    return path not in inside and all(module.split(".")[depth].isdigit() for module in inside)


def _likeness(anatomy: Anatomy, path: str, visit: Visit) -> str:
    tape = anatomy.tape
    content = (
        anatomy.operator_names(visit.begin, visit.end),
        tape.operators.flops[visit.begin : visit.end].tolist(),
        anatomy.block_bytes[visit.waiting].tolist(),
    )
    # Numbers in the path are left out, as layers.0 and layers.7 differ in nothing else; the hash of operators, FLOPs and bytes
    # keeps apart layers of one list that differ (every n-th one a mixture of experts, say).
    return re.sub(r"\d+", "*", path) + "#" + hashlib.sha1(repr(content).encode()).hexdigest()[:8]

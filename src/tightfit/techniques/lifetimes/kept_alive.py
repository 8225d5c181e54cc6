"""Finds tensors that a loop keeps alive by accident: outputs of a step until their names are rebound, and lists that grow from step to step.

A name keeps its value until it is rebound. `outputs = model(batch)` therefore keeps the last step's logits alive through the whole next forward,
and `losses.append(loss)` keeps every step's. A plan does not change a user's loop; it names the line.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Never, final

import numpy as np

from tightfit.analysis.optimizer import OptimizerProfile, events_of, passes_of
from tightfit.analysis.profile import Profile
from tightfit.analysis.source.accumulations import (
    ADVICE_ON_GROWTH,
    Accumulation,
    accumulations_from,
    advice_on_accumulation,
)
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.planner.suggestion import Suggestion
from tightfit.tape import Category, Column, Phase, Source, SpanKind, Tape
from tightfit.techniques.technique import AbstractTechnique, ChosenOption
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

SMALLEST_SHARE = 0.005
"""Of the run's peak: what a line must keep to be worth a word. Of what grows, a hundredth of that."""

MIN_STEPS = 3
"""The first step leaves things behind that are meant to stay; what the second leaves to the third is kept in every step."""

NUM_LINES = 5
# Where in a forward pass "deep inside" is: names are bound again when it is over.
_DEEP = 0.8


@final
class KeptAlive(AbstractTechnique):
    """Suggestion only: the lines whose results outlive their step."""

    name = "kept_alive"
    exact = True
    exactness = "bit for bit: nothing is changed"

    def options(self, profile: Profile) -> Iterable[Option]:
        """No options: the loop is the user's."""
        return ()

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Advice for each line, the largest first."""
        run = profile.optimizer
        steps = profile.tape.spans.kind == SpanKind.STEP
        begins, ends = profile.tape.spans.begin[steps], profile.tape.spans.end[steps]
        if len(begins) < MIN_STEPS or not len(profile.tape.events):
            return []
        smallest = SMALLEST_SHARE * _peak_bytes(run)
        growing = _growing(run, ends)
        lingering = np.setdiff1d(_lingering(run, begins, ends), growing)
        leaks = [line for line in _by_line(run, growing) if line.num_bytes >= smallest / 100]
        held = accumulations_from([(line.line, "") for line in leaks], _lines_of(profile.tape)) if leaks else ()
        rows = [(line, True) for line in leaks]
        rows += [(line, False) for line in _by_line(run, lingering) if line.num_bytes >= smallest]
        return [
            Suggestion(
                what=_of_growth(line, held) if grows else _of_lingering(line),
                saves_bytes=line.num_bytes,
                adds_seconds=0.0,
                is_one_line=True,
            )
            for line, grows in rows[:NUM_LINES]
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> Never:
        """Nothing can be applied to a model."""
        raise ApplyError("it is a suggestion about the program's own lines, and cannot be applied to a model")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the user's code with the storages that it keeps alive: `num_storages` of `num_bytes` in total, most of it made by `module`."""

    line: str
    module: str
    num_storages: int
    num_bytes: int

    @property
    def made(self) -> str:
        """The storages in words."""
        by = f" of {self.module}" if self.module else ""
        return f"{self.num_storages} tensors{by}" if self.num_storages > 1 else f"a tensor{by}"


def _of_growth(line: _Line, held: Sequence[Accumulation]) -> str:
    what = f"{held[0].line} {advice_on_accumulation(held[0])}" if held else ADVICE_ON_GROWTH
    return f"{line.line} leaves {format_bytes(line.num_bytes)} more allocated after each step ({line.made}), a leak: {what}"


def _of_lingering(line: _Line) -> str:
    return (
        f"what {line.line} allocated in one step ({line.made}, {format_bytes(line.num_bytes)}) stays allocated through the next forward pass: "
        "if unintended, `del` the variable at the end of the step"
    )


def _lines_of(tape: Tape) -> list[str]:
    """The lines of the program that called an operator."""
    return [tape.strings[at] for at in np.unique(tape.operators.line).tolist()]


def _own(run: OptimizerProfile) -> Column:
    """Storages made in the passes that are no parameters, gradients, states, inputs or workspaces."""
    storages = run.tape.storages
    kinds = np.isin(storages.category, (Category.ACTIVATIONS, Category.TEMPORARIES)) & (
        storages.source == Source.TENSOR
    )
    by_operator = storages.operator >= 0
    phase = np.where(by_operator, run.tape.operators.phase[storages.operator], Phase.OTHER)
    return np.flatnonzero(kinds & by_operator & np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)))


def _lingering(run: OptimizerProfile, begins: Column, ends: Column) -> Column:
    """Storages of the last step but one that are alive deep inside the forward of the last one."""
    own = _own(run)
    # A pass whose operators allocate nothing may begin where the events end.
    passes = [p for p in passes_of(run) if begins[-1] <= p[0] < len(run.tape.events)]
    if not passes:
        return own[:0]
    phases = run.tape.operators.phase
    issued = int(run.tape.events.operator[passes[0][0]])
    forward = np.flatnonzero(phases == Phase.FORWARD)
    backward = np.flatnonzero((phases == Phase.BACKWARD) & (np.arange(len(phases)) >= issued))
    forward = forward[(forward >= issued - 1) & (forward < (backward[0] if len(backward) else len(phases)))]
    # What the model returned is bound when the model is left, before a loss outside of it is computed.
    in_modules = np.array([bool(run.tape.strings[m]) for m in run.tape.operators.module[forward].tolist()], dtype=bool)
    forward = forward[in_modules] if in_modules.any() else forward
    if not len(forward):
        return own[:0]
    ((deep, _),) = events_of(run, [(int(forward[int(_DEEP * (len(forward) - 1))]), len(phases))])
    allocated_at, freed_at = run.allocated_at[own], run.freed_at[own]
    return own[(allocated_at >= begins[-2]) & (allocated_at < ends[-2]) & (freed_at > deep)]


def _growing(run: OptimizerProfile, ends: Column) -> Column:
    """Storages of the last step but one that outlive the last, if the step before it left as many of the same kind."""
    own = _own(run)
    last = int(ends[-1]) - 1
    allocated_at, stays = run.allocated_at[own], run.freed_at[own] > last
    edges = [0, *ends.tolist()]
    made = [own[stays & (allocated_at >= edges[i]) & (allocated_at < edges[i + 1])] for i in (-4, -3)]
    # What one step alone leaves may be a cache that is filled late; what two steps leave grows.
    earlier = {_kind(run, storage) for storage in made[0].tolist()}
    return np.array([s for s in made[1].tolist() if _kind(run, s) in earlier], dtype=np.int64)


def _kind(run: OptimizerProfile, storage: int) -> tuple[int, int, int, int]:
    operators, operator = run.tape.operators, int(run.tape.storages.operator[storage])
    place = (int(operators.line[operator]), int(operators.module[operator]), int(operators.name[operator]))
    return (*place, int(run.block_bytes[storage]))


def _by_line(run: OptimizerProfile, storages: Column) -> list[_Line]:
    """The storages by the line that made them, the largest first."""
    tape, groups = run.tape, {}
    for storage in storages.tolist():
        operator = int(tape.storages.operator[storage])
        groups.setdefault(tape.strings[tape.operators.line[operator]] or "a library", []).append(storage)
    lines = []
    for line, members in groups.items():
        largest = max(members, key=lambda s: int(run.block_bytes[s]))
        lines.append(
            _Line(
                line=line,
                module=tape.strings[tape.operators.module[tape.storages.operator[largest]]],
                num_storages=len(members),
                num_bytes=int(run.block_bytes[members].sum()),
            )
        )
    return sorted(lines, key=lambda line: -line.num_bytes)


def _peak_bytes(run: OptimizerProfile) -> int:
    difference = np.zeros(len(run.tape.events) + 1, dtype=np.int64)
    np.add.at(difference, run.allocated_at, run.block_bytes)
    np.subtract.at(difference, run.freed_at, run.block_bytes)
    return int(difference.cumsum().max(initial=0))

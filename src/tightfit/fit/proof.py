"""Proves a plan by values where a few steps of the program are affordable on the host: losses, weights, buffers and random states, plain and planned.

What a program costs on the host is told from its tape, and nothing is run that would take longer than is allowed. A program of two runs that
differ by themselves proves nothing, and neither does one that the host cannot run; a plan whose values differ is made again without the techniques that
are to blame.
"""

import dataclasses
import math
import os
import time
from collections.abc import Sequence

from tightfit.capture.processes.containment.policy import CLOSED, Policy
from tightfit.capture.targets.target_kinds import Target
from tightfit.errors import ApplyError
from tightfit.fit.planning_progress import ProgressLog
from tightfit.fit.values import HostValues, differences, run_on_host
from tightfit.planner.plan import Choice, Proof
from tightfit.tape import Category, Phase, Tape
from tightfit.techniques.registry import technique

NUM_STEPS = 3
DEFAULT_SECONDS = 20.0
# What a core of a small server does in float64, and what a process takes to begin.
_FLOP_PER_SECOND = 1.5e10
_BYTES_PER_SECOND = 2e9
_SECONDS_TO_BEGIN = 3.0
# A planned run does some of the work twice.
_PLANNED = 1.5
_SHARE_OF_MEMORY = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A technique with which the program's values are others, and in what."""

    technique: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """How a program runs on the host: in float64, where rounding is told from faults, or as it is; with `torch.cuda` answering for the card, as when it
    was traced, or not."""

    has_card: bool
    is_double: bool


_MODES = tuple(_Mode(has_card=card, is_double=double) for card in (True, False) for double in (True, False))


class Prover:
    """Proves plans of one program for `device`; what the plain run leaves is kept. `tape` is that of the plain run."""

    def __init__(
        self, target: Target, tape: Tape, *, device: str, seconds: float, log: ProgressLog, policy: Policy = CLOSED
    ) -> None:
        self._target = target
        self._tape = tape
        self._device = device
        self._seconds = seconds
        self._log = log
        self._policy = policy
        self._plain: HostValues | None = None
        self._mode = _MODES[0]
        self._deadline = 0.0

    def prove(self, choices: Sequence[Choice]) -> Proof | list[Mismatch]:
        """The proof that a plan of these choices has, or else the techniques that are to blame.

        Raises:
            ApplyError: a choice was refused by the checks of a real run.
        """
        started = time.monotonic()
        self._deadline = started + self._seconds
        why = self._obstacle(choices)
        if why:
            return Proof(kind="structure", what=why)
        self._log.begin("proving the plan by values on the host")
        plain = self._plain_run()
        if plain.values is None:
            return Proof(kind="structure", what=f"not verified by values: on the host {plain.why}")
        planned = self._planned_run(choices)
        if planned.values is None:
            return Proof(kind="structure", what=f"not verified by values: with the plan, on the host {planned.why}")
        if not plain.values["weights"]:
            return Proof(kind="structure", what="not verified by values: no variable of the program is a model")
        bits = not any(True for _ in differences(plain.values, planned.values, is_bitwise=True))
        if not bits and self._first_difference(plain, planned, choices):
            return self._to_blame(plain, choices)
        how = "bit for bit" if bits else "up to the order of sums"
        num_steps, losses = plain.values["num_steps"], "losses, " if plain.values["losses"] else ""
        steps = f"{num_steps} {'step' if num_steps == 1 else 'steps'}"
        what = f"{steps} on the host, plain and planned, gave the same {losses}weights, buffers and random states {how}"
        what += "" if self._mode.has_card else ", as the program runs without a card"
        return Proof(kind="values", steps=num_steps, seconds=round(time.monotonic() - started, 2), what=what)

    def _obstacle(self, choices: Sequence[Choice]) -> str:
        """Why values prove nothing here, or cannot be had; empty where they can."""
        if not all(choice.exact for choice in choices):
            return "not verified by values: the plan is lossy"
        tape = self._tape.of_steps()
        if not (tape.operators.phase == Phase.BACKWARD).any():
            return "not verified by values: the program trains nothing, and what it predicts is not read"
        operators, storages = tape.operators, tape.storages
        plain = float(operators.flops.sum()) / _FLOP_PER_SECOND
        plain += float((operators.bytes_read + operators.bytes_written).sum()) / _BYTES_PER_SECOND
        needed = (1 + _PLANNED) * plain + 2 * _SECONDS_TO_BEGIN
        if needed > self._seconds:
            return f"not verified by values: {NUM_STEPS} steps would take about {needed:,.0f} s on the host"
        held = int(storages.num_bytes[storages.category != Category.WORKSPACE].sum())
        if held > _SHARE_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            return "not verified by values: the host has too little memory"
        return ""

    def _plain_run(self) -> HostValues:
        """The plain run, in the first mode that the program takes; the failure in the first one where it takes none."""
        failed = None
        for mode in _MODES if self._plain is None else ():
            self._mode = mode
            found = self._run(())
            if found.values is not None:
                self._plain = found
                break
            failed = failed or found
        self._plain = self._plain or failed
        assert self._plain is not None
        return self._plain

    def _planned_run(self, choices: Sequence[Choice]) -> HostValues:
        try:
            return self._run(choices)
        except ApplyError as error:
            if self._mode.has_card:
                raise
            # It may take another path than the one that the plan was made for.
            return HostValues(values=None, why=f"and without a card it is refused: {error}")

    def _run(self, choices: Sequence[Choice]) -> HostValues:
        return run_on_host(
            self._target,
            [c for c in choices if "alloc_conf" not in c.settings],
            num_steps=NUM_STEPS,
            is_double=self._mode.is_double,
            card=self._device if self._mode.has_card else None,
            timeout_seconds=max(1.0, self._deadline - time.monotonic()),
            policy=self._policy,
        )

    def _first_difference(self, plain: HostValues, planned: HostValues, choices: Sequence[Choice]) -> str:
        assert plain.values is not None and planned.values is not None
        is_bitwise = all(_promises_bits(choice) for choice in choices)
        return next(iter(differences(plain.values, planned.values, is_bitwise=is_bitwise)), "")

    def _to_blame(self, plain: HostValues, choices: Sequence[Choice]) -> Proof | list[Mismatch]:
        """The techniques with which, alone, the values are others; if none is by itself, the last that is put on."""
        assert plain.values is not None
        # Something is wrong, and what it is must be known.
        self._deadline = math.inf
        again = self._run(())
        if again.values is None or any(differences(plain.values, again.values, is_bitwise=True)):
            return Proof(kind="structure", what="not verified by values: two plain runs of the program differ")
        names = list(dict.fromkeys(choice.technique for choice in choices if "alloc_conf" not in choice.settings))
        found = []
        for name in names:
            own = [choice for choice in choices if choice.technique == name]
            try:
                alone = self._run(own)
            except ApplyError:
                # What needs another technique beside it says nothing by itself.
                continue
            if alone.values is not None and (what := self._first_difference(plain, alone, own)):
                found.append(Mismatch(technique=name, what=what))
        planned = "with all techniques together the program's results differ"
        return found or [Mismatch(technique=names[-1], what=planned)]


def _promises_bits(choice: Choice) -> bool:
    exactness = technique(choice.technique).exactness
    return exactness.startswith("bit for bit") and "up to" not in exactness

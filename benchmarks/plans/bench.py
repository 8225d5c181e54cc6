"""Traced runs cached on disk, so that an interrupted benchmark continues where it was.

The key of a tape is the workload, the device and the choices, not the code that made it: use another folder after a change.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.plans.workloads import Workload
from tightfit.capture.targets.target_kinds import Target
from tightfit.capture.trace_settings import TraceSettings
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning_progress import ProgressLog
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.option import Option
from tightfit.tape import Tape

NUM_STEPS = 2


class StoredRuns(TracedRuns):
    """Runs of `target`, traced for two steps; kept in `folder`, if there is one. `num_traced` and `seconds_traced` count what was traced."""

    def __init__(self, target: Target, label: str, device: str, folder: Path | None) -> None:
        super().__init__(
            target=target,
            label=label,
            on=CardSettings.of(device),
            tracing=TraceSettings(steps=NUM_STEPS),
            log=ProgressLog(),
        )
        self._folder = folder
        self._name = f"{label} {target} {device}"
        self.num_traced = 0
        self.seconds_traced = 0.0

    def run_with(self, options: Iterable[Option], meanwhile: Callable[[], object] | None = None) -> TracedRun:
        """As `TracedRuns.run_with`, from disk if it is there."""
        options = tuple(options)
        key = frozenset(option.key for option in options)
        if key in self._made:
            return self._made[key]
        place = self._place(key)
        if place is not None and place.with_suffix(".json").exists():
            said = json.loads(place.with_suffix(".json").read_text())
            tape = Tape.load(place.with_suffix(".npz"))
            self._made[key] = self._costed(options, tape, said | {"call_sizes": {}})
            return self._made[key]
        started = time.monotonic()
        made = super().run_with(options, meanwhile)
        self.num_traced += 1
        self.seconds_traced += time.monotonic() - started
        print(
            f"  traced {self.label} with {len(options)} choices in {time.monotonic() - started:.1f} s: "
            f"{made.high_bytes / 2**30:.2f} GiB, {made.seconds * 1e3:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            made.tape.save(place.with_suffix(".npz"))
            place.with_suffix(".json").write_text(json.dumps({"roots": made.roots, "notes": made.notes}))
        return made

    def _place(self, key: frozenset[str]) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / hashlib.sha1(repr((self._name, NUM_STEPS, sorted(key))).encode()).hexdigest()


def bench_of(workload: Workload, folder: Path | None, batch_size: int | None = None) -> StoredRuns:
    """The bench of a workload of the grid, with its own batch or another."""
    name = workload.name.removesuffix("-lossy")
    label = name if batch_size is None else f"{name} at batch {batch_size}"
    return StoredRuns(workload.target(batch_size), label, workload.device, folder)

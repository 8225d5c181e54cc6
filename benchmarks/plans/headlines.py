"""An 8B model in one picture: what a training step of it needs, and what it still needs with plans, exact ones and lossy ones."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.plans.bench import bench_of
from benchmarks.plans.grid import summary
from benchmarks.plans.workloads import named
from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.search import Search
from tightfit.fit.traced_runs import TracedRun
from tightfit.tape import Category, EventKind, Tape

# Of the plain run's peak, for exact plans.
SHARES = (0.45, 0.4)
_KEPT = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


def highest(tape: Tape, categories: Iterable[Category]) -> int:
    """The peak of the bytes of `categories` together."""
    kinds, storages = tape.events.kind, tape.events.storage
    relevant = (storages >= 0) & np.isin(kinds, (EventKind.ALLOCATE, EventKind.FREE))
    signs = np.where(kinds[relevant] == EventKind.ALLOCATE, 1, -1)
    of_kind = np.isin(tape.storages.category, list(categories))
    sizes = np.where(of_kind, tape.storages.num_bytes, 0)[storages[relevant]]
    return int(np.cumsum(signs * sizes).max(initial=0))


def activations(tape: Tape) -> int:
    """The peak without parameters, gradients and optimizer states: activations, temporaries, inputs, workspaces."""
    return highest(tape, [category for category in Category if category not in _KEPT])


def lines(folder: Path | None) -> Iterator[str]:
    """Exact plans, then the lowest peak that they reach, and with quantised optimizer states."""
    workload = named("llama-8b")
    bench = bench_of(workload, folder)
    plain = bench.run_with(())
    yield f"{workload.name}: batch {workload.batch_size}, {dict(workload.settings)}, {workload.device}"
    yield _line("plain", plain, plain, "")
    for share in SHARES:
        started = time.monotonic()
        found = Search(bench, int(share * plain.high_bytes), Allowed()).run()
        took = f"{summary(found.best.all_options())}  ({time.monotonic() - started:.0f} s)"
        yield _line(f"exact, {share:.0%} of it{'' if found.fits else ', does not fit'}", found.best, plain, took)
    small_states = Allowed(names=frozenset({"low_bit_states"}))
    for name, allowed in (("exact, least", Allowed()), ("states in 4 or 8 bits, least", small_states)):
        trial = Search(bench, 0, allowed).run().best
        yield _line(name, trial, plain, summary(trial.all_options()))


def _line(name: str, trial: TracedRun, plain: TracedRun, choices: str) -> str:
    held, before = activations(trial.tape), activations(plain.tape)
    peak = trial.estimate.peak.device_bytes
    return (
        f"{name:32} {peak / 2**30:7.2f} GiB ({plain.estimate.peak.device_bytes / peak:4.2f} times less)  activations "
        f"{held / 2**30:7.2f} GiB ({held / before - 1:+.1%})  {trial.seconds * 1e3:8.1f} ms ({trial.seconds / plain.seconds - 1:+.1%})  {choices}"
    )

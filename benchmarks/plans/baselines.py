"""The simple remedies that a plan has to beat, traced as plans are: nothing, every block run twice, 8-bit states, half the batch, all together.

Half the batch is counted by the sample: two of its steps for one of the plain run.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.plans.bench import StoredRuns, bench_of
from benchmarks.plans.workloads import Workload
from tightfit.analysis.profile import Profile
from tightfit.errors import TightfitError
from tightfit.planner.option import Option
from tightfit.techniques.registry import techniques


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The upper end of a baseline's peak, and its seconds for the samples of a plain step; `why_not` instead where it does not run."""

    name: str
    device_bytes: int
    high_bytes: int
    seconds: float
    why_not: str = ""


def outermost_repeated(options: Sequence[Option]) -> list[Option]:
    """Checkpointing of every block that repeats, as a framework's switch has it: modules with a number for a name, none inside another."""
    blocks = [o for o in options if o.technique == "checkpointing" and o.where.rpartition(".")[2].isdigit()]
    return [o for o in blocks if not any(o.slots < other.slots for other in blocks)]


def _options(bench: StoredRuns, names: Iterable[str]) -> list[Option]:
    tape = bench.run_with(()).tape
    known = techniques()
    return [o for name in names if name in known for o in known[name].options(Profile(tape, bench.card))]


def _remedies(bench: StoredRuns, allow: Sequence[str]) -> Iterator[tuple[str, list[Option]]]:
    blocks = outermost_repeated(_options(bench, ("checkpointing",)))
    # There are several where bitsandbytes is installed; the first one needs nothing else.
    states = [o for o in _options(bench, ("low_bit_states",)) if o.settings["bits"] == 8][:1]
    yield "nothing", []
    if blocks:
        yield "every block twice", blocks
    if states and "low_bit_states" in allow:
        yield "8-bit states", states
        yield "every block twice, 8-bit states", [*blocks, *states]


def baselines(workload: Workload, bench: StoredRuns, folder: Path | None) -> Iterator[Baseline]:
    """All of them, with the user's own settings of the allocator."""
    yield from _measured(bench, workload.allow, "", 1)
    if workload.half_differs:
        why_not = f"another training: {workload.half_differs}"
        yield Baseline(name="half the batch", device_bytes=0, high_bytes=0, seconds=0.0, why_not=why_not)
    elif workload.batch_size > 1:
        half = bench_of(workload, folder, workload.batch_size // 2)
        yield from _measured(half, workload.allow, "half the batch", workload.batch_size / (workload.batch_size // 2))


def _measured(bench: StoredRuns, allow: Sequence[str], prefix: str, times: float) -> Iterator[Baseline]:
    for name, options in _remedies(bench, allow):
        words = ", ".join(word for word in (prefix, name) if word and (word != "nothing" or not prefix))
        try:
            trial = bench.run_with(options)
        except TightfitError as error:
            yield Baseline(name=words, device_bytes=0, high_bytes=0, seconds=0.0, why_not=str(error))
            continue
        yield Baseline(
            name=words,
            device_bytes=trial.estimate.peak.device_bytes,
            high_bytes=trial.high_bytes,
            seconds=trial.seconds * times,
        )

"""A published ladder of techniques, climbed on the virtual GPU: Llama 3.2 3B, batch 2 of 4,096 packed tokens, bfloat16, on an A100 80GB.

Measured by torchtune (peak memory in GiB): packed 60.0, compiled 51.0, chunked cross-entropy 42.9, activation checkpointing 24.9, optimizer in
backward 23.1, activation offloading 21.8, 8-bit AdamW 17.6. What is compared is the share of the packed run that is left on each rung.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.plans.baselines import outermost_repeated
from benchmarks.plans.bench import StoredRuns, bench_of
from benchmarks.plans.workloads import Workload
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.registry import techniques

LLAMA_3B = Workload(
    name="llama-3b",
    source="llama-3.2-3b",
    batch_size=2,
    device="A100-SXM4-80GB",
    settings={"task": "causal-lm", "sequence_length": 4096, "dtype": "bfloat16"},
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What is added, the measured GiB with it, and what makes the two runs differ otherwise."""

    name: str
    technique: str
    measured_gib: float
    differs: str = ""


PACKED_GIB = 60.0
RUNGS: tuple[Rung, ...] = (
    Rung(
        name="chunked cross-entropy",
        technique="chunked_loss",
        measured_gib=42.9,
        differs="measured compiled: fused operators keep fewer activations",
    ),
    Rung(name="activation checkpointing", technique="checkpointing", measured_gib=24.9),
    Rung(name="optimizer in backward", technique="update_in_backward", measured_gib=23.1),
    Rung(
        name="8-bit AdamW",
        technique="low_bit_states",
        measured_gib=17.6,
        differs="measured with paged states and activations offloaded",
    ),
)


def lines(folder: Path | None) -> Iterator[str]:
    """A line for each rung: predicted and measured ratio to the rung before."""
    bench = bench_of(LLAMA_3B, folder)
    plain = bench.run_with(()).estimate.peak.allocated_bytes
    yield f"{'packed':26} {plain / 2**30:6.1f} GiB, measured {PACKED_GIB}"
    # The measured recipe has the fused optimizer from the start.
    taken = list(_options(bench, "optimizer_kernel"))
    for rung in RUNGS:
        options = _options(bench, rung.technique)
        taken = [*(t for t in taken if not any(o.slots & t.slots for o in options)), *options]
        now = bench.run_with(taken).estimate.peak.allocated_bytes
        share, measured = now / plain, rung.measured_gib / PACKED_GIB
        yield (
            f"{rung.name:26} {now / 2**30:6.1f} GiB, measured {rung.measured_gib}; of the packed run {share:.3f}, measured {measured:.3f} "
            f"({share / measured - 1:+.1%}){f'  [{rung.differs}]' if rung.differs else ''}"
        )


def _options(bench: StoredRuns, name: str) -> Sequence[Option]:
    tape = bench.run_with(()).tape
    options = list(techniques()[name].options(Profile(tape, bench.card)))
    if name == "checkpointing":
        return outermost_repeated(options)
    wanted = {"num_chunks": 8, "kernel": "fused", "bits": 8, "in_backward": True}
    return [max(options, key=lambda o: sum(o.settings.get(key) == value for key, value in wanted.items()))]

"""A published ladder of techniques, climbed on the virtual GPU: Llama 3.2 3B, batch 2 of 4,096 packed tokens, bfloat16, on an A100 80GB.

Measured: torchtune, docs "Memory optimization overview" and the release notes of its ladder (peak memory in GiB): packed 60.0, compiled 51.0,
chunked cross-entropy 42.9, activation checkpointing 24.9, optimizer in backward 23.1, activation offloading 21.8, 8-bit AdamW 17.6. What is
compared is what one rung makes of the one before, since the model's code is another and most rungs are compiled.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.plans.baselines import outermost_repeated
from benchmarks.plans.bench import StoredBench, bench_of
from benchmarks.plans.workloads import Workload
from tightfit.planner.option import Option
from tightfit.techniques.catalogue import techniques

LLAMA_3B = Workload(
    name="llama-3b",
    source="llama-3.2-3b",
    batch_size=2,
    device="A100-SXM4-80GB",
    settings={"task": "causal-lm", "sequence_length": 4096, "dtype": "bfloat16"},
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What is added, the measured GiB before and with it, and what makes the two runs differ otherwise."""

    name: str
    technique: str
    before_gib: float
    with_gib: float
    differs: str = ""


RUNGS: tuple[Rung, ...] = (
    Rung(
        name="chunked cross-entropy",
        technique="chunked_loss",
        before_gib=51.0,
        with_gib=42.9,
        differs="measured compiled, which has already fused the loss: ours is the larger step",
    ),
    Rung(name="activation checkpointing", technique="checkpointing", before_gib=42.9, with_gib=24.9),
    Rung(name="optimizer in backward", technique="update_in_backward", before_gib=24.9, with_gib=23.1),
    Rung(
        name="8-bit AdamW",
        technique="low_bit_states",
        before_gib=21.8,
        with_gib=17.6,
        differs="measured with paged states of bitsandbytes and activations offloaded; together with updates in backward ours is not offered",
    ),
)


def lines(folder: Path | None) -> Iterator[str]:
    """A line for each rung: predicted and measured ratio to the rung before."""
    bench = bench_of(LLAMA_3B, folder)
    # The measured recipe has the fused optimizer from the start.
    taken = list(_options(bench, "optimizer_kernel"))
    before = bench.trial(taken).estimate.peak
    yield f"plain: {before.reserved_bytes / 2**30:.1f} GiB reserved, {before.allocated_bytes / 2**30:.1f} allocated; measured 60.0"
    for rung in RUNGS:
        options = _options(bench, rung.technique)
        if any(o.slots & t.slots for o in options for t in taken):
            taken = [t for t in taken if not any(o.slots & t.slots for o in options)]
            before = bench.trial(taken).estimate.peak
        taken = [*taken, *options]
        now = bench.trial(taken).estimate.peak
        ratios = [now.reserved_bytes / before.reserved_bytes, now.allocated_bytes / before.allocated_bytes]
        measured = rung.with_gib / rung.before_gib
        yield (
            f"{rung.name:26} {now.reserved_bytes / 2**30:6.1f} GiB reserved, {now.allocated_bytes / 2**30:6.1f} allocated; "
            f"of the rung before {ratios[0]:.3f}, {ratios[1]:.3f}; measured {measured:.3f} "
            f"({ratios[0] / measured - 1:+.1%}, {ratios[1] / measured - 1:+.1%}){f'  [{rung.differs}]' if rung.differs else ''}"
        )
        before = now


def _options(bench: StoredBench, name: str) -> Sequence[Option]:
    tape = bench.trial(()).tape
    options = list(techniques()[name].options(tape, bench.card))
    if name == "checkpointing":
        return outermost_repeated(options)
    wanted = {"num_chunks": 8, "kernel": "fused", "bits": 8}
    return [max(options, key=lambda o: sum(o.settings.get(key) == value for key, value in wanted.items()))]

"""Predicted against measured speed of sharded training: `python -m benchmarks.shard`.

The 115 runs of MPT that llm-foundry publishes (125M to 70B, 1 to 512 A100 and H100), each predicted from one trace of two layers of its model: tokens per second, whether it is said to fit, and the
order of any two runs of a model on the same cards. Four sizes were used to fit the factors of `tightfit.layouts.part_seconds`; the other five are reported apart. Then
the scale of the search: Llama 405B on 512 H100, with its time and memory.
"""

import csv
import dataclasses
import itertools
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.fit import capture
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_plan import PricedLayout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model_parts import ModelPart, ModelParts, Rows, model_parts
from tightfit.tape import Tape

ROWS = Path(__file__).parents[2] / "shared/data/mpt/throughput.csv"
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and layers."""
FITTED = frozenset({"350m", "1b", "7b", "30b"})
CARDS = {"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
_WORKLOAD = "benchmarks/workloads/plain_decoders.py"
Row = Mapping[str, str]


def traced(function: str, **parameters: int) -> Tape:
    """The tape of two layers of a plain decoder."""
    given = tuple(f"{name}={value}" for name, value in parameters.items())
    return capture(f"{_WORKLOAD}:{function}", device="h100", parameters=given, tracing=TraceSettings(steps=2))


def with_layers(tape: Tape, device: Device, number: int) -> ModelParts:
    """The parts of the model with all its layers, traced in bfloat16, as FSDP's mixed precision trains it: weights, gradients and states stored in float32."""
    found = model_parts(Profile(tape.of_steps(), device))
    assert len(found.blocks) == 1, "the two layers are alike"
    return dataclasses.replace(
        found,
        order=(0,) * number,
        stored_per_parameter=2.0,
        gathered_per_parameter=0.5,
        gradients_per_parameter=1.0,
        states_per_parameter=2.0,
        # PURE: gradients are reduced in bfloat16.
        reduced_per_gathered=1.0,
        optimizer_seconds=found.optimizer_seconds / 2 * number,
    )


def of_length(model: ModelParts, length: int) -> ModelParts:
    """The same tokens in sequences of another length: attention takes more FLOPs in proportion, all else is the same."""
    longer = length / model.batch.sequence_length

    def rows(of: Rows) -> Rows:
        flops = np.where(of.is_attention, of.operators.flops * longer, of.operators.flops)
        return dataclasses.replace(of, operators=dataclasses.replace(of.operators, flops=flops))

    def part(of: ModelPart) -> ModelPart:
        return dataclasses.replace(of, forward=rows(of.forward), backward=rows(of.backward))

    return dataclasses.replace(
        model,
        before=part(model.before),
        blocks=tuple(map(part, model.blocks)),
        after=part(model.after),
        # Not whole where a sequence is longer than the traced batch.
        batch=dataclasses.replace(model.batch, sequence_length=length, num_examples=model.batch.num_tokens / length),
    )


def predicted(row: Row, tapes: Mapping[str, Tape]) -> PricedLayout:
    """The layout of a row, priced."""
    device, num_gpus = find(CARDS[row["gpu"]]), int(row["num_gpus"])
    model = of_length(with_layers(tapes[row["model"]], device, SIZES[row["model"]][2]), int(row["seq_len"]))
    is_recomputed = row["checkpointing"] == "True"
    layout = Layout(
        dp=num_gpus,
        sharded_over=num_gpus,
        zero_stage=3 if row["sharding"] == "FULL_SHARD" else 2,
        micro_batch=int(row["micro_batch"]),
        accumulation=int(row["grad_accum"]),
        recompute="full" if is_recomputed else "none",
        num_recomputed=len(model.order) if is_recomputed else 0,
    )
    search = LayoutSearch(model, device, node_of(device), budget_bytes=device.capacity_bytes)
    return search.priced_layout(layout)


def _ordered_right(rows: list[Row], rates: list[float]) -> tuple[int, int]:
    """How many pairs of runs of one model on the same cards are in the measured order, and how many pairs differ at all."""
    right = total = 0
    for (a, rate_a), (b, rate_b) in itertools.combinations(zip(rows, rates, strict=True), 2):
        measured = float(a["tokens_per_second_per_gpu"]) - float(b["tokens_per_second_per_gpu"])
        if (a["model"], a["gpu"], a["num_gpus"]) == (b["model"], b["gpu"], b["num_gpus"]) and measured:
            total += 1
            right += (rate_a - rate_b) * measured > 0
    return right, total


def mpt() -> None:
    """Prints the comparison with the runs of MPT."""
    with ROWS.open(encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    tapes = {name: traced("mpt", width=width, heads=heads) for name, (width, heads, _) in SIZES.items()}
    found = [predicted(row, tapes) for row in rows]
    rates = [
        int(row["global_batch"]) * int(row["seq_len"]) / int(row["num_gpus"]) / f.seconds.total
        for row, f in zip(rows, found, strict=True)
    ]
    errors = np.array(
        [rate / float(row["tokens_per_second_per_gpu"]) - 1 for row, rate in zip(rows, rates, strict=True)]
    )
    is_fitted = np.array([row["model"] in FITTED for row in rows])
    for name, chosen in (("all", is_fitted | True), ("fitted sizes", is_fitted), ("held out", ~is_fitted)):
        off = np.abs(errors[chosen])
        print(
            f"{name:13} {chosen.sum():4} runs: tokens/s off by {np.median(off):.1%} (median), {np.quantile(off, 0.9):.1%} (P90), {off.max():.1%} (worst)"
        )
    print(f"said to fit: {sum(f.fits for f in found)} of {len(rows)}")
    right, total = _ordered_right(rows, rates)
    print(f"order of two runs of a model on the same cards: {right} of {total} right ({right / total:.1%})")
    print("worst:")
    for at in np.argsort(-np.abs(errors))[:10].tolist():
        row = rows[at]
        print(
            f"  {row['gpu']:10} x{row['num_gpus']:4} {row['model']:5} length {row['seq_len']:6} {row['precision']:9} {errors[at]:+.1%}"
        )


def scale() -> None:
    """Prints how long the search takes for a large model."""
    started = time.monotonic()
    device = find("h100")
    tape = traced("llama", width=16384, heads=128, kv_heads=8, hidden=53248)
    model = with_layers(tape, device, 126)
    search = LayoutSearch(model, device, node_of(device), budget_bytes=device.capacity_bytes)
    for num_gpus in (128, 512, 4096):
        begun = time.monotonic()
        plan = search.run(num_gpus, 2048)
        best = plan.best
        speed = "nothing fits" if best is None else f"{best.layout}, {plan.rate(best) / num_gpus:.0f} tokens/s a card"
        print(f"405B on {num_gpus} H100: {time.monotonic() - begun:.1f} s, {plan.num_priced:,} layouts so far: {speed}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"altogether {time.monotonic() - started:.1f} s, {peak:.2f} GiB of host memory")


def main() -> None:
    """Prints all of it."""
    if ROWS.is_file():
        mpt()
    else:
        print(f"no {ROWS}: nothing to compare with", file=sys.stderr)
    scale()


if __name__ == "__main__":
    main()

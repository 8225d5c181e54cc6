"""llm-foundry's 115 runs of MPT (125M to 70B, 1 to 512 A100 and H100), each predicted from one trace of two layers of its model.

Tokens per second, whether it is said to fit, and the order of any two runs of a model on the same cards. Most of these runs had another attention kernel than torch has, the
Triton kernel of the first FlashAttention (submit_benchmarks.py, `--attn_impl`), whose factor was fitted on four sizes; the other five are reported apart.
"""

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.shard.decoders import of_length, traced, with_layers, with_slower_attention
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.layouts.answers.layout_plan import PricedLayout
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.tape import Tape

SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and layers."""
FITTED = frozenset({"350m", "1b", "7b", "30b"})
CARDS = {"h100_80gb": "h100", "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
_OF_TRITON = 1.86
"""FlashAttention-2, which torch has, is 1.3 to 2.5 times as fast as it (Dao 2023, section 4.1)."""
Row = Mapping[str, str]


def predicted(row: Row, tapes: Mapping[str, Tape]) -> PricedLayout:
    """The layout of a row, priced."""
    device, num_gpus = find(CARDS[row["gpu"]]), int(row["num_gpus"])
    model = of_length(
        with_layers(tapes[row["model"]], device, SIZES[row["model"]][2], reduced_in_float32=False), int(row["seq_len"])
    )
    model = with_slower_attention(model, _OF_TRITON)
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


def compare(data: Path) -> None:
    """Prints the comparison."""
    with (data / "mpt" / "throughput.csv").open(encoding="utf-8") as file:
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
    for at in np.argsort(-np.abs(errors))[:5].tolist():
        row = rows[at]
        print(
            f"  {row['gpu']:10} x{row['num_gpus']:4} {row['model']:5} length {row['seq_len']:6} {row['precision']:9} {errors[at]:+.1%}"
        )

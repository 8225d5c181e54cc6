"""torchtitan's published runs of Llama in bfloat16 (8 to 256 A100 and H100): tokens per second, reserved memory where it was published, and what fits.

Runs in float8 are left out: nothing here prices it. `compile` fuses kernels and `asyncTP` hides collectives, which is not predicted either; those rows are reported apart.
A selective recomputation without a number is torchtitan's `op`: every second matrix product is run again.
"""

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.shard.decoders import of_length, traced, with_layers
from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.layouts.answers.layout_plan import PricedLayout
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.tape import Tape

_8B = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
_70B = {"width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672}
_13B = {"width": 5120, "heads": 40, "kv_heads": 40, "hidden": 13824}
_OLD = {"vocabulary": 32000}
LLAMAS: Mapping[str, tuple[dict[str, int], int]] = {
    "Llama3-8B": (_8B, 32), "Llama3.1-8B": (_8B, 32), "Llama3-70B": (_70B, 80), "Llama3.1-70B": (_70B, 80),
    "Llama2-13B": (_13B | _OLD, 40), "Llama2-70B": (_70B | _OLD, 80),
    "Llama3.1-405B": ({"width": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248}, 126),
}  # fmt: skip
"""Sizes and layers (Llama 2 and Llama 3 model cards)."""
_GIB = 2**30
# Its scripts start torchrun so (run_llama_train.sh, run_train.sh).
_ALLOCATOR = AllocatorSettings.parse("expandable_segments:True")
Row = Mapping[str, str]


class Llamas:
    """Llamas by name, each traced once."""

    def __init__(self) -> None:
        self._tapes: dict[str, Tape] = {}

    def parts(self, name: str, device: Device, length: int, *, is_fused: bool = True) -> ModelParts:
        """The model with sequences of `length`, as FSDP's mixed precision trains it, gradients reduced in float32; `is_fused`: norms are one kernel."""
        sizes, layers = LLAMAS[name]
        sizes = sizes if is_fused else sizes | {"fused": 0}
        if repr(sizes) not in self._tapes:
            self._tapes[repr(sizes)] = traced("llama", **sizes)
        model = with_layers(self._tapes[repr(sizes)], device, layers, reduced_in_float32=True, settings=_ALLOCATOR)
        return of_length(model, length)


def card_of(row: Row) -> Device:
    """The card of a row. The H100 of these runs have 96 GB of HBM2e and a limit of 500 W. Their memory is taken to be six stacks of which the H100 PCIe has five, their peak to be between
    those of the SXM and the NVL, of which torchtitan's page says that it is."""
    found = find("H100" if "H100" in row["gpu"] else "A100-80GB")
    if "96GB" not in row["gpu"]:
        return found
    slower = find("H100 NVL").flops
    return dataclasses.replace(
        found,
        capacity_bytes=95 * _GIB,
        dram_bytes_per_second=6 / 5 * find("H100 PCIe").dram_bytes_per_second,
        flops={dtype: (peak + slower[dtype]) / 2 for dtype, peak in found.flops.items()},
    )


def has_fused_norms(row: Row) -> bool:
    """Whether norms were one kernel: the runs of 2024 on A100 had `norm_type = "fused_rmsnorm"` (train_configs), later ones torch's, which was several kernels until 2.8 unless it was compiled."""
    return "A100" in row["gpu"] or row["compile"] == "1"


def layout_of(row: Row, layers: int) -> Layout:
    """The layout of a row without a pipeline."""
    ranks, tp = int(row["n_gpu"]), int(row["tp"])
    name = row["ac"]
    kind = "none" if name == "none" else "full" if name == "full" or "layer" in name else "alternate"
    return Layout(
        dp=ranks // tp,
        tp=tp,
        sharded_over=ranks // tp,
        micro_batch=int(row["local_batch"]),
        recompute=kind,
        num_recomputed={"none": 0}.get(name, layers // 2 if "layer" in name else layers),
    )


def compare(data: Path) -> None:
    """Prints the comparison."""
    with (data / "published" / "torchtitan.csv").open(encoding="utf-8") as file:
        rows: list[Row] = [row for row in csv.DictReader(file) if row["precision"] == "bf16"]
    llamas = Llamas()
    errors: dict[str, list[float]] = {}
    for row in rows:
        device = card_of(row)
        model = llamas.parts(row["model"], device, int(row["seq"]), is_fused=has_fused_norms(row))
        search = LayoutSearch(model, device, node_of(device), budget_bytes=device.capacity_bytes)
        found = search.priced_layout(layout_of(row, len(model.order)))
        _print_row(row, found, errors)
    for name, of in errors.items():
        off = np.abs(of)
        print(f"{name}: {len(of)} runs, off by {np.median(off):.1%} (median), {off.max():.1%} (worst)")


def _print_row(row: Row, found: PricedLayout, errors: dict[str, list[float]]) -> None:
    is_fused = row["compile"] == "1" or "async" in row["parallel"]
    rate = int(row["local_batch"]) * int(row["seq"]) / int(row["tp"]) / found.seconds.total
    # It logs what torch has reserved, in which neither the context nor NCCL's buffers are.
    classes = found.worst.by_class
    peak = (found.worst.total_bytes - classes["context"] - classes["nccl"]) / _GIB
    if row["peak_mem_GiB"] == "OOM":
        shown = f"measured: out of memory, predicted {peak:.1f} GiB, {'fits' if found.fits else 'does not fit'}"
    else:
        error = rate / float(row["tokens_per_s_per_gpu"]) - 1
        errors.setdefault("tokens/s, compiled or asyncTP" if is_fused else "tokens/s, eager", []).append(error)
        shown = f"tokens/s {row['tokens_per_s_per_gpu']}, predicted {rate:.0f} ({error:+.1%})"
        if row["peak_mem_GiB"]:
            error = peak / float(row["peak_mem_GiB"]) - 1
            errors.setdefault("memory, compiled" if is_fused else "memory, eager", []).append(error)
            shown += f"; GiB {row['peak_mem_GiB']}, predicted {peak:.1f} ({error:+.1%})"
        shown += "" if found.fits else "; said not to fit"
    print(
        f"  {row['model']:14} {row['gpu'][:4]} x{row['n_gpu']:4} {row['parallel']:18} {row['ac'][:16]:16} {'compiled' if row['compile'] == '1' else '':9} {shown}"
    )

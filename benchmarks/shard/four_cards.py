"""Published float32 training steps on four cards (data, tensor and pipeline parallelism by Megatron-LM), beside NeuSight's predictions of the same rows.

Megatron as it was measured differs from the layouts that are planned here: its data parallelism reduces gradients after the backward pass, which is added, and its
tensor parallelism does not divide norms, dropout and residual sums, so that they are taken whole (operators of a block that write as much as the block is given). Its
pipeline runs one micro-batch.
"""

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.cost.collectives import Group, collective_seconds
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.devices.nodes import node_of
from tightfit.fit import capture
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import ModelParts, model_parts
from tightfit.tape import Tape

_WORKLOAD = "benchmarks/workloads/published_seconds.py:transformer"
_NUM_CARDS = 4
Row = Mapping[str, str]


def compare(data: Path) -> None:
    """Prints the comparison."""
    with (data / "model_times" / "neusight_given.csv").open(encoding="utf-8") as file:
        rows: list[Row] = [row for row in csv.DictReader(file) if row["layout"]]
    tapes: dict[str, Tape] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        kind, measured = row["layout"][:2], float(row["step_ms"]) / 1e3
        seconds = _predicted(row, kind, _tape(row, tapes))
        pair = (seconds / measured - 1, float(row["neusight_ms"]) / 1e3 / measured - 1)
        errors.setdefault(kind, []).append(pair)
        print(
            f"  {row['device'][:24]:24} {row['model']:11} batch {row['batch']:3} {kind}4: {measured:.3f} s, predicted {seconds:.3f} ({pair[0]:+.1%}; NeuSight {pair[1]:+.1%})"
        )
    for kind, pairs in errors.items():
        off = np.abs(pairs)
        print(
            f"{kind}4: {len(pairs)} rows, off by {np.median(off[:, 0]):.1%} (median), {off[:, 0].max():.1%} (worst); NeuSight {np.median(off[:, 1]):.1%}, {off[:, 1].max():.1%}"
        )


def _tape(row: Row, tapes: dict[str, Tape]) -> Tape:
    given = (f"model={row['model']}", "mode=train", f"sequence={row['sequence']}", f"batch={row['batch']}")
    if repr(given) not in tapes:
        tapes[repr(given)] = capture(_WORKLOAD, device="H200", parameters=given, tracing=TraceSettings(steps=2))
    return tapes[repr(given)]


def _predicted(row: Row, kind: str, tape: Tape) -> float:
    device = find("H100" if "H100" in row["device"] else "A100-40GB")
    batch, node = int(row["batch"]), node_of(device)
    model = model_parts(Profile(tape.of_steps(), device))
    # Attention that is not fused does not tell the length of a sequence.
    known = dataclasses.replace(model.batch, num_examples=batch, sequence_length=int(row["sequence"]))
    model = dataclasses.replace(model, batch=known, optimizer_seconds=0.0)
    layout = {
        "dp": Layout(dp=_NUM_CARDS, zero_stage=0, micro_batch=batch // _NUM_CARDS),
        "tp": Layout(tp=_NUM_CARDS, zero_stage=0, micro_batch=batch),
        "pp": Layout(pp=_NUM_CARDS, zero_stage=0, micro_batch=batch, schedule="gpipe"),
    }[kind]
    found = LayoutSearch(model, device, node, budget_bytes=device.capacity_bytes).priced_layout(layout).seconds
    if kind == "dp":
        return found.compute + _reduction(model, node)
    return found.total + (_repeated(model, device) if kind == "tp" else 0.0)


def _repeated(model: ModelParts, device: Device) -> float:
    """Seconds of what tensor parallelism without sequence parallelism runs whole on each rank, less the share of it that is in the layout's; at the memory's bandwidth."""
    num_bytes = 0
    for part, count in zip(model.blocks, map(model.order.count, range(len(model.blocks))), strict=True):
        for rows in (part.forward, part.backward):
            chosen = ~rows.is_product & (rows.operators.bytes_written == part.input_bytes)
            moved = rows.operators.bytes_read + rows.operators.bytes_written
            num_bytes += count * int(moved[chosen].sum())
    return num_bytes / device.dram_bytes_per_second * (1 - 1 / _NUM_CARDS)


def _reduction(model: ModelParts, node: Node) -> float:
    group = Group.of(_NUM_CARDS, stride=1, num_linked=node.num_linked)
    return collective_seconds("all_reduce", model.parameter_bytes, group, node)

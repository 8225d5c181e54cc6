"""Layouts to export, and what the parsers of the tools that they are exported to accept."""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tightfit.layouts.exports.export_tools import TOOLS
from tightfit.layouts.exports.layout_run import LayoutRun, num_nodes_of
from tightfit.layouts.layout import Layout
from tightfit.layouts.stages import stage_sizes

ACCEPTED = tomllib.loads(Path(__file__).with_name("accepted_options.toml").read_text())
BLOCKS = 30
MIXED: Any = SimpleNamespace(stored_dtype="float32", computed_dtype="bfloat16")
TYPES = {"int": int, "str": str, "bool": bool, "list": list, "dict": dict}


def run_of(layout: Layout, **given: Any) -> LayoutRun:
    num_nodes = num_nodes_of(layout.num_gpus, 8, max(1, layout.num_gpus // 8))
    fields = {
        "layout": layout,
        "num_nodes": num_nodes,
        "gpus_per_node": layout.num_gpus // num_nodes,
        "examples": layout.dp * layout.micro_batch * layout.accumulation,
        "sequence_length": 8192,
        "stage_blocks": stage_sizes(BLOCKS, layout.pp * layout.stages_per_rank),
        "block_classes": ("Block",),
        "stored_dtype": "float32",
        "computed_dtype": "bfloat16",
        "command": ("train.py", "--lr", "1e-3"),
    }
    return LayoutRun(**{**fields, **given})


def layouts(name: str) -> Iterator[Layout]:
    """Layouts that a tool does not refuse, plain and with each kind of recomputation."""
    tool = TOOLS[name]
    for dp, tp, pp, cp in itertools.product((1, 8), (1, 2), (1, 4), (1, 2)):
        schedules: list[tuple[Any, int]] = [("1f1b", 1), ("interleaved", 2)] if pp > 1 else [("none", 1)]
        for (schedule, stages), (zero, over) in itertools.product(
            schedules, {(0, 1), (1, dp * cp), (2, dp * cp), (3, dp * cp), (3, max(1, dp * cp // 2))}
        ):
            layout = Layout(
                dp=dp, tp=tp, pp=pp, cp=cp, zero_stage=zero, sharded_over=over, micro_batch=2, accumulation=8,
                schedule=schedule, stages_per_rank=stages,
            )  # fmt: skip
            if tool.refusal(layout, MIXED):
                continue
            yield layout
            for kind in ("selective", "alternate", "full"):
                counts = tool.recomputed(kind, layout, -(-BLOCKS // pp))
                assert list(counts) == sorted(set(counts))
                yield from (
                    dataclasses.replace(layout, recompute=kind, num_recomputed=n) for n in {*counts[:1], *counts[-1:]}
                )


def accepts(expected: Any, value: Any) -> bool:
    return value in expected if isinstance(expected, list) else type(value) is TYPES[expected]

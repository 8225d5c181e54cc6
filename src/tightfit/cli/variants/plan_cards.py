"""`tightfit plan --gpus`: a program of one card spread over many, and the layout as a file for the tool that runs it."""

import dataclasses
import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Any

from cyclopts import Group, Parameter

from tightfit.cli.arguments.sizes import Size, budget_on
from tightfit.cli.shared.progress import ProgressLine
from tightfit.errors import UsageError
from tightfit.output_files import write_text


@Parameter(name="*", group=Group("Many cards", sort_key=0))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """How many cards a program of one card is to be spread over.

    Parameters
    ----------
    gpus
        Find the fastest layout over this many GPUs of the same kind (data, tensor, pipeline and context parallelism, sharding, micro-batches, recomputation).
    nodes
        How many nodes these are in. Default: as many as their kind needs.
    node
        The kind of node by name (DGX H100, p4d.24xlarge) or its TOML file. Default: the first one with such GPUs.
    global_batch
        Examples in a step of all cards together. Default: the program's own.
    export
        Print the layout as a file for torchtitan, accelerate, deepspeed, megatron, torchrun, slurm or kubernetes, or write it with --output. Only layouts
        that this tool runs are considered.
    """

    gpus: int | None = None
    nodes: int | None = None
    node: str | None = None
    global_batch: int | None = None
    export: str | None = None


ONE_CARD = Cards()


def check_alone(is_plain: bool, cards: Cards, output: Path | None) -> None:
    """Checks that no option of a plan for one GPU is given besides (`is_plain`).

    Raises:
        UsageError: one is.
    """
    if not is_plain or (output is not None and cards.export is None):
        raise UsageError(
            "--gpus goes with --budget, --json and what is traced, and with no other option of a plan for one GPU; --output with --export"
        )


def plan_cards(
    target: str, device: str, cards: Cards, *, budget: Size | None, output: Path | None, json: bool, **traced: Any
) -> int:
    """Plans a layout and writes it; the exit code."""
    from tightfit.fit.layout_planning import plan_layout
    from tightfit.reports.text.layouts import write_export, write_layout

    started = time.monotonic()
    if cards.gpus is None:
        raise UsageError("--nodes, --node, --global-batch and --export go with --gpus, the number of all GPUs")
    tracing = traced["tracing"]
    with ProgressLine(f"plan {target}", timeout_seconds=tracing.timeout, is_rewritten=not tracing.show_output) as line:
        found = plan_layout(
            target,
            device,
            budget=None if budget is None else budget_on(budget, device),
            on_progress=line.report,
            gpus=cards.gpus,
            nodes=cards.nodes,
            node=cards.node,
            global_batch=cards.global_batch,
            export=cards.export,
            **traced,
        )
    elapsed_seconds = time.monotonic() - started
    try:
        if output is not None and found.exports:
            write_text(output, found.exports[0].text)
    finally:
        # Also where the file could not be written: the layout has been found by now.
        if json:
            answer = {"target": target, **found.to_json(), "elapsed_seconds": round(elapsed_seconds, 2)}
            sys.stdout.write(jsonlib.dumps(answer) + "\n")
        elif cards.export is not None and output is None and found.exports:
            write_export(found)
        else:
            write_layout(found, elapsed_seconds=elapsed_seconds)
    return 0 if found.fits else 1

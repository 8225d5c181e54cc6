"""`tightfit plan --gpus`: a program of one card spread over many, and the layout as a file for the tool that runs it."""

import dataclasses
import json as jsonlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group, Parameter

from tightfit.cli.arguments.counts import count_of, gpus_of
from tightfit.cli.arguments.sizes import Size, budget_on
from tightfit.cli.shared.progress import ProgressLine
from tightfit.errors import UsageError
from tightfit.output_files import write_text
from tightfit.units import parse_seconds

if TYPE_CHECKING:
    from tightfit.layouts.answers.layout_plan import LayoutPlan


@Parameter(name="*", group=Group("Many GPUs", sort_key=0))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """How many cards a program of one card is to be spread over.

    Parameters
    ----------
    gpus
        Find the fastest layout over this many GPUs of the same kind (data, tensor, pipeline and context parallelism, sharding, micro-batches, recomputation), or over several numbers of them: 8..512 (doubled each time) or 8,24,64.
    nodes
        How many nodes these are in. Default: as many as their kind needs.
    node
        The kind of node by name (DGX H100, p4d.24xlarge) or its TOML file. Default: the first one with such GPUs.
    global_batch
        Examples in a step of all cards together. Default: the program's own.
    export
        Print the layout as a file for torchtitan, accelerate, deepspeed, megatron, torchrun, slurm, kubernetes or tightfit (tightfit run --gpus --plan), or write it with --output. Only layouts that this tool runs are considered.
    price
        What a GPU costs in an hour (2.5), or a TOML file with the prices of nodes or GPUs; the answer has the tokens for the money.
    total
        Tokens of the whole training (examples where the program has none), such as 300B; the answer has its days, and its cost with --price.
    deadline
        When the whole training has to be done, such as 7d or 36h; the answer has the fewest GPUs that do it. Exit code 1 if none do.
    """

    gpus: str | None = None
    nodes: int | None = None
    node: str | None = None
    global_batch: int | None = None
    export: str | None = None
    price: str | None = None
    total: str | None = None
    deadline: str | None = None


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
    from tightfit.fit.layout_planning import plan_layouts
    from tightfit.reports.text.layout_curves import write_curve

    started = time.monotonic()
    if cards.gpus is None:
        raise UsageError(
            "--nodes, --node, --global-batch, --export, --price, --total and --deadline go with --gpus, the number of all GPUs"
        )
    gpus = gpus_of(cards.gpus)
    if len(gpus) > 1 and (cards.nodes is not None or cards.export is not None):
        raise UsageError("--nodes and --export go with one number of GPUs: --gpus 64, not several")
    tracing = traced["tracing"]
    with ProgressLine(f"plan {target}", timeout_seconds=tracing.timeout, is_rewritten=not tracing.show_output) as line:
        curve = plan_layouts(
            target,
            device,
            budget=None if budget is None else budget_on(budget, device),
            on_progress=line.report,
            gpus=gpus,
            nodes=cards.nodes,
            node=cards.node,
            global_batch=cards.global_batch,
            export=cards.export,
            price=cards.price,
            total=None if cards.total is None else count_of("--total", cards.total),
            deadline_seconds=None if cards.deadline is None else _deadline_of(cards.deadline),
            **traced,
        )
    elapsed_seconds = time.monotonic() - started
    if len(gpus) == 1:
        _deliver(curve.points[0], target, cards, output, json=json, elapsed_seconds=elapsed_seconds)
    elif json:
        _write_json(target, curve.to_json(), elapsed_seconds)
    else:
        write_curve(curve, elapsed_seconds=elapsed_seconds)
    return 0 if curve.is_met else 1


def _deadline_of(text: str) -> float:
    try:
        return parse_seconds(text)
    except UsageError:
        raise UsageError(f"--deadline {text}: give a time with its unit, such as 7d or 36h") from None


def _deliver(
    found: "LayoutPlan", target: str, cards: Cards, output: Path | None, *, json: bool, elapsed_seconds: float
) -> None:
    from tightfit.reports.text.layouts import write_export, write_layout

    try:
        if output is not None and found.exports:
            write_text(output, found.exports[0].text)
    finally:
        # Also where the file could not be written: the layout has been found by now.
        if json:
            _write_json(target, found.to_json(), elapsed_seconds)
        elif cards.export is not None and output is None and found.exports:
            write_export(found)
        else:
            write_layout(found, elapsed_seconds=elapsed_seconds)


def _write_json(target: str, answer: dict[str, Any], elapsed_seconds: float) -> None:
    sys.stdout.write(jsonlib.dumps({"target": target, **answer, "elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")

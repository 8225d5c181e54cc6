"""`plan --gpus`: the wiring from a workload of one card to the layout of a run on many."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import AS_USUAL, TraceSettings
from tightfit.devices.nodes import node_of
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit import capture
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning_progress import OnProgress
from tightfit.layouts.layout_plan import LayoutPlan
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model_parts import ModelParts, model_parts
from tightfit.tape import Phase, Tape


@answering("the planner of layouts")
def plan_layout(
    target: str | Tape,
    device: str,
    *,
    gpus: int,
    nodes: int | None = None,
    node: str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    budget: str | int | None = None,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    tracing: TraceSettings = AS_USUAL,
    on_progress: OnProgress | None = None,
) -> LayoutPlan:
    """The fastest layout of `target`, a program for one card, over `gpus` cards, traced once on a virtual GPU whose size does not matter.

    `global_batch` is the number of examples in a step of all cards, by default the program's own. `node` names a kind of node or its TOML file.

    Raises:
        UsageError: numbers that do not go together, or a batch that the trace does not show and `global_batch` does not give.
        CaptureError: the workload could not be traced.
    """
    on = CardSettings.of(device)
    kind = node_of(on.card, node)
    if gpus < 1 or (nodes is not None and nodes < 1):
        raise UsageError("--gpus and --nodes have to be at least 1")
    if global_batch is not None and global_batch < 1:
        raise UsageError(f"--global-batch {global_batch}: give the examples in a step of all cards, at least 1")
    if nodes is not None:
        if gpus % nodes:
            raise UsageError(f"--gpus {gpus} is not divisible by --nodes {nodes}")
        if gpus // nodes > kind.num_gpus:
            raise UsageError(
                f"--gpus {gpus} on --nodes {nodes} are {gpus // nodes} a node, and {kind.name} has {kind.num_gpus}"
            )
        kind = dataclasses.replace(
            kind,
            num_gpus=gpus // nodes,
            # A domain of several nodes stays; one node's is what is used of it.
            num_linked=kind.num_linked if kind.num_linked > kind.num_gpus else gpus // nodes,
        )
    tape = target if isinstance(target, Tape) else capture(
        target, device=device, arguments=arguments, parameters=parameters, options=options, tracing=tracing, on_progress=on_progress
    )  # fmt: skip
    if not (tape.operators.phase == Phase.BACKWARD).any():
        raise UsageError("the traced steps have no backward pass: layouts are planned for training")
    model = model_parts(Profile(tape.of_steps(), on.card))
    is_seen = model.batch.num_examples > 0
    model, examples = _with_batch(model, global_batch)
    found = LayoutSearch(model, on.card, kind, budget_bytes=min(on.budget_bytes(budget), on.card.capacity_bytes)).run(
        gpus, examples
    )
    return dataclasses.replace(found, assumptions=_assumptions(model, kind.name, is_seen=is_seen))


def _with_batch(model: ModelParts, global_batch: int | None) -> tuple[ModelParts, int]:
    """The model, and the examples of a step; one whose batch is not seen is taken to be given by `global_batch`, all of it in the traced step."""
    if model.batch.num_examples:
        return model, global_batch or model.batch.num_examples * model.num_rounds
    if global_batch is None:
        raise UsageError(
            "the trace does not show how many examples a step has: give --global-batch, the program's own batch"
        )
    each = max(1, global_batch // model.num_rounds)
    return dataclasses.replace(model, batch=dataclasses.replace(model.batch, num_examples=each)), global_batch


def _assumptions(model: ModelParts, node: str, *, is_seen: bool) -> tuple[str, ...]:
    found = [
        f"nodes are {node}: another one by --node",
        "seconds are estimates; memory is computed from one trace, not verified by traces of ranks",
    ]
    if not is_seen:
        found.append(
            f"one traced forward pass has {model.batch.num_examples} examples, as --global-batch says: the trace does not show it"
        )
    if model.order:
        found.append(
            "tensor parallelism divides every block: its degree has to divide the heads and the key-value heads"
        )
    else:
        found.append("no list of blocks was found: neither tensor nor pipeline parallelism is considered")
    return tuple(found)

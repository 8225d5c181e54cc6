"""`plan --gpus`: the wiring from a workload of one card to the layout of a run on many."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import AS_USUAL, TraceSettings
from tightfit.devices.node import Node
from tightfit.devices.nodes import node_of, nodes_for
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit import capture
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning_progress import OnProgress
from tightfit.layouts.answers.layout_costs import LayoutCost, price_of
from tightfit.layouts.answers.layout_curve import LayoutCurve
from tightfit.layouts.answers.layout_plan import LayoutPlan, PricedLayout
from tightfit.layouts.exports.export_tools import tool_named
from tightfit.layouts.exports.layout_run import LayoutRun, num_nodes_of
from tightfit.layouts.exports.tool import AbstractTool, joint_optimizers
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.blocks_at_host import BlocksAtHost
from tightfit.layouts.model.heads_of_tape import heads_words
from tightfit.layouts.model.model_parts import ModelParts, model_parts
from tightfit.layouts.stages import stage_sizes
from tightfit.layouts.traced_step import with_traced_step
from tightfit.simulate.throughput import counts_of_step
from tightfit.tape import Phase, Tape
from tightfit.techniques.offload.trained_weight_streaming import TrainedWeightStreaming


@answering("the planner of layouts")
def plan_layouts(
    target: str | Tape,
    device: str,
    *,
    gpus: Sequence[int],
    nodes: int | None = None,
    node: str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    budget: str | int | None = None,
    price: str | None = None,
    total: float | None = None,
    deadline_seconds: float | None = None,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    tracing: TraceSettings = AS_USUAL,
    on_progress: OnProgress | None = None,
    export: str | None = None,
) -> LayoutCurve:
    """The fastest layout of `target`, a program for one card, over each number of cards in `gpus`, from one trace on a virtual GPU whose size does not matter.

    `global_batch` is the number of examples in a step of all cards, by default the program's own. `node` names a kind of node or its TOML file.
    `export` names a tool (`tightfit.layouts.exports.export_tools`): only layouts that it runs are considered, and the plans have its file.
    `price` is a number per GPU and hour, or a TOML file (`tightfit.layouts.answers.layout_costs`), `total` the tokens of the whole training (examples where the program
    has no tokens), to be done in `deadline_seconds`.

    Raises:
        UsageError: numbers that do not go together, a batch that the trace does not show and `global_batch` does not give, or a price or a deadline that cannot be.
        CaptureError: the workload could not be traced.
    """
    tool = None if export is None else tool_named(export)
    on = CardSettings.of(device)
    kinds = [_kind_of(on, node, number, nodes) for number in gpus]
    if global_batch is not None and global_batch < 1:
        raise UsageError(f"--global-batch {global_batch}: give the examples in a step of all cards, at least 1")
    if deadline_seconds is not None and total is None:
        raise UsageError("--deadline goes with --total, the tokens of the whole training")
    priced = None if price is None else price_of(price, node_of(on.card, node), on.card.name)
    tape = target if isinstance(target, Tape) else capture(
        target, device=device, arguments=arguments, parameters=parameters, options=options, tracing=tracing, on_progress=on_progress
    )  # fmt: skip
    model, examples, assumed = _traced_model(tape, on, global_batch)
    budget_bytes = min(on.budget_bytes(budget), on.card.capacity_bytes)
    points = []
    for number, kind in zip(gpus, kinds, strict=True):
        search = LayoutSearch(model, on.card, kind, budget_bytes=budget_bytes, tool=tool)
        found = search.run(number, examples)
        found = dataclasses.replace(found, assumptions=_assumptions(search.model, kind.name, tool, assumed))
        if tool is not None and found.best is not None:
            run = _run_of(found, found.best, search.model, _command(target, arguments))
            found = dataclasses.replace(found, exports=(tool.export(run),))
        if found.best is not None and (priced is not None or total is not None):
            cost = LayoutCost(
                rate=found.rate(found.best),
                price_per_hour=None if priced is None else priced.per_hour(kind, number),
                total=total,
                deadline_seconds=deadline_seconds,
            )
            found = dataclasses.replace(found, cost=cost)
        points.append(found)
    return LayoutCurve(points=tuple(points))


def _kind_of(on: CardSettings, node: str | os.PathLike[str] | None, gpus: int, nodes: int | None) -> Node:
    """The kind of the nodes that so many cards are in."""
    kind = node_of(on.card, node)
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: give the number of GPUs of all nodes together, 1 or more")
    if nodes is None:
        return kind
    nodes_for(kind, gpus, nodes)
    each = gpus // nodes
    # A domain of several nodes stays; one node's is what is used of it.
    return dataclasses.replace(kind, num_gpus=each, num_linked=kind.num_linked if kind.num_linked > each else each)


def _traced_model(tape: Tape, on: CardSettings, global_batch: int | None) -> tuple[ModelParts, int, str]:
    """The model, the examples of a step, and what was assumed of those of the traced one, empty where the trace shows them."""
    if not (tape.operators.phase == Phase.BACKWARD).any():
        raise UsageError("the traced steps have no backward pass: layouts are planned for training")
    profile = Profile(tape.of_steps(), on.card)
    model = _with_blocks_at_host(model_parts(profile), profile)
    is_seen, is_given = model.batch.num_examples > 0, global_batch is not None
    if not (is_seen or is_given):
        # The samples of its throughput, of which a second is as good as any other: images, rows of a table.
        global_batch = counts_of_step(tape.of_steps(), on.card, 1.0).num_samples
    model, examples = _with_batch(model, global_batch)
    why = (
        "as --global-batch says: the trace does not show it"
        if is_given
        else "the images that its loss is of: another number by --global-batch"
    )
    assumed = "" if is_seen else f"one traced forward pass has {model.batch.num_examples} examples, {why}"
    return with_traced_step(model, tape, on.card, on.settings, on.calibration), examples, assumed


def _with_blocks_at_host(model: ModelParts, profile: Profile) -> ModelParts:
    """The model with the blocks that a layout may stream: all that the technique of one card would."""
    option = next(iter(TrainedWeightStreaming().options(profile)), None)
    if option is None or not model.order:
        return model
    blocks = [model.blocks[i] for i in model.order]
    found = BlocksAtHost(
        where=option.where,
        settings=option.settings,
        weight_bytes=option.settings["host_bytes"] // 2,
        block_bytes=sum(block.parameter_bytes for block in blocks),
        trained_bytes=sum(block.trained_bytes for block in blocks),
        largest_bytes=max(block.parameter_bytes for block in blocks),
    )
    return dataclasses.replace(model, at_host=found)


def _command(target: str | Tape, arguments: Sequence[str]) -> tuple[str, ...]:
    """The script with its arguments; nothing for a function or a config."""
    path = target.target if isinstance(target, Tape) else target
    return (path, *arguments) if path.endswith(".py") else ()


def _run_of(plan: LayoutPlan, best: PricedLayout, model: ModelParts, command: tuple[str, ...]) -> LayoutRun:
    layout = best.layout
    available = -(-plan.num_gpus // plan.gpus_per_node)
    num_nodes = num_nodes_of(layout.num_gpus, plan.gpus_per_node, available)
    return LayoutRun(
        layout=layout,
        num_nodes=num_nodes,
        gpus_per_node=layout.num_gpus // num_nodes,
        examples=plan.examples,
        sequence_length=plan.tokens_per_example,
        stage_blocks=stage_sizes(len(model.order), layout.pp * layout.stages_per_rank),
        block_classes=tuple(dict.fromkeys(part.class_name for part in model.blocks if part.class_name)),
        stored_dtype=model.stored_dtype,
        computed_dtype=model.computed_dtype,
        command=command,
        device=plan.device,
        recomputed=plan.recomputed,
        at_host=model.at_host,
        states_per_parameter=model.states_per_parameter,
    )


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


def _assumptions(model: ModelParts, node: str, tool: AbstractTool | None, assumed: str) -> tuple[str, ...]:
    found = [
        f"nodes are {node}: another one by --node",
        "seconds are estimates; memory is computed from one trace, not verified by traces of ranks",
    ]
    if tool is not None:
        found.append(
            f"only layouts that {tool.name} ({tool.version}) runs are considered, with what it keeps of weights and gradients"
        )
        if tool.updates_shares and (joint := joint_optimizers(model)):
            found.append(f"no layout that shards optimizer states (ZeRO-1) is considered: {joint}")
    if assumed:
        found.append(assumed)
    if model.order:
        found.append(heads_words([part.heads for part in model.blocks]))
    else:
        found.append("no list of blocks was found: neither tensor nor pipeline parallelism is considered")
    return tuple(found)

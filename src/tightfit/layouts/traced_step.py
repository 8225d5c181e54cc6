"""The traced step on one card, as an estimate has it: what a layout of one card has to say too. What of it the parts of the model do not explain is kept beside them.

A layout's arithmetic says how time and memory change with the cards; how much they are on one is in the trace. So the remainder is none by construction.
"""

import dataclasses

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.cost.roofline import is_kernel
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.layouts.rank_bytes import is_of_tokens, rank_bytes
from tightfit.layouts.seconds.part_seconds import PricedParts
from tightfit.layouts.seconds.rank_seconds import StepClock
from tightfit.layouts.stages import stages_of
from tightfit.simulate.peak import as_usable
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_steps
from tightfit.simulate.timeline_bytes import timeline_on
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Category, EventKind, Phase, Tape


def layout_of_trace(model: ModelParts) -> Layout:
    """The layout of the traced step: one card, its own micro-batches."""
    return Layout(zero_stage=0, micro_batch=model.batch.num_examples or 1, accumulation=model.num_rounds)


def with_traced_step(
    model: ModelParts,
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
) -> ModelParts:
    """`model`, whose layout of one card takes the seconds and the bytes of `tape`, the whole trace that its parts were read from."""
    model = _with_seconds(model, tape, device, calibration)
    tape = with_workspaces_of(device, tape, calibration)
    settings = settings or AllocatorSettings()
    timeline = timeline_on(as_usable(device, tape, settings, None), tape, settings)
    model = dataclasses.replace(model, workspace_bytes=_workspace_bytes(tape))
    traced = int(timeline.reserved.max(initial=0)) + device.context_bytes
    layout = layout_of_trace(model)
    (alone,) = stages_of(model, layout)
    known = rank_bytes(model, layout, alone, device, node_of(device)).total_bytes
    return dataclasses.replace(
        model, unused_bytes=float(traced - known), unused_by_tokens=is_of_tokens(model, layout, alone)
    )


def _workspace_bytes(tape: Tape) -> int:
    """What libraries have for good: cuBLAS' workspace of each stream."""
    is_freed = np.zeros(len(tape.storages), dtype=bool)
    is_freed[tape.events.storage[tape.events.kind == EventKind.FREE]] = True
    return int(tape.storages.num_bytes[(tape.storages.category == Category.WORKSPACE) & ~is_freed].sum())


def _with_seconds(model: ModelParts, tape: Tape, device: Device, calibration: Calibration | None) -> ModelParts:
    prices = priced(tape, device, calibration)
    seconds = seconds_of_steps(prices)
    if not seconds:
        return model
    begin, end = step_operators(tape)[-1]
    phase = tape.operators.phase[begin:end]
    # Clipping, counting of norms, copies of weights: kernels of a step that belong to no pass. They go over the gradients or the weights.
    is_update = (phase == Phase.OPTIMIZER) | (phase == Phase.OTHER)
    is_copy = np.zeros(len(tape.operators), dtype=bool)
    is_copy[tape.copies.operator] = True
    kernels = is_update & ~is_copy[begin:end]
    update = float(prices.seconds[begin:end][kernels].sum())
    issued = float((is_kernel(tape)[begin:end] & kernels).sum())
    model = dataclasses.replace(model, optimizer_seconds=update, optimizer_kernels=issued)
    found = StepClock(model, PricedParts(model, device), node_of(device)).step(layout_of_trace(model))
    rest = seconds[-1] - found.total
    if rest < 0 and found.compute > 0:
        # What the parts have more than once, and what runs beside them: all rounds are taken to be as the last one.
        return dataclasses.replace(model, compute_scale=max(0.0, 1.0 + rest / found.compute))
    return dataclasses.replace(model, outside_seconds=max(0.0, rest))

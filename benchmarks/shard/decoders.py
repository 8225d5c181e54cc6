"""Published decoders as parts: two layers are traced, one of them is counted as often as the model has layers."""

import dataclasses
from collections.abc import Callable

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.devices.device import Device
from tightfit.fit import capture
from tightfit.layouts.model.model_parts import ModelPart, ModelParts, Rows, model_parts
from tightfit.layouts.traced_step import with_traced_step
from tightfit.tape import Tape

_WORKLOAD = "benchmarks/workloads/plain_decoders.py"


def traced(function: str, **parameters: int) -> Tape:
    """The tape of two layers of a plain decoder."""
    given = tuple(f"{name}={value}" for name, value in parameters.items())
    return capture(f"{_WORKLOAD}:{function}", device="h100", parameters=given, tracing=TraceSettings(steps=2))


def with_layers(
    tape: Tape, device: Device, number: int, *, reduced_in_float32: bool, settings: AllocatorSettings | None = None
) -> ModelParts:
    """The parts of the model with all its layers, traced in bfloat16, as FSDP's mixed precision trains it: weights, gradients and states stored in float32."""
    found = with_traced_step(model_parts(Profile(tape.of_steps(), device)), tape, device, settings)
    assert len(found.blocks) == 1, "the two layers are alike"
    return dataclasses.replace(
        found,
        order=(0,) * number,
        paths=tuple(f"blocks.{at}" for at in range(number)),
        stored_per_parameter=2.0,
        gathered_per_parameter=0.5,
        gradients_per_parameter=1.0,
        states_per_parameter=2.0,
        reduced_per_gathered=2.0 if reduced_in_float32 else 1.0,
        optimizer_seconds=found.optimizer_seconds / 2 * number,
        optimizer_bytes=found.optimizer_bytes // 2 * number,
        # What waits for the host in a step of two layers says nothing of one of all layers.
        outside_seconds=0.0,
    )


def with_slower_attention(model: ModelParts, factor: float) -> ModelParts:
    """The model with an attention kernel that takes `factor` times as long."""

    def rows(of: Rows) -> Rows:
        flops = np.where(of.is_attention, of.operators.flops * factor, of.operators.flops)
        return dataclasses.replace(of, operators=dataclasses.replace(of.operators, flops=flops))

    return _with_rows(model, rows)


def of_length(model: ModelParts, length: int) -> ModelParts:
    """The same tokens in sequences of another length: attention takes more FLOPs in proportion, all else is the same."""
    longer = length / model.batch.sequence_length

    def rows(of: Rows) -> Rows:
        flops = np.where(of.is_attention, of.operators.flops * longer, of.operators.flops)
        sizes = of.sizes.with_longer_sequences(of.is_attention, longer)
        return dataclasses.replace(of, operators=dataclasses.replace(of.operators, flops=flops), sizes=sizes)

    return dataclasses.replace(
        _with_rows(model, rows),
        # Not whole where a sequence is longer than the traced batch.
        batch=dataclasses.replace(model.batch, sequence_length=length, num_examples=model.batch.num_tokens / length),
    )


def _with_rows(model: ModelParts, rows: Callable[[Rows], Rows]) -> ModelParts:
    def part(of: ModelPart) -> ModelPart:
        return dataclasses.replace(of, forward=rows(of.forward), backward=rows(of.backward))

    return dataclasses.replace(
        model, before=part(model.before), blocks=tuple(map(part, model.blocks)), after=part(model.after)
    )

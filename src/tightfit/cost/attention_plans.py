"""The plans that cuDNN makes for its attention, on the host.

torch asks cuDNN for a plan in the first call with each shape and keeps it for the process (`MHAGraphCache` in aten/src/ATen/native/cudnn/MHA.cpp). It takes as long as some
thousand other kernels take to be issued: a loop that makes tokens, whose keys are one longer each time, waits for a new one with every token, and so does a training
step whose batch has a length that was not there before. torch puts cuDNN first on Hopper and on datacenter Blackwell.

What one takes: on an H200 with a host of 2.8 times the reference's time for Python, a Llama of 16 layers took 74 ms a token (torch 2.11, cuDNN 9.19), of which 14 ms are its
693 kernels and their Python. On a B200, 0.44 s forward and 0.55 s backward (modelscope/FunASR issue 3704, torch 2.11); the backward plan of Hopper is taken
to be as much longer.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_python import REFERENCE_SECONDS
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.tape import Assumption, Column, Phase, Tape
from tightfit.units import Seconds, format_seconds

_FORWARD = "aten._scaled_dot_product_cudnn_attention"
_BACKWARD = "aten._scaled_dot_product_cudnn_attention_backward"
# Plans that any program makes: for its prompt, and what comes before and after.
_FEW = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeconds:
    """What the host of reference takes for one plan."""

    forward: Seconds
    backward: Seconds


_HOPPER = PlanSeconds(forward=Seconds(0.020), backward=Seconds(0.025))
_SECONDS: Mapping[str, PlanSeconds] = {"sm_100": PlanSeconds(forward=Seconds(0.44), backward=Seconds(0.55))}


def seconds_of_a_plan(device: Device) -> PlanSeconds:
    """For the attention of `device`; that of Hopper where none was measured."""
    return _SECONDS.get(device.isa, _HOPPER)


def calls_planned_attention(tape: Tape, begin: int, end: int) -> bool:
    """Whether any of the operators `[begin, end)` is cuDNN's attention."""
    return any(tape.strings[name] == _FORWARD for name in set(tape.operators.name[begin:end].tolist()))


def first_calls(tape: Tape) -> Column:
    """The operators that call cuDNN's attention with a shape that no operator before them had.

    A tape has no shapes; calls with as many FLOPs and bytes are taken to have the same.
    """
    operators = tape.operators
    wanted = [number for number, name in enumerate(tape.strings) if name in (_FORWARD, _BACKWARD)]
    calls = np.flatnonzero(np.isin(operators.name, wanted))
    sizes = np.stack(
        [column[calls].astype(float) for column in (operators.name, operators.flops, operators.bytes_read)], axis=1
    )
    return calls[np.sort(np.unique(sizes, axis=0, return_index=True)[1])] if len(calls) else calls


def plan_seconds(tape: Tape, device: Device) -> Column:
    """Seconds of the host of reference by operator, for the plans of a program that trains nothing.

    A training step that was traced stands for thousands, whose shapes come again: theirs are in no step. A few plans are what any process waits for once, as for its libraries.
    """
    found = np.zeros(len(tape.operators))
    calls = first_calls(tape)
    if len(calls) >= _FEW and not is_training(tape):
        found[calls] = seconds_of_a_plan(device).forward
    return found


def is_training(tape: Tape) -> bool:
    """Whether anything of it is a backward pass."""
    return bool((tape.operators.phase == Phase.BACKWARD).any())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadePlans:
    """Plans that are made while a program runs: how many, `first` of which operator, the seconds of the host for all, and whether these are part of the time of a step."""

    number: int
    first: int
    seconds: Seconds
    is_in_time: bool


SETTING = "torch.backends.cuda.enable_cudnn_sdp(False)"
"""With which torch takes another kernel."""


def made_plans(tape: Tape, device: Device, calibration: Calibration | None = None) -> MadePlans | None:
    """None where they are few; of a program that trains those behind its first step count."""
    calls = first_calls(tape)
    trains = is_training(tape)
    if trains:
        begins = [begin for begin, _ in step_operators(tape)]
        calls = calls[calls >= begins[1]] if len(begins) > 1 else calls[:0]
    if len(calls) < (1 if trains else _FEW):
        return None
    of_one = seconds_of_a_plan(device)
    is_backward = np.array([name == _BACKWARD for name in tape.strings])[tape.operators.name[calls]]
    python_factor = efficiency_of(device, calibration).python_seconds / REFERENCE_SECONDS
    seconds = python_factor * float(np.where(is_backward, of_one.backward, of_one.forward).sum())
    return MadePlans(number=len(calls), first=int(calls[0]), seconds=Seconds(seconds), is_in_time=not trains)


def plans_on_the_way(tape: Tape, device: Device, calibration: Calibration | None = None) -> tuple[Assumption, ...]:
    """One remark where plans are made while the program runs: what they take, and how to do without."""
    found = made_plans(tape, device, calibration)
    if found is None:
        return ()
    counted = "is part of the time" if found.is_in_time else "comes on top of the time per step, once for each shape"
    return (
        Assumption(
            where=tape.strings[tape.operators.line[found.first]],
            what=f"cuDNN makes a plan on the host for each new shape of attention: {found.number} here, about {format_seconds(found.seconds)}, which {counted}; {SETTING} at the start does without, with other rounding",
        ),
    )

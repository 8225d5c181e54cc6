"""The only wiring: from a workload to its tape, from the tape to its estimates."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.capture.targets import parse_target
from tightfit.capture.trace import DEFAULT_NUM_STEPS, trace
from tightfit.devices.catalogue import find
from tightfit.simulate.estimate import Estimate
from tightfit.simulate.peak import estimate_peak
from tightfit.simulate.settings import AllocatorSettings
from tightfit.tape import Tape


def capture(
    target: str,
    *,
    device: str,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    steps: int = DEFAULT_NUM_STEPS,
    show_output: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Tape:
    """The tape of `target` on a virtual `device`; see `tightfit.capture.targets` for what a target is.

    Raises:
        UsageError: no such target or device.
        CaptureError: the workload could not be traced.
    """
    find(device)
    parsed = parse_target(target, arguments=arguments, parameters=parameters, options=options)
    return trace(parsed, label=target, device=device, num_steps=steps, show_output=show_output, meanwhile=meanwhile)


def estimate(target: str | Tape, *, device: str, alloc_conf: str | None = None, **how: Any) -> Estimate:
    """What `target` needs on `device`: a workload, traced here, or a tape of one.

    `alloc_conf` is a `PYTORCH_CUDA_ALLOC_CONF` string, by default the one in the environment; `how` goes to `capture`.

    Raises:
        UsageError: no such target, device or setting.
        CaptureError: the workload could not be traced.
    """
    tape = target if isinstance(target, Tape) else capture(target, device=device, **how)
    text = (
        alloc_conf
        if alloc_conf is not None
        else os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    )
    return estimate_peak(tape, find(device), AllocatorSettings.parse(text))

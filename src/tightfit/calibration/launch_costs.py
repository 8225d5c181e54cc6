"""The fixed costs of an operator: on the GPU per kernel (`launch`) and per matmul (`ramp`), and on the host (`issue`).

Launch and ramp are measured inside CUDA graphs, where the host does not limit them; issue is the host's time to dispatch small operators one by
one with autograd recording, as training does. A fixed piece of Python tells how fast the host runs what techniques do in each step.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from tightfit.calibration.instruments import Expected, Findings, Instruments, seconds_on_card, summary, times
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_python import reference_work
from tightfit.cost.roofline import kernel_seconds
from tightfit.devices.calibration import Calibration

_NUM_KERNELS = 100
_SIDES = (512, 1024)
_LARGE_SIDE = 4096


def launches(instruments: Instruments) -> Findings:
    """The fixed costs `launch`, `ramp` and `issue`, in seconds, and how fast the host runs Python."""
    predicted = efficiency_of(instruments.card)
    small = torch.ones(256, device="cuda")
    launch = _in_graph(
        instruments, lambda: small.add_(1.0), lambda c: efficiency_of(instruments.card, c).launch_seconds
    )
    launch_seconds = statistics.median(launch)
    ramps = _ramps(instruments, launch_seconds)
    issue = _issue(instruments)
    python = _python(instruments)
    rows = [
        summary("launch of a kernel", "s", launch, predicted.launch_seconds),
        summary("ramp of a matrix product", "s", ramps, predicted.ramp_seconds),
        summary("issue of an operator on the host", "s", issue, predicted.issue_seconds),
        summary("a piece of Python on the host", "s", python, predicted.python_seconds),
    ]
    figures = {name: row.median for name, row in zip(("launch", "ramp", "issue", "python"), rows, strict=True)}
    return Findings(rows=rows, tables={"seconds": figures})


def _in_graph(instruments: Instruments, run: Callable[[], Any], expected: Expected) -> list[float]:
    """Seconds of one call of `run` among many in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_KERNELS):
            # Before the capture, which allows neither cuBLAS to create its handle nor a kernel to be loaded (CUDA graphs need a warm-up).
            run()
    # The first replay uploads the graph to the GPU.
    graph.replay()
    samples = []
    for _ in range(instruments.sizes.num_samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        samples.append(instruments.seconds_between(begin, end, times(_NUM_KERNELS, expected)) / _NUM_KERNELS)
    return samples


def _ramps(instruments: Instruments, launch_seconds: float) -> list[float]:
    """Seconds of small matmuls beyond a launch and their share of the time of a large one."""
    large = statistics.median(_products(instruments, _LARGE_SIDE))
    ramps = []
    for side in _SIDES:
        # By FLOPs: the large product is taken to run at the best rate, so what the small ones lose is their ramp.
        share = (side / _LARGE_SIDE) ** 3
        ramps += [max(0.0, seconds - launch_seconds - share * large) for seconds in _products(instruments, side)]
    return ramps


def _products(instruments: Instruments, side: int) -> list[float]:
    matrix = torch.ones(side, side, device="cuda", dtype=torch.float16)
    result = torch.empty_like(matrix)
    expected = functools.partial(_product_seconds, instruments, side)
    run = functools.partial(torch.mm, matrix, matrix, out=result)
    return (seconds_on_card if side == _LARGE_SIDE else _in_graph)(instruments, run, expected)


def _product_seconds(instruments: Instruments, side: int, calibration: Calibration | None) -> float:
    efficiency = efficiency_of(instruments.card, calibration)
    return kernel_seconds(instruments.card, efficiency, "matmul", "float16", flops=2.0 * side**3, num_bytes=6 * side**2)


def _issue(instruments: Instruments) -> list[float]:
    """Seconds that the host needs for one small operator; so few in a row that the launch queue never fills up and blocks the host."""
    # With a gradient, as autograd's nodes are a good part of what an eager operator costs the host.
    weight = torch.ones(256, device="cuda", requires_grad=True)

    def run() -> None:
        value = weight
        for _ in range(_NUM_KERNELS // 2):
            value = (value * 1.0) + 1.0

    def expected(calibration: Calibration | None) -> float:
        return _NUM_KERNELS * efficiency_of(instruments.card, calibration).issue_seconds

    samples = []
    for _ in range(instruments.sizes.num_samples):
        torch.cuda.synchronize()
        samples.append(instruments.seconds_of(run, expected) / _NUM_KERNELS)
    return samples


def _python(instruments: Instruments) -> list[float]:
    """Seconds of a fixed piece of Python."""

    def expected(calibration: Calibration | None) -> float:
        return efficiency_of(instruments.card, calibration).python_seconds

    return [instruments.seconds_of(reference_work, expected) for _ in range(instruments.sizes.num_samples)]

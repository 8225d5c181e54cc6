"""What the card and the host take for the last step of a tape, which stands for all."""

import numpy as np

from tightfit.analysis.operator_costs import OperatorCosts
from tightfit.cost.host_python import seconds_of_own_work
from tightfit.cost.steps import step_operators
from tightfit.planner.sides import Sides
from tightfit.tape import Column, Phase, Tape, WaitKind

_WAITS_OF_HOST = (WaitKind.HOST_FOR_EVENT, WaitKind.HOST_FOR_STREAM, WaitKind.HOST_FOR_DEVICE, WaitKind.HOST_READS)


def host_waits(tape: Tape) -> bool:
    """Whether the host waits for the card in each step: for a value, or for a copy that is not beside it."""
    begin, end = _last_step(tape)
    waits, copies = tape.waits, tape.copies
    is_wait = np.isin(waits.kind, _WAITS_OF_HOST) & (waits.operator >= begin) & (waits.operator <= end)
    is_copy = copies.is_blocking & (copies.operator >= begin) & (copies.operator < end)
    return bool(is_wait.any() or is_copy.any())


def sides_of_step(costs: OperatorCosts) -> Sides:
    """What the last step takes; copies run beside kernels."""
    tape = costs.tape
    begin, end = _last_step(tape)
    seconds = costs.seconds.copy()
    seconds[tape.copies.operator] = 0.0
    issued = costs.efficiency.issue_seconds * int(costs.is_kernel[begin:end].sum())
    on_host = issued + seconds_of_own_work(tape, begin, end)
    if host_waits(tape):
        on_host += _seconds_after_last_issue(costs, seconds[begin:end], begin)
    return Sides(on_card=float(seconds[begin:end].sum()), on_host=on_host)


def _last_step(tape: Tape) -> tuple[int, int]:
    return (step_operators(tape) or [(0, len(tape.operators))])[-1]


def _seconds_after_last_issue(costs: OperatorCosts, seconds: Column, begin: int) -> float:
    """Of a step that the host issues no faster than the card runs it: how long it waits for what follows the backward pass, and for its own last kernels."""
    is_backward = costs.tape.operators.phase[begin : begin + len(seconds)] == Phase.BACKWARD
    first = int(np.flatnonzero(is_backward)[-1]) + 1 if is_backward.any() else len(seconds)
    issue = costs.efficiency.issue_seconds * costs.is_kernel[begin + first : begin + len(seconds)]
    left = np.cumsum(seconds[first:][::-1])[::-1] - (issue.sum() - np.cumsum(issue))
    return float(left.max(initial=0.0))

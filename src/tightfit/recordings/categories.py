"""Guesses the categories of recorded blocks and the borders of steps from stacks and lifetimes, where a recording does not say them.

The stack gives the phase of an allocation: below `torch/optim`, in autograd's engine, or elsewhere, which is the forward pass. Blocks that outlive
the optimizer step that allocated them are its state, those that outlive the backward pass gradients, those that stay allocated from forward to
backward activations, and the rest temporaries. Blocks from before the recording have no stack; the sizes of the gradients tell parameters from
optimizer states among them.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tightfit.devices.cublas_workspaces import DEFAULT_CUBLAS_BYTES
from tightfit.recordings.frames import AllocationSite
from tightfit.recordings.read import Annotation
from tightfit.simulate.history import UNKNOWN, HistorySpan
from tightfit.tape import Category, Column

_PHASES = {"forward": 0, "backward": 1, "optimizer": 2, "unknown": 3}
_FORWARD, _BACKWARD, _OPTIMIZER, _NO_PHASE = _PHASES.values()
_PROFILER_STEP, _OPTIMIZER_STEP = "ProfilerStep#", "Optimizer.step#"
"""How torch names a step of its profiler (torch/profiler/profiler.py) and of an optimizer (torch/optim/optimizer.py)."""
_MAKES_INPUTS = ("aten.to_", "aten.rand", "aten.empty", "aten.tensor", "aten.zeros", "aten.ones", "aten.full")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Recorded blocks, as columns in the order of allocation: the events that allocated (-1: before) and freed them, bytes, and stacks."""

    allocated_at: Column
    freed_at: Column
    num_bytes: Column
    stack: Column
    num_events: int


def phases_of(places: Sequence[AllocationSite], lives: Lives) -> Column:
    """The phase in which each block was allocated.

    Autograd's device thread has no Python frames, so in a recording of Python frames only an allocation without a stack is of the backward pass.
    """
    of_stack = np.array([_PHASES[place.phase] for place in places], dtype=np.int64)
    phases = of_stack[lives.stack]
    during = lives.allocated_at >= 0
    if _FORWARD in phases[during] and _BACKWARD not in phases[during]:
        phases = np.where(during & (phases == _NO_PHASE), _BACKWARD, phases)
    return phases


def guess_spans(lives: Lives, phases: Column) -> tuple[HistorySpan, ...]:
    """Steps: each ends where a forward pass follows the optimizer (or the backward pass, where the optimizer allocates nothing)."""
    if not lives.num_events:
        return ()
    during = (lives.allocated_at >= 0) & (phases != _NO_PHASE)
    # Fused and plain SGD allocate nothing in a step, so the optimizer may not be seen at all.
    ends_step = _OPTIMIZER if _OPTIMIZER in phases[during] else _BACKWARD
    begins, is_over = [0], False
    for event, phase in zip(lives.allocated_at[during].tolist(), phases[during].tolist(), strict=True):
        if phase == _FORWARD and is_over:
            begins.append(event)
        is_over = phase == ends_step or (is_over and phase != _FORWARD)
    ends = [*begins[1:], lives.num_events]
    return tuple(
        HistorySpan(name=f"step {number}", kind="step", begin=begin, end=end)
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1)
    )


def annotated_spans(
    annotations: Sequence[Annotation], device: int, time_us: Column, last_request: int
) -> tuple[HistorySpan, ...]:
    """Steps by the program's own annotations: the profiler's, or else those of the optimizer that steps least often; empty without annotations.

    `time_us` is the time of each event, and `last_request` the last event that allocates: whatever follows it is no step of its own.
    """
    own = [one for one in annotations if one.device == device]
    # The profiler's schedule is set by the user and marks whole turns of the loop.
    begins = [one.time_us for one in own if one.name.startswith(_PROFILER_STEP) and one.stage == "START"]
    if not begins:
        ends: dict[str, list[int]] = {}
        for one in own:
            if one.name.startswith(_OPTIMIZER_STEP) and one.stage == "END":
                ends.setdefault(one.name, []).append(one.time_us)
        # With several optimizers (GAN, one per layer) the slowest sets the pace of the loop.
        begins = min(ends.values(), key=len, default=[])
    # Annotations and events share the allocator's clock, but annotations carry no event index.
    at = np.searchsorted(time_us, np.asarray(begins, dtype=np.int64), side="left")
    cuts = [0, *(cut for cut in np.unique(at).tolist() if 0 < cut <= last_request), len(time_us)]
    if not begins or not len(time_us):
        return ()
    return tuple(
        HistorySpan(name=f"step {number}", kind="step", begin=begin, end=end)
        for number, (begin, end) in enumerate(itertools.pairwise(cuts), 1)
    )


def guess_categories(
    lives: Lives, phases: Column, places: Sequence[AllocationSite], spans: Sequence[HistorySpan]
) -> Column:
    """The most likely category of each block; `spans` are the steps."""
    allocated_at, freed_at = lives.allocated_at, lives.freed_at
    asked = {
        phase: allocated_at[(phases == phase) & (allocated_at >= 0)] for phase in (_FORWARD, _BACKWARD, _OPTIMIZER)
    }
    after = {phase: _next(events, allocated_at, lives.num_events) for phase, events in asked.items()}
    over = _end_of_backward(asked, allocated_at, lives.num_events)
    after_optimizer = np.minimum(after[_FORWARD], after[_BACKWARD])
    # Later rules win: the last one catches activations of a forward pass that no backward pass follows, as in inference.
    rules = (
        (phases == _OPTIMIZER, freed_at >= after_optimizer, Category.OPTIMIZER_STATE),
        (phases == _BACKWARD, freed_at > over, Category.GRADIENTS),
        (phases == _FORWARD, freed_at > after[_BACKWARD], Category.ACTIVATIONS),
        (phases == _FORWARD, freed_at == lives.num_events, Category.ACTIVATIONS),
    )
    category = np.full(len(allocated_at), Category.TEMPORARIES, dtype=np.int64)
    for applies, outlives, found in rules:
        category[applies & outlives] = found
    # A recording without stacks says nothing about what its blocks are for.
    category[(phases == _NO_PHASE) & (allocated_at >= 0)] = UNKNOWN
    by_stack = {
        Category.WORKSPACE: [place.is_workspace for place in places],
        Category.PARAMETERS: [place.builds_module for place in places],
        Category.INPUTS: [not place.in_module and place.operator.startswith(_MAKES_INPUTS) for place in places],
    }
    lasts = (category == Category.ACTIVATIONS) | (freed_at == lives.num_events)
    for found, of_stack in by_stack.items():
        chosen = np.array(of_stack, dtype=bool)[lives.stack]
        # Only blocks that last: a module that is built also makes temporaries while it is initialised. Workspaces are known by their
        # stack alone, in whatever phase the first matmul of a thread is.
        category[chosen & ((lasts & (phases == _FORWARD)) | (found == Category.WORKSPACE))] = found
    before = (allocated_at < 0) & (phases == _NO_PHASE)
    category[before] = _of_the_start(lives, category, before, phases, spans)
    return category


def _next(events: Column, allocated_at: Column, num_events: int) -> Column:
    """The first of `events` (ascending) after each allocation."""
    padded = np.append(events, num_events)
    return padded[np.searchsorted(events, allocated_at, side="right")]


def _end_of_backward(asked: dict[int, Column], allocated_at: Column, num_events: int) -> Column:
    """For each allocation, the event after which blocks that are still allocated are no temporaries of that backward pass.

    It is the optimizer's first allocation, or the last one of the backward pass where the optimizer allocates nothing before the next forward.
    """
    forward, optimizer = (_next(asked[phase], allocated_at, num_events) for phase in (_FORWARD, _OPTIMIZER))
    backward = np.append(asked[_BACKWARD], -1)
    last = backward[np.searchsorted(asked[_BACKWARD], forward, side="left") - 1]
    return np.where(optimizer < forward, optimizer, last)


def _of_the_start(
    lives: Lives, category: Column, before: Column, phases: Column, spans: Sequence[HistorySpan]
) -> list[int]:
    """Categories of blocks from before the recording: by the gradients of their size if they last, else by when they were freed."""
    during = lives.allocated_at >= 0
    gradients: Counter[int] = Counter()
    for span in spans:
        of_step = (
            (lives.allocated_at >= span.begin) & (lives.allocated_at < span.end) & (category == Category.GRADIENTS)
        )
        # The union takes the maximum of each count: the steps of a run have the same gradients, which must not be added up.
        gradients |= Counter(lives.num_bytes[of_step].tolist())
    states = set(lives.num_bytes[during & (category == Category.OPTIMIZER_STATE)].tolist())
    allocations, of_births = lives.allocated_at[during], phases[during]
    left = gradients.copy()
    guesses: list[int] = []
    for num_bytes, freed_at in zip(lives.num_bytes[before].tolist(), lives.freed_at[before].tolist(), strict=True):
        at = int(np.searchsorted(allocations, freed_at)) - 1
        phase = int(of_births[at]) if at >= 0 else _FORWARD
        # A workspace made before the recording has no stack either, but its size is one of two (tightfit.devices.cublas_workspaces).
        if num_bytes in DEFAULT_CUBLAS_BYTES and num_bytes not in gradients:
            guesses.append(Category.WORKSPACE)
        elif freed_at == lives.num_events:
            # As many blocks of a size as there are gradients of it are parameters; the rest of that size are optimizer states, of which
            # Adam has two per parameter.
            is_parameter = num_bytes not in gradients or left[num_bytes] > 0
            left[num_bytes] -= 1
            guesses.append(Category.PARAMETERS if is_parameter else Category.OPTIMIZER_STATE)
        elif phase == _OPTIMIZER and num_bytes in states:
            guesses.append(Category.OPTIMIZER_STATE)
        # zero_grad(set_to_none=True) frees them before or in the next forward pass.
        elif num_bytes in gradients and phase != _BACKWARD:
            guesses.append(Category.GRADIENTS)
        else:
            guesses.append(Category.ACTIVATIONS if phase == _BACKWARD else UNKNOWN)
    return guesses

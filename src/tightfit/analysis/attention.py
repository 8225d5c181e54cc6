"""Finds attention on a tape that materialises its scores, and what a fused kernel in its place would save and cost.

A softmax between two batched matmuls of one module is an attention if the first matmul writes as many elements as the softmax and the second
one fewer. Attention with dropout on the scores is skipped: a fused kernel would draw other random numbers.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import Anatomy
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import arithmetic_type, operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.planner.option import Change, Option
from tightfit.tape import Column, EventKind, Phase, Source, Tape

SMALLEST_SHARE = 0.01
"""The option is offered if the scores of all modules are at least this share of what is saved for backward."""

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_PRODUCTS = ("aten.bmm", "aten.baddbmm")
_DROPOUT = ("aten.native_dropout", "aten.bernoulli_.float", "aten.dropout")
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_FLOPS_OF_KERNEL = 3.5
"""FLOPs of the kernel's forward and backward passes over those of its forward pass: 2 and 5 matmuls (Dao 2023, arXiv:2307.08691, section 4.1)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRun:
    """One attention of the module at `path`: operators from the first matmul to the second, those of its backward pass, and the storages that
    hold scores. `is_kernel` where `scaled_dot_product_attention` itself chose its math backend."""

    path: str
    begin: int
    end: int
    back: tuple[int, ...]
    scores: tuple[int, ...]
    is_kernel: bool


def score_runs(anatomy: Anatomy) -> list[ScoreRun]:
    """All attentions that materialise their scores, in order."""
    tape = anatomy.tape
    names = [tape.strings[name] for name in tape.operators.name.tolist()]
    forward = tape.operators.phase == Phase.FORWARD
    places = [i for i in np.flatnonzero(forward).tolist() if names[i] in _SOFTMAX]
    return [run for at in places if (run := _score_run(anatomy, names, at)) is not None]


def _score_run(anatomy: Anatomy, names: list[str], softmax: int) -> ScoreRun | None:
    tape = anatomy.tape
    operators = tape.operators
    module = operators.module[softmax]
    numbers = _numbers(tape, softmax)

    def nearest(step: int) -> int | None:
        at = softmax + step
        while 0 <= at < len(names) and operators.module[at] == module and operators.phase[at] == Phase.FORWARD:
            if names[at] in _PRODUCTS:
                return at
            at += step
        return None

    begin, end = nearest(-1), nearest(1)
    # Scores are (queries x keys) in both, while the second matmul contracts the keys; this tells attention from a softmax
    # that a mixture of experts or a gate takes between two matmuls.
    if begin is None or end is None or _numbers(tape, begin) != numbers or _numbers(tape, end) >= numbers:
        return None
    # Only dropout after the softmax acts on the probabilities; dropout before `begin` belongs to another layer.
    if any(names[i] in _DROPOUT for i in range(softmax, end)):
        return None
    back = _backward(tape, softmax, module)
    own = np.array([*range(begin, end), *back])
    born = tape.storages.operator
    is_score = np.isin(born, own) & (tape.storages.source == Source.TENSOR)
    # In the dtype of the matmul: under autocast the softmax runs in float32 and its storages are larger, never smaller.
    is_score &= tape.storages.num_bytes >= numbers * _item_bytes(tape, begin)
    return ScoreRun(
        path=tape.strings[module],
        begin=begin,
        end=end,
        back=back,
        scores=tuple(np.flatnonzero(is_score).tolist()),
        # The math backend calls _safe_softmax, code written by hand calls softmax (aten/src/ATen/native/transformers/attention.cpp).
        is_kernel=names[softmax] == "aten._safe_softmax",
    )


def _item_bytes(tape: Tape, operator: int) -> int:
    return _ITEM_BYTES[tape.strings[tape.operators.dtype[operator]]]


def _numbers(tape: Tape, operator: int) -> int:
    return int(tape.operators.bytes_written[operator]) // _item_bytes(tape, operator)


def _backward(tape: Tape, softmax: int, module: int) -> tuple[int, ...]:
    """The operators of `module` in the backward pass that follows."""
    phase = tape.operators.phase
    backward = np.flatnonzero(phase[softmax:] == Phase.BACKWARD) + softmax
    if not len(backward):
        return ()
    # The next forward pass ends the search: a later micro-batch has a backward pass of its own.
    again = np.flatnonzero(phase[backward[0] :] == Phase.FORWARD)
    end = int(backward[0] + again[0]) if len(again) else len(phase)
    own = np.flatnonzero(tape.operators.module[backward[0] : end] == module) + backward[0]
    return tuple(own[phase[own] == Phase.BACKWARD].tolist())


def attention_options(technique: str, tape: Tape, device: Device) -> Iterator[Option]:
    """One option for all modules together; none where the scores are a negligible part of what is saved for backward."""
    anatomy = Anatomy(tape)
    # The math backend's scores cannot be deferred from outside; the attention_kernels technique changes the backend instead.
    runs = [run for run in score_runs(anatomy) if not run.is_kernel]
    if not runs:
        return
    waiting = np.flatnonzero(anatomy.waits)
    scores = np.unique([storage for run in runs for storage in run.scores])
    if anatomy.bytes_of(scores) < SMALLEST_SHARE * anatomy.bytes_of(waiting):
        return
    births = _births(tape)
    gone = [
        Change(begin=int(births[s]), end=int(anatomy.died[s]), num_bytes=-int(anatomy.block_bytes[s]))
        for s in scores.tolist()
    ]
    kept = [change for run in runs if (change := _output(anatomy, run)) is not None]
    seconds = operator_seconds(tape, device)
    modules = list(dict.fromkeys(run.path for run in runs))
    yield Option(
        technique=technique,
        where=modules[0].partition(".")[0],
        settings={"modules": modules},
        changes=(*gone, *kept),
        seconds=sum(_added_seconds(tape, device, run, seconds) for run in runs) / max(1, len(step_operators(tape))),
        exact=True,
        slots=frozenset(f"attention@{module}" for module in modules),
        # A kernel changes layouts and what autograd saves, which only a new trace shows to the byte.
        is_coarse=True,
    )


def _output(anatomy: Anatomy, run: ScoreRun) -> Change | None:
    """The output of an attention, which the fused kernel saves for backward."""
    if not run.back:
        return None
    begin, end = int(anatomy.event_of(run.end)), int(anatomy.event_of(run.back[0]))
    return Change(begin=begin, end=end, num_bytes=int(anatomy.tape.operators.bytes_written[run.end]))


def _added_seconds(tape: Tape, device: Device, run: ScoreRun, seconds: Column) -> float:
    efficiency = efficiency_of(device)
    dtype = tape.strings[tape.operators.dtype[run.begin]]
    arithmetic = arithmetic_type("attention", dtype, tf32_matmul=False, tf32_convolution=True)
    rate = device.flops_per_second(arithmetic) * efficiency.of_flops["attention", arithmetic]
    flops = float(tape.operators.flops[run.begin] + tape.operators.flops[run.end])
    kernel = flops * (_FLOPS_OF_KERNEL if run.back else 1) / rate
    plain = float(seconds[run.begin : run.end + 1].sum()) + float(seconds[list(run.back)].sum())
    return kernel - plain


def _births(tape: Tape) -> Column:
    births = np.zeros(len(tape.storages), dtype=np.int64)
    allocations = tape.events.kind == EventKind.ALLOCATE
    births[tape.events.storage[allocations]] = np.flatnonzero(allocations)
    return births


def math_attention_bytes(tape: Tape) -> int:
    """Bytes of scores per step that the math backend of `scaled_dot_product_attention` saves for backward."""
    anatomy = Anatomy(tape)
    scores = {s for run in score_runs(anatomy) if run.is_kernel for s in run.scores if anatomy.waits[s]}
    return anatomy.bytes_of(np.array(sorted(scores), dtype=np.int64)) // max(1, len(step_operators(tape)))

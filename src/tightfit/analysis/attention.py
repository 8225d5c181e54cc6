"""Finds attention on a tape that materialises its scores.

A softmax between two batched matmuls of one module is an attention if the first matmul writes as many elements as the softmax and the second
one fewer. Attention with dropout on the scores is skipped: a fused kernel would draw other random numbers.
"""

import dataclasses

import numpy as np

from tightfit.analysis.modules import ModuleCalls
from tightfit.tape import Phase, Source, Tape
from tightfit.tape.element_bytes import element_bytes

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_PRODUCTS = ("aten.bmm", "aten.baddbmm")
_DROPOUT = ("aten.native_dropout", "aten.bernoulli_.float", "aten.dropout")


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


def score_runs(module_calls: ModuleCalls) -> list[ScoreRun]:
    """All attentions that materialise their scores, in order."""
    tape = module_calls.tape
    names = [tape.strings[name] for name in tape.operators.name.tolist()]
    forward = tape.operators.phase == Phase.FORWARD
    places = [i for i in np.flatnonzero(forward).tolist() if names[i] in _SOFTMAX]
    return [run for at in places if (run := _score_run(module_calls, names, at)) is not None]


def _score_run(module_calls: ModuleCalls, names: list[str], softmax: int) -> ScoreRun | None:
    tape = module_calls.tape
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
    if numbers is None or begin is None or end is None or (item_bytes := element_bytes(tape, begin)) is None:
        return None
    contracted = _numbers(tape, end)
    if _numbers(tape, begin) != numbers or contracted is None or contracted >= numbers:
        return None
    # Only dropout after the softmax acts on the probabilities; dropout before `begin` belongs to another layer.
    if any(names[i] in _DROPOUT for i in range(softmax, end)):
        return None
    back = _backward(tape, softmax, module)
    own = np.array([*range(begin, end), *back])
    allocated_at = tape.storages.operator
    is_score = np.isin(allocated_at, own) & (tape.storages.source == Source.TENSOR)
    # In the dtype of the matmul: under autocast the softmax runs in float32 and its storages are larger, never smaller.
    is_score &= tape.storages.num_bytes >= numbers * item_bytes
    return ScoreRun(
        path=tape.strings[module],
        begin=begin,
        end=end,
        back=back,
        scores=tuple(np.flatnonzero(is_score).tolist()),
        # The math backend calls _safe_softmax, code written by hand calls softmax (aten/src/ATen/native/transformers/attention.cpp).
        is_kernel=names[softmax] == "aten._safe_softmax",
    )


def _numbers(tape: Tape, operator: int) -> int | None:
    item_bytes = element_bytes(tape, operator)
    return None if item_bytes is None else int(tape.operators.bytes_written[operator]) // item_bytes


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

"""What a step does: its FLOPs, and its tokens or samples as far as its operators show them.

Tokens: a table is looked up with one index for each token, and the products of a language model have one row for each; both have to say the same. Samples: a
classifier's loss reads one row of scores for each image of the step's convolutions. Where the operators show neither, examples are those of the batches that a data loader gave, or
nothing is said.

Model FLOPs (Chowdhery et al. 2022, PaLM, appendix B) leave out what is computed again: a backward pass takes as many FLOPs as the forward pass for gradients of inputs, and as
many again for those of the weights that are trained. More than that is recomputation. Fused attention is one kernel whose backward pass takes 2.5 times its forward one.
"""

import dataclasses

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.cost.roofline import arithmetic_of_operators
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.simulate.input_pipeline import loaded_examples
from tightfit.tape import Category, Column, Phase, Tape

_INDEX_BYTES = (8, 4)
_SCORE_BYTES = (4, 2, 8)
_TARGET_BYTES = 8
_OF_ATTENTION = 2.5
_LEAST_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Of one step: `flops` that are computed, `model_flops` without those that are computed again, `utilisation` of the peak of the type that
    most of them have (model FLOPs utilisation, MFU). `num_tokens` and `num_samples` are None where they cannot be told, `utilisation` where there are no FLOPs. `num_examples` are what the step takes from its data loader, None where
    that is not known or one of the others is."""

    flops: float
    model_flops: float
    utilisation: float | None
    num_tokens: int | None
    num_samples: int | None
    num_examples: int | None = None


def counts_of_step(tape: Tape, device: Device, seconds: float) -> StepCounts:
    """The counts of the last step of `tape`, which takes `seconds` on `device`."""
    steps = step_operators(tape)
    begin, end = steps[-1] if steps else (0, 0)
    step = np.arange(begin, end)
    flops = tape.operators.flops[begin:end]
    total = float(flops.sum())
    if not total or not seconds:
        return StepCounts(flops=total, model_flops=total, utilisation=None, num_tokens=None, num_samples=None)
    model_flops = _model_flops(tape, step)
    types, place = np.unique(arithmetic_of_operators(tape)[begin:end], return_inverse=True)
    most = types[int(np.bincount(place, flops).argmax())]
    tokens = _tokens(tape, step)
    samples = None if tokens else _samples(tape, step)
    return StepCounts(
        flops=total,
        model_flops=model_flops,
        utilisation=model_flops / seconds / device.flops_per_second(str(most)),  # type: ignore[arg-type]
        num_tokens=tokens,
        num_samples=samples,
        num_examples=None if tokens or samples else loaded_examples(tape),
    )


def _model_flops(tape: Tape, step: Column) -> float:
    operators = tape.operators
    phase, flops = operators.phase[step], operators.flops[step]
    is_attention = _is_of(tape, step, ("attention",))
    is_forward, is_backward = phase == Phase.FORWARD, phase == Phase.BACKWARD
    of_attention = float(flops[is_forward & is_attention].sum())
    of_rest = float(flops[is_forward & ~is_attention].sum())
    most_backward = of_rest * (1.0 + _trained_share(tape)) + _OF_ATTENTION * of_attention
    others = float(flops[~is_forward & ~is_backward].sum())
    return of_rest + of_attention + min(float(flops[is_backward].sum()), most_backward) + others


def _trained_share(tape: Tape) -> float:
    """The share of the weights' bytes that is trained; 1 where the tape has no weights."""
    weights = tape.weights
    if not len(weights):
        return 1.0
    storage, first = np.unique(weights.storage, return_index=True)
    num_bytes = tape.storages.num_bytes[storage]
    total = int(num_bytes.sum())
    return float(num_bytes[weights.is_trained[first]].sum()) / total if total else 1.0


def _tokens(tape: Tape, step: Column) -> int | None:
    """Tokens of all micro-batches of a step."""
    products = _forward_products(tape, step)
    if not len(products) or (
        not _is_of(tape, step, ("attention",)).any() and not (tape.geometry.batch[products] > 1).any()
    ):
        return None
    operators, geometry = tape.operators, tape.geometry
    flops = operators.flops[geometry.operator[products]]
    best: tuple[float, int] | None = None
    for rows in np.unique(geometry.num_rows[products]).tolist():
        share = float(
            flops[(geometry.num_rows[products] == rows) & (geometry.batch[products] == 1)].sum() / flops.sum()
        )
        if share >= _LEAST_SHARE and (best is None or share > best[0]):
            best = (share, int(rows))
    if best is None:
        return None
    forward = step[(operators.phase[step] == Phase.FORWARD) & _is_of(tape, step, ("embedding",))]
    by_module: dict[int, int] = {}
    for operator in forward.tolist():
        if _looks_up(tape, operator, best[1]):
            module = int(operators.module[operator])
            by_module[module] = by_module.get(module, 0) + best[1]
    return max(by_module.values(), default=0) or None


def _looks_up(tape: Tape, operator: int, num_tokens: int) -> bool:
    """Whether `operator` reads a row of one of the weights for each of `num_tokens`."""
    operators = tape.operators
    written, read = int(operators.bytes_written[operator]), int(operators.bytes_read[operator])
    if written % num_tokens:
        return False
    tables = {read - size * num_tokens for size in _INDEX_BYTES}
    weights = tape.storages.num_bytes[tape.storages.category == Category.PARAMETERS]
    return bool(np.isin(list(tables), weights).any())


def _samples(tape: Tape, step: Column) -> int | None:
    """Images of all micro-batches of a step: rows of scores that a loss reads, behind convolutions of as many images."""
    operators, geometry = tape.operators, tape.geometry
    own = np.flatnonzero((geometry.operator >= step[0]) & (geometry.operator <= step[-1]))
    convolved = own[(geometry.taps[own] > 0) & (geometry.gradients[own] == 0)]
    if not len(convolved):
        return None
    pixels = int(geometry.num_rows[convolved[0]])
    products = _forward_products(tape, step)
    total = 0
    for operator in step[_named(tape, step, "nll_loss_forward")].tolist():
        before = products[geometry.operator[products] < operator]
        if not len(before):
            return None
        rows, columns = int(geometry.num_rows[before[-1]]), int(geometry.num_columns[before[-1]])
        read = int(operators.bytes_read[operator])
        is_score = any(read == rows * (columns * size + _TARGET_BYTES) for size in _SCORE_BYTES)
        if not is_score or pixels % rows:
            return None
        total += rows
    return total or None


def _forward_products(tape: Tape, step: Column) -> Column:
    """The rows of the geometry that are matrix products of the forward passes of a step."""
    geometry, operators = tape.geometry, tape.operators
    if not len(geometry) or not len(step):
        return np.zeros(0, dtype=np.int64)
    operator = geometry.operator
    own = (operator >= step[0]) & (operator <= step[-1]) & (geometry.taps == 0)
    rows = np.flatnonzero(own)
    is_forward = operators.phase[operator[rows]] == Phase.FORWARD
    return rows[is_forward & _is_of(tape, operator[rows], ("matmul",))]


def _is_of(tape: Tape, chosen: Column, kinds: tuple[str, ...]) -> Column:
    names, name_of = np.unique(tape.operators.name[chosen], return_inverse=True)
    return np.array([operator_class(tape.strings[name]) in kinds for name in names], dtype=bool)[name_of]


def _named(tape: Tape, chosen: Column, name: str) -> Column:
    return np.array([name in tape.strings[each] for each in tape.operators.name[chosen].tolist()], dtype=bool)

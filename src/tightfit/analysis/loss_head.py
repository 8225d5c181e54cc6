"""Finds linear heads that feed a cross-entropy on a tape, their dimensions, and the storages that a chunked loss avoids.

The search goes backwards from the loss: a log-softmax with a negative log-likelihood is a loss over classes, the matmul that wrote as many
elements is the head, and its dimensions follow from the bytes and FLOPs of these operators. A chunked loss avoids whatever is as large as the
logits and is allocated between the head's matmul and its gradients.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import ModuleCalls
from tightfit.tape import Phase, Source, Tape
from tightfit.tape.element_bytes import element_bytes

# The operators of a linear layer; a module that runs any other cannot be deferred to the loss.
_LINEAR = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "t", "transpose.int", "view", "_unsafe_view", "_to_copy", "detach", "alias", "reshape")
)
_PRODUCTS = ("aten.mm", "aten.addmm")
_LOSSES = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
# nll_loss takes class indices as int64.
_BYTES_OF_TARGET = 8
_NEARLY = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """One call of a head and its loss: `path` of the module, hidden states `(num_tokens, width)`, weight `(num_classes, width)`.

    Operators: the head begins at `begin`, its matmul is `product`, the loss is done before `loss_end`; the backward pass of the loss begins at
    `back_begin` and that of the head ends before `back_end`. `*_item_bytes` are bytes per element. `gone` are the storages that a chunked
    loss does not allocate, `weight_gradient` and `hidden_gradient` those that it still does (-1: not computed).
    """

    path: str
    num_tokens: int
    num_counted: int
    num_classes: int
    width: int
    has_tanh: bool
    begin: int
    product: int
    loss_end: int
    back_begin: int
    back_end: int
    head_item_bytes: int
    loss_item_bytes: int
    logits: int
    gone: tuple[int, ...]
    weight_gradient: int
    hidden_gradient: int
    casts_weight: bool


def loss_heads(module_calls: ModuleCalls) -> Iterator[LossHead]:
    """All calls of all heads, in order."""
    tape = module_calls.tape
    names = [tape.strings[name] for name in tape.operators.name.tolist()]
    forward = tape.operators.phase == Phase.FORWARD
    for at in np.flatnonzero(forward):
        if names[at] == "aten._log_softmax":
            # cross_entropy_loss calls both in a row; nll_loss_nd may reshape its input in between (aten/src/ATen/native/LossNLL.cpp).
            loss = next((i for i in range(at + 1, min(at + 4, len(names))) if names[i] in _LOSSES and forward[i]), None)
            found = None if loss is None else _loss_head(module_calls, names, int(at), loss)
            if found is not None:
                yield found


def _loss_head(module_calls: ModuleCalls, names: list[str], softmax: int, loss: int) -> LossHead | None:
    tape = module_calls.tape
    operators = tape.operators
    softmax_bytes, loss_bytes = element_bytes(tape, softmax), element_bytes(tape, loss)
    if softmax_bytes is None or loss_bytes is None:
        return None
    numbers = int(operators.bytes_written[softmax]) // softmax_bytes
    # nll_loss reads the log-probabilities, which autocast casts to float32 behind a softmax in half precision, and the targets, so what is left over is
    # the targets.
    num_counted = (int(operators.bytes_read[loss]) - numbers * loss_bytes) // _BYTES_OF_TARGET
    if num_counted <= 0 or numbers % num_counted:
        return None
    num_classes = numbers // num_counted
    product = _product(tape, names, softmax, numbers, num_classes)
    item_bytes = None if product is None else element_bytes(tape, product)
    rounds = None if product is None else _backward(tape, names, product, loss)
    if product is None or item_bytes is None or rounds is None:
        return None
    back_begin, back_end = rounds
    module = operators.module[product]
    # A linear layer under autocast casts its weight, and an ndim > 2 input is reshaped, before the matmul.
    begin = product
    while begin and operators.module[begin - 1] == module and operators.phase[begin - 1] == Phase.FORWARD:
        begin -= 1
    # A scale, a bias added apart or a soft cap inside of the module would be lost in chunks that only multiply.
    if any(names[i] not in _LINEAR for i in range(begin, product + 1)):
        return None
    num_tokens = int(operators.bytes_written[product]) // item_bytes // num_classes
    # A matmul of (tokens, width) and (width, classes) is 2 * tokens * width * classes FLOPs.
    width = int(operators.flops[product]) // (2 * num_tokens * num_classes)
    gradients = _gradients(tape, back_begin, back_end, module, num_classes * width, num_tokens * width)
    logits = np.flatnonzero(tape.storages.operator == product)
    if not len(logits):
        return None
    casts = [i for i in range(begin, product) if names[i] == "aten._to_copy"]
    head = LossHead(
        path=tape.strings[module],
        num_tokens=num_tokens,
        num_counted=num_counted,
        num_classes=num_classes,
        width=width,
        # Gemma 2 caps its logits by tanh, which keeps one more tensor of their size.
        has_tanh=any(names[i] == "aten.tanh" for i in range(product, softmax)),
        begin=begin,
        product=product,
        loss_end=loss + 1,
        back_begin=back_begin,
        back_end=back_end,
        head_item_bytes=item_bytes,
        # Behind a softmax in half precision autocast casts, and chunks do before it.
        loss_item_bytes=loss_bytes,
        logits=int(logits[0]),
        gone=(),
        weight_gradient=gradients[0],
        hidden_gradient=gradients[1],
        casts_weight=any(operators.bytes_written[i] == num_classes * width * item_bytes for i in casts),
    )
    return dataclasses.replace(head, gone=_gone(module_calls, head, module))


def _product(tape: Tape, names: list[str], softmax: int, numbers: int, num_classes: int) -> int | None:
    """The last matmul before `softmax`, in the same forward pass, that wrote at least as many elements, in whole rows of `num_classes`."""
    operators = tape.operators
    for i in range(softmax - 1, -1, -1):
        if operators.phase[i] != Phase.FORWARD:
            return None
        if names[i] in _PRODUCTS:
            item_bytes = element_bytes(tape, i)
            if item_bytes is None:
                # Of complex numbers a loss takes no logits.
                return None
            made = int(operators.bytes_written[i]) // item_bytes
            # At least: of shifted labels the loss takes a slice of the logits.
            if made >= numbers:
                return i if made % num_classes == 0 else None
    return None


def _backward(tape: Tape, names: list[str], product: int, loss: int) -> tuple[int, int] | None:
    """The backward operators from the loss to the head: first, and one past the last."""
    operators = tape.operators
    backward = np.flatnonzero(operators.phase[loss:] == Phase.BACKWARD) + loss
    if not len(backward):
        return None
    begin = next((int(i) for i in backward if names[i].startswith("aten.nll_loss")), None)
    if begin is None:
        return None
    again = np.flatnonzero(operators.phase[begin:] == Phase.FORWARD)
    end = begin + int(again[0]) if len(again) else len(names)
    # An evaluation behind the step calls the module too.
    is_own = (operators.module[begin:end] == operators.module[product]) & (operators.phase[begin:end] == Phase.BACKWARD)
    own = (np.flatnonzero(is_own) + begin).tolist()
    return (begin, own[-1] + 1) if own else None


def _gradients(tape: Tape, begin: int, end: int, module: int, num_weights: int, num_hidden: int) -> tuple[int, int]:
    """The last storages of the head's backward pass with the sizes of the weight's and of the hidden states' gradient."""
    allocated_at = tape.storages.operator
    found = np.flatnonzero(
        (allocated_at >= begin) & (allocated_at < end) & (tape.operators.module[allocated_at] == module)
    )
    weight = hidden = -1
    for storage in found.tolist():
        item_bytes = element_bytes(tape, int(allocated_at[storage]))
        if item_bytes is None:
            # Not a gradient, such as what anomaly detection compares.
            continue
        numbers = int(tape.storages.num_bytes[storage]) // item_bytes
        if numbers % num_weights == 0:
            weight = storage
        elif numbers % num_hidden == 0:
            hidden = storage
    return weight, hidden


def _gone(module_calls: ModuleCalls, head: LossHead, module: int) -> tuple[int, ...]:
    tape = module_calls.tape
    allocated_at, sizes = tape.storages.operator, tape.storages.num_bytes
    least = _NEARLY * head.num_counted * head.num_classes * min(head.head_item_bytes, head.loss_item_bytes)
    is_own = tape.operators.module[allocated_at] == module
    forward = (allocated_at >= head.begin) & (allocated_at < head.loss_end)
    backward = (allocated_at >= head.back_begin) & (allocated_at < head.back_end)
    kept = np.isin(np.arange(len(allocated_at)), (head.weight_gradient, head.hidden_gradient))
    # Outside of the head's module only what is as large as the logits goes; inside all but the two gradients, such as the
    # cast of the weight that autocast makes.
    gone = ((forward | backward) & (sizes >= least) & ~is_own) | ((forward | backward) & is_own & ~kept)
    return tuple(np.flatnonzero(gone & (tape.storages.source == Source.TENSOR)).tolist())

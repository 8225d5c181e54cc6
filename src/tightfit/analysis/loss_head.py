"""Where a tape has a linear head that feeds a cross-entropy, its dimensions, and what stands and falls with its logits.

A head is found from behind: a log-softmax with a negative log-likelihood is a loss over classes, the product that made as many numbers is the
head, and its dimensions follow from what these operators read, write and compute. What is as large as the logits and lives between the
product and its gradients is what chunks do without.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import Anatomy
from tightfit.tape import Phase, Source, Tape

# What a linear layer consists of; a module that does more than that is no head that can be deferred.
_LINEAR = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "t", "transpose.int", "view", "_unsafe_view", "_to_copy", "detach", "alias", "reshape")
)
_PRODUCTS = ("aten.mm", "aten.addmm")
_LOSSES = ("aten.nll_loss_forward", "aten.nll_loss2d_forward")
_BYTES_OF_TARGET = 8
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_NEARLY = 0.9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """One run of a head and its loss: `path` of the module, `(num_tokens, width)` times `(num_classes, width)`.

    Operators: the head begins at `begin`, its product is `product`, the loss is done before `loss_end`; the backward pass of the loss begins at
    `back_begin` and that of the head ends before `back_end`. Bytes are those of one number of what the name says. `gone` are the storages
    that do not exist in chunks, `weight_gradient` and `hidden_gradient` those that do (-1: not wanted).
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


def loss_heads(anatomy: Anatomy) -> Iterator[LossHead]:
    """All runs of all heads, in order."""
    tape = anatomy.tape
    names = [tape.strings[name] for name in tape.operators.name.tolist()]
    forward = tape.operators.phase == Phase.FORWARD
    for at in np.flatnonzero(forward):
        if names[at] == "aten._log_softmax":
            loss = next((i for i in range(at + 1, min(at + 4, len(names))) if names[i] in _LOSSES and forward[i]), None)
            found = None if loss is None else _loss_head(anatomy, names, int(at), loss)
            if found is not None:
                yield found


def _loss_head(anatomy: Anatomy, names: list[str], softmax: int, loss: int) -> LossHead | None:
    tape = anatomy.tape
    operators = tape.operators
    numbers = int(operators.bytes_written[softmax]) // _item_bytes(tape, softmax)
    num_counted = int(operators.bytes_read[loss] - operators.bytes_written[softmax]) // _BYTES_OF_TARGET
    if num_counted <= 0 or numbers % num_counted:
        return None
    num_classes = numbers // num_counted
    product = _product(tape, names, softmax, numbers, num_classes)
    rounds = None if product is None else _backward(tape, names, product, loss)
    if product is None or rounds is None:
        return None
    back_begin, back_end = rounds
    module = operators.module[product]
    begin = product
    while begin and operators.module[begin - 1] == module and operators.phase[begin - 1] == Phase.FORWARD:
        begin -= 1
    if any(names[i] not in _LINEAR for i in range(begin, product + 1)):
        return None
    item_bytes = _item_bytes(tape, product)
    num_tokens = int(operators.bytes_written[product]) // item_bytes // num_classes
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
        has_tanh=any(names[i] == "aten.tanh" for i in range(product, softmax)),
        begin=begin,
        product=product,
        loss_end=loss + 1,
        back_begin=back_begin,
        back_end=back_end,
        head_item_bytes=item_bytes,
        loss_item_bytes=_item_bytes(tape, softmax),
        logits=int(logits[0]),
        gone=(),
        weight_gradient=gradients[0],
        hidden_gradient=gradients[1],
        casts_weight=any(operators.bytes_written[i] == num_classes * width * item_bytes for i in casts),
    )
    return dataclasses.replace(head, gone=_gone(anatomy, head, module))


def _item_bytes(tape: Tape, operator: int) -> int:
    return _ITEM_BYTES[tape.strings[tape.operators.dtype[operator]]]


def _product(tape: Tape, names: list[str], softmax: int, numbers: int, num_classes: int) -> int | None:
    """The last product before `softmax`, in the same forward pass, that made at least as many numbers, of whole rows."""
    operators = tape.operators
    for i in range(softmax - 1, -1, -1):
        if operators.phase[i] != Phase.FORWARD:
            return None
        if names[i] in _PRODUCTS:
            made = int(operators.bytes_written[i]) // _item_bytes(tape, i)
            if made >= numbers:
                return i if made % num_classes == 0 else None
    return None


def _backward(tape: Tape, names: list[str], product: int, loss: int) -> tuple[int, int] | None:
    """The backward operators from the loss to the head: begin, and first after the end."""
    operators = tape.operators
    backward = np.flatnonzero(operators.phase[loss:] == Phase.BACKWARD) + loss
    if not len(backward):
        return None
    begin = next((int(i) for i in backward if names[i].startswith("aten.nll_loss")), None)
    if begin is None:
        return None
    again = np.flatnonzero(operators.phase[begin:] == Phase.FORWARD)
    end = begin + int(again[0]) if len(again) else len(names)
    own = [i for i in range(begin, end) if operators.module[i] == operators.module[product]]
    return (begin, own[-1] + 1) if own else None


def _gradients(tape: Tape, begin: int, end: int, module: int, num_weights: int, num_hidden: int) -> tuple[int, int]:
    """The last storages of the sizes of the weight's and of the hidden states' gradients that the head's backward pass makes."""
    born = tape.storages.operator
    found = np.flatnonzero((born >= begin) & (born < end) & (tape.operators.module[born] == module))
    weight = hidden = -1
    for storage in found.tolist():
        numbers = int(tape.storages.num_bytes[storage]) // _item_bytes(tape, int(born[storage]))
        if numbers % num_weights == 0:
            weight = storage
        elif numbers % num_hidden == 0:
            hidden = storage
    return weight, hidden


def _gone(anatomy: Anatomy, head: LossHead, module: int) -> tuple[int, ...]:
    tape = anatomy.tape
    born, sizes = tape.storages.operator, tape.storages.num_bytes
    least = _NEARLY * head.num_counted * head.num_classes * min(head.head_item_bytes, head.loss_item_bytes)
    is_own = tape.operators.module[born] == module
    forward = (born >= head.begin) & (born < head.loss_end)
    backward = (born >= head.back_begin) & (born < head.back_end)
    kept = np.isin(np.arange(len(born)), (head.weight_gradient, head.hidden_gradient))
    gone = ((forward | backward) & (sizes >= least) & ~is_own) | ((forward | backward) & is_own & ~kept)
    return tuple(np.flatnonzero(gone & (tape.storages.source == Source.TENSOR)).tolist())

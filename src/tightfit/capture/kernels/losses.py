"""Scratch memory of loss functions whose kernels write every element's loss before they reduce it.

Composite losses (cross entropy, L1, KL divergence) reach the capture as separate operators and need no rule.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.reductions import reduction_buffers
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, accumulate_size, num_bytes

aten = torch.ops.aten

_NO_REDUCTION = 0


def _elementwise_loss(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """mse, smooth L1, huber, BCE: the loss of every element, then its sum or mean (BinaryOps.cpp and Loss.cpp, `*_loss_out`)."""
    tensor, target = arguments["self"], arguments["target"]
    if arguments["reduction"] == _NO_REDUCTION:
        return
    shape = torch.broadcast_shapes(tensor.shape, target.shape)
    yield shape.numel() * tensor.element_size()
    # `tensor` stands in for the buffer of element losses, which does not exist here: that is right where both
    # have the same shape and strides.
    if shape == tensor.shape and tensor.is_contiguous():
        yield from reduction_buffers(tensor, (), accumulate_size(tensor.dtype), card)


def _logits_loss(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`binary_cross_entropy_with_logits` (Loss.cpp): log-sigmoid and the loss, and with pos_weight the log weights and one product."""
    size = num_bytes(arguments["self"])
    yield size
    yield size
    if arguments["pos_weight"] is not None:
        yield size
        yield size


def _ctc_backward(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`ctc_loss_backward_gpu_template` (LossCTC.cu): log_beta has the shape of log_alpha."""
    yield num_bytes(arguments["log_alpha"])


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (
        _elementwise_loss,
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
        ),
    ),
    (_logits_loss, (aten.binary_cross_entropy_with_logits.default,)),
    (_ctc_backward, (aten._ctc_loss_backward.default,)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}

"""Scratch memory of matrix products and of softmax: copies of operands whose strides the kernels cannot read.

cuBLAS reads a matrix that is dense along one of its two dimensions; anything else is copied first (`prepare_matrix_for_cublas`,
cuBlasCommonArgs.h; `prepare_batch_matrix_for_cublas`, Blas.cpp). The workspaces of the libraries are in `workspaces`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, contiguous_copy, num_bytes

aten = torch.ops.aten


def cublas_reads(tensor: torch.Tensor) -> bool:
    """Whether cuBLAS can read the last two dimensions with their strides."""
    rows, columns = tensor.shape[-2:]
    down, across = tensor.stride()[-2:]
    # A leading dimension smaller than the row would make rows overlap, as in an expanded matrix.
    if across == 1 and down >= max(1, columns):
        return True
    if down == 1 and across >= max(1, rows):
        return True
    return tensor.is_contiguous() and down != 0 and across != 0


def _operands(*names: str) -> Rule:
    def rule(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
        for name in names:
            tensor: torch.Tensor = arguments[name]
            if tensor.numel() and not cublas_reads(tensor):
                yield num_bytes(tensor)

    return rule


def _contiguous(*names: str) -> Rule:
    """Kernels that begin with `.contiguous()` on these arguments."""

    def rule(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
        for name in names:
            yield from contiguous_copy(arguments[name])

    return rule


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_operands("self", "mat2"), (aten.mm.default, aten.bmm.default)),
    (_operands("mat1", "mat2"), (aten.addmm.default, aten.addmm_.default, aten._addmm_activation.default)),
    (_operands("batch1", "batch2"), (aten.baddbmm.default, aten.baddbmm_.default)),
    # SoftMax.cu: host_softmax and host_softmax_backward.
    (_contiguous("self"), (aten._softmax.default, aten._log_softmax.default)),
    (
        _contiguous("grad_output", "output"),
        (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default),
    ),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}

"""Shape rules for fake tensors where torch's own are narrower than the CUDA kernels."""

from typing import Any

import torch
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.errors.private_names import version_of

aten = torch.ops.aten


# torch/_meta_registrations.py, `_meta_grouped_mm_common`, refuses all but bfloat16. Mixture-of-experts models
# in float32 or float16 would end there.
def _grouped_mm(
    fake_mode: FakeTensorMode,
    _operator: Any,
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`aten::_grouped_mm` in every dtype: the shape rule knows bfloat16 alone, the card multiplies group by group in the others.

    Rows are padded to 16 bytes (GroupedMMUtils.h, `create_grouped_gemm_output_tensor`).
    """
    dtype = out_dtype or first.dtype
    if first.dim() == 2 and second.dim() == 2:
        assert offs is not None
        size = [offs.size(0), first.size(0), second.size(1)]
    elif first.dim() == 2:
        size = [first.size(0), second.size(-1)]
    elif second.dim() == 2:
        size = [first.size(1), second.size(1)]
    else:
        size = [first.size(0), first.size(1), second.size(-1)]
    per_row = 16 // dtype.itemsize
    padded = (size[-1] + per_row - 1) // per_row * per_row
    stride = [padded, 1] if len(size) == 2 else [size[1] * padded, padded, 1]
    with fake_mode:
        return first.new_empty_strided(size, stride, dtype=dtype)


# torch/_meta_registrations.py has a rule for the fused LSTM cell and none for the GRU cell.
def _gru_cell(
    fake_mode: FakeTensorMode,
    _operator: Any,
    input_gates: torch.Tensor,
    _hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`aten::_thnn_fused_gru_cell`: the next state, and five values per hidden unit for the backward pass (RNN.cu, `GRU_WORKSPACE_MULTIPLIER`)."""
    with fake_mode:
        return torch.empty_like(hidden), hidden.new_empty(hidden.size(0), hidden.size(1) * 5)


def _gru_cell_backward(
    fake_mode: FakeTensorMode, _operator: Any, gradient: torch.Tensor, _workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """`aten::_thnn_fused_gru_cell_backward`: the gradients of both gates, of the state, and of the biases as sums of those."""
    batch, width = gradient.shape
    with fake_mode:
        gates = [gradient.new_empty(batch, 3 * width) for _ in range(2)]
        biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
        return (*gates, torch.empty_like(gradient), *biases)


# aten/src/ATen/native/cuda/Normalization.cu, for which torch has no rules: batch normalisation whose statistics are gathered from all ranks. What is
# of each channel is in float32 where the input is in half precision.
def _channels(
    fake_mode: FakeTensorMode, operator: Any, first: torch.Tensor, second: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor | None, ...]:
    values = second if operator is aten.batch_norm_backward_reduce.default else first
    dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
    with fake_mode:
        found = [values.new_empty(values.size(1), dtype=dtype) for _ in range(2)]
        if operator is not aten.batch_norm_backward_reduce.default:
            return tuple(found)
        weight, wants = _[2], _[3:]
        like = values.dtype if weight is None else weight.dtype
        gradients = [values.new_empty(values.size(1), dtype=like) if wanted else None for wanted in wants[1:]]
        return (*(found if wants[0] else (None, None)), *gradients)


def _like_values(
    fake_mode: FakeTensorMode, operator: Any, first: torch.Tensor, second: Any, *_: Any, **__: Any
) -> torch.Tensor:
    """The normalised values, or the gradient of the input."""
    with fake_mode:
        return torch.empty_like(second if operator is aten.batch_norm_backward_elemt.default else first)


# aten/src/ATen/native/cuda/Fused{Sgd,Adam,AdamW,Adagrad}Kernel.cu write to the lists they are given and return nothing. torch has a rule for Adam
# and AdamW alone, and none where the learning rate is a tensor.
_FUSED_OPTIMIZERS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def _updates_in_place(_fake_mode: FakeTensorMode, _operator: Any, *_args: Any, **_kwargs: Any) -> None:
    return None


def install() -> None:
    """Registers the rules for fake tensors of this process."""
    for name in _FUSED_OPTIMIZERS:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            register_op_impl(getattr(packet, overload))(_updates_in_place)
    for name in ("batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_backward_reduce"):
        register_op_impl(getattr(aten, name).default)(_channels)
    for name in ("batch_norm_elemt", "batch_norm_backward_elemt"):
        register_op_impl(getattr(aten, name).default)(_like_values)
    # Looked up by torch/_subclasses/fake_tensor.py before the meta kernels (`op_implementations_checks`).
    if version_of("torch") >= (2, 8):
        register_op_impl(aten._grouped_mm.default)(_grouped_mm)
    register_op_impl(aten._thnn_fused_gru_cell.default)(_gru_cell)
    register_op_impl(aten._thnn_fused_gru_cell_backward.default)(_gru_cell_backward)

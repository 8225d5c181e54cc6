"""Which class an operator belongs to, by its name: operators of one class reach about the same fraction of a card's peak.

Names are those of a tape, `aten.addmm` or `aten.add_.Tensor`. What no rule knows is `other`, and is taken for a kernel that reads
its inputs and writes its outputs once.
"""

import functools

from tightfit.devices.calibration import OperatorClass

TENSOR_CORE_CLASSES: frozenset[OperatorClass] = frozenset({"matmul", "convolution", "attention"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MATMUL = _names(
    """mm addmm bmm baddbmm addbmm matmul linear mv addmv dot vdot einsum
    _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm _addmm_activation"""
)
_EMBEDDING = _names(
    """embedding embedding_dense embedding_renorm _embedding_bag index index_select index_add index_copy index_fill index_put
    _index_put_impl gather scatter scatter_add scatter_reduce take masked_select"""
)
_COPY = _names(
    """copy _to_copy clone cat stack contiguous fill zero zeros ones full roll flip repeat constant_pad_nd
    zeros_like ones_like full_like new_zeros _foreach_copy _foreach_zero"""
)
_REDUCTION = _names(
    """sum mean amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp cumsum cumprod norm
    linalg_vector_norm _softmax _log_softmax softmax log_softmax nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward mse_loss"""
)
_ELEMENTWISE = _names(
    """add sub rsub mul div neg abs exp log log1p sqrt rsqrt reciprocal pow square sin cos tanh sigmoid erf sign sgn floor round
    relu gelu silu leaky_relu elu mish hardtanh hardswish hardsigmoid softplus threshold glu clamp clamp_min clamp_max
    where masked_fill tril triu dropout native_dropout bernoulli normal uniform addcmul addcdiv lerp maximum minimum
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not"""
)


@functools.cache
def operator_class(name: str) -> OperatorClass:
    """The class of the operator `name`, such as `matmul` for `aten.addmm`."""
    base = name.split(".")[1] if "." in name else name
    base = base.rstrip("_")
    if "attention" in base or "flash_attn" in base:
        return "attention"
    if "conv" in base and "convert" not in base:
        return "convolution"
    if base in _COPY:
        return "copy"
    if base.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")):
        return "optimizer"
    if any(kind in base for kind in ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")):
        return "normalisation_backward" if "backward" in base else "normalisation"
    return _by_table(base)


def _by_table(base: str) -> OperatorClass:
    forward = base.removesuffix("_backward_data").removesuffix("_backward")
    tables: tuple[tuple[OperatorClass, frozenset[str]], ...] = (
        ("matmul", _MATMUL),
        ("embedding", _EMBEDDING),
        ("reduction", _REDUCTION),
        ("elementwise", _ELEMENTWISE),
    )
    for name, members in tables:
        if base in members or forward in members:
            return name
    return "other"

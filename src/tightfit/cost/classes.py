"""The class of an operator by its name: operators of one class reach about the same fraction of a GPU's peak.

Names are those of a tape, `aten.addmm` or `aten.add_.Tensor`. An unknown operator is `other`, taken for a kernel that reads its inputs and writes
its outputs once.
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
    zeros_like ones_like full_like new_zeros new_ones new_full slice_backward select_backward arange scalar_tensor
    _foreach_copy _foreach_zero"""
)
_REDUCTION = _names(
    """sum mean amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp cumsum cumprod norm
    linalg_vector_norm _softmax _safe_softmax _log_softmax softmax log_softmax nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward mse_loss"""
)
_ELEMENTWISE = _names(
    """add sub rsub mul div neg abs exp log log1p sqrt rsqrt reciprocal pow square sin cos tanh sigmoid erf sign sgn floor round
    relu gelu silu leaky_relu elu mish hardtanh hardswish hardsigmoid softplus threshold glu clamp clamp_min clamp_max
    where masked_fill tril triu dropout native_dropout bernoulli normal uniform randn rand randint addcmul addcdiv lerp maximum minimum
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not"""
)


_TABLES: tuple[tuple[OperatorClass, frozenset[str]], ...] = (
    ("matmul", _MATMUL),
    ("embedding", _EMBEDDING),
    ("copy", _COPY),
    ("reduction", _REDUCTION),
    ("elementwise", _ELEMENTWISE),
)
# Fragments are tried before the tables and in this order, because backends, vendors and versions add prefixes and suffixes
# (_scaled_dot_product_flash_attention_backward, cudnn_convolution_add_relu).
_FRAGMENTS: tuple[tuple[OperatorClass, tuple[str, ...]], ...] = (
    ("attention", ("attention", "flash_attn")),
    ("convolution", ("convolution", "conv1d", "conv2d", "conv3d", "conv_")),
    # A recurrent layer of cuDNN spends its time in matmuls over all gates at once.
    ("matmul", ("_rnn", "lstm", "gru")),
    ("normalisation", ("layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm")),
    ("optimizer", ("_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")),
)
_LOOKUP = _names(
    "embedding index index_select gather take masked_select nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward"
)
# Zeros, but for one number per target (aten/src/ATen/native/cuda/Loss.cu); the log-probabilities, its second input, are not read.
_ONLY_WRITES = _names("nll_loss_backward nll_loss2d_backward")
_SCATTERS = _names("scatter_ scatter_add_ scatter_reduce_ index_put_ _index_put_impl_ index_add_ index_copy_")
_NO_KERNEL = _names(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize set record_stream detach"
)


@functools.cache
def operator_class(name: str) -> OperatorClass:
    """The class of the operator `name`, such as `matmul` for `aten.addmm`."""
    base = _base(name)
    # Channels are long, so that a pass over them streams; rows of layer normalisation are short.
    if "batch_norm" in base:
        return "elementwise"
    for kind, fragments in _FRAGMENTS:
        if any(fragment in base for fragment in fragments):
            # Backward passes of normalisation reach a lower fraction (0.37 against 0.54), as they reduce over rows and over columns.
            return "normalisation_backward" if kind == "normalisation" and "backward" in base else kind
    # `gelu_backward` and `_softmax_backward_data` move data as their forwards do.
    forward = base.removesuffix("_backward_data").removesuffix("_backward")
    for kind, members in _TABLES:
        if base in members or forward in members:
            return kind
    # _foreach_ operators come from torch.optim and clip_grad_norm_.
    return "optimizer" if base.startswith("_foreach_") else "other"


@functools.cache
def runs_kernel(name: str) -> bool:
    """Whether the operator launches a kernel: `aten.empty_like` only allocates."""
    return _base(name) not in _NO_KERNEL


@functools.cache
def is_lookup(name: str) -> bool:
    """Whether the operator reads only as much of its input as it writes, as an embedding does of its table."""
    return _base(name) in _LOOKUP


@functools.cache
def only_writes(name: str) -> bool:
    """Whether the operator reads next to nothing of its inputs, large as they are."""
    return _base(name) in _ONLY_WRITES


@functools.cache
def is_scatter(name: str) -> bool:
    """Whether the operator writes only the rows of its first input that it is given values for, in place."""
    return (name.split(".")[1] if "." in name else name) in _SCATTERS


@functools.cache
def passes_over(name: str) -> float:
    """How often the operator moves each of its bytes, or takes as long as if it did.

    Batch normalisation in training reads its input for the statistics and again to normalise, and its backward pass input and gradient for the sums and again
    (aten/src/ATen/native/cuda/Normalization.cuh); the sums take a little longer than their reading.
    """
    if sums_channels(name):
        return 2.0 if "backward" in _base(name) else 1.6
    return 1.0


@functools.cache
def sums_channels(name: str) -> bool:
    """Whether the operator is batch normalisation in training."""
    base = _base(name)
    return "batch_norm" in base and "no_training" not in base


@functools.cache
def is_pointwise_of_two(name: str) -> bool:
    """Whether the operator combines two tensors element by element: where these differ in shape or type its kernel cannot load whole vectors."""
    return _base(name) in ("add", "sub", "mul", "div") and name.endswith(".Tensor")


def _base(name: str) -> str:
    """`add` of `aten.add_.Tensor`."""
    return (name.split(".")[1] if "." in name else name).rstrip("_")

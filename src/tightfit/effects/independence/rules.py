"""Rules of `row_flow`: for each operator the layout of the rows in its result, or an error that rows are mixed.

A rule is not called for operators without rows among their inputs, and views need none. An operator without a rule counts as mixing rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.effects.independence.row_flow import Flow, OperatorCall, Result, Rule
from tightfit.effects.independence.row_states import UNIFORM, Uniform
from tightfit.effects.independence.rows import Mixes, RowLayout

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the operators in `names`, separated by spaces."""

    def enter(function: Rule) -> Rule:
        for name in names.split():
            RULES[name] = function
        return function

    return enter


@rule(
    """pointwise copy clone _to_copy zeros_like ones_like empty_like full_like rand_like randn_like fill zero masked_fill where lift_fresh_copy
    bernoulli native_dropout uniform normal exponential clamp nan_to_num fake_quantize_per_tensor_affine isclose _fused_dropout
    contiguous complex polar resolve_conj resolve_neg prelu _prelu_kernel rrelu_with_noise glu_pointwise _conj_physical lerp addcmul addcdiv
    conj_physical nan_to_num logical_not hardswish log_sigmoid_forward floor_divide special_i0 rsub"""
)
def pointwise(flow: Flow, call: OperatorCall) -> Result:
    """Elementwise operators, with broadcasting."""
    out = call.outputs[0]
    found = flow.rows.broadcast(call.tensors, out.dim())
    if found is None:
        others = [t for t in call.tensors if not flow.rows.is_uniform(t) and t.dim()]
        if others and any(flow.rows.is_uniform(t) for t in call.tensors):
            raise Mixes("combines a tensor sized by the number of rows with another")
        return UNIFORM if any(flow.rows.is_uniform(t) for t in call.tensors) else None
    return [found if o.dim() == out.dim() else None for o in call.outputs]


@rule("new_zeros new_ones new_full new_empty new_empty_strided")
def new(flow: Flow, call: OperatorCall) -> Result:
    """A factory that takes only dtype and device from a tensor."""
    found: list[RowLayout | Uniform | None] = []
    for number, output in enumerate(call.outputs):
        # The tensor that it is called on is not read, so it counts as an operator without inputs.
        found.append(flow._constant(call, output, number))
    return found


@rule("squeeze unsqueeze t transpose swapaxes swapdims detach as_strided")
def same_memory(flow: Flow, call: OperatorCall) -> Result:
    """In-place views: the same memory with another shape."""
    return [flow.rows.layout(output) for output in call.outputs]


def dims_of(value: Any, num_dims: int) -> list[int] | None:
    """The given dimensions, counted from the front; None for all."""
    dims = [d for d in tree_leaves(value) if d is not None]
    return sorted({d % max(1, num_dims) for d in dims}) if dims else None


def worked_on(
    flow: Flow, call: OperatorCall, name: str = "dim", subject: str = "self"
) -> tuple[RowLayout | None, list[int]]:
    """The layout of the rows in the first tensor, and the dimensions that the operator works along.

    Raises:
        Mixes: it works along the rows.
    """
    tensor = call[subject]
    if any(flow.rows.is_uniform(t) for t in call.tensors):
        raise Mixes("reduces a tensor sized by the number of rows")
    dims = dims_of(call.get(name), tensor.dim())
    dims = list(range(tensor.dim())) if dims is None else dims
    layout = flow.rows.layout(tensor)
    if layout is not None and layout.dim in dims:
        raise Mixes("works along the rows")
    return layout, dims


def only(flow: Flow, call: OperatorCall, *names: str) -> None:
    """Raises Mixes if rows are in arguments other than `names`."""
    mine = {id(t) for n in names for t in tree_leaves(call.get(n)) if isinstance(t, torch.Tensor)}
    for tensor in call.tensors:
        if id(tensor) not in mine and (flow.rows.is_uniform(tensor) or flow.rows.layout(tensor) is not None):
            raise Mixes("has rows in an argument that all rows share")


@rule(
    """sum mean amax amin prod all any var std logsumexp linalg_vector_norm norm argmax argmin max min median nanmedian mode kthvalue nansum
    std_mean var_mean aminmax count_nonzero"""
)
def reduction(flow: Flow, call: OperatorCall) -> Result:
    """Reductions over other dimensions than the rows'; `max` and `min` of two tensors are pointwise."""
    if call.name in ("max", "min") and isinstance(call.get("other"), torch.Tensor):
        return pointwise(flow, call)
    only(flow, call, "self")
    layout, dims = worked_on(flow, call)
    if layout is None or call.get("keepdim", False):
        return layout
    return layout.at(layout.dim - sum(d < layout.dim for d in dims))


@rule(
    """_softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp glu topk sort argsort flip diff _cummax_helper
    tril_along"""
)
def along(flow: Flow, call: OperatorCall) -> Result:
    """Operators along other dimensions than the rows' that keep the shape."""
    only(flow, call, "self")
    if "dims" in call.arguments:
        return worked_on(flow, call, "dims")[0]
    return worked_on(flow, call)[0]


@rule("_softmax_backward_data _log_softmax_backward_data")
def along_both(flow: Flow, call: OperatorCall) -> Result:
    """The gradient of a softmax, whose code differentiates itself: of its result and what arrives for it."""
    output = call["output"]
    layout = flow.rows.broadcast([call["grad_output"], output], output.dim())
    if layout is None or flow.rows.layout(output) is None or layout.dim == call["dim"] % output.dim():
        raise Mixes("works along the rows")
    return layout


@rule("renorm")
def renorm(flow: Flow, call: OperatorCall) -> Result:
    """Norms over all dimensions but the one that is named."""
    layout = flow.rows.layout(call["self"])
    if layout is None or layout.dim != call["dim"] % call["self"].dim():
        raise Mixes("takes norms along the rows")
    return layout


@rule("roll")
def roll(flow: Flow, call: OperatorCall) -> Result:
    """Rolls the named dimensions; without any, the tensor is flattened first."""
    return worked_on(flow, call, "dims")[0]


@rule("tril triu")
def triangle(flow: Flow, call: OperatorCall) -> Result:
    """Triangles of the last two dimensions."""
    return behind(flow, call["self"], 2)


def behind(flow: Flow, tensor: torch.Tensor, num_last: int) -> RowLayout | None:
    """The layout of the rows in a tensor whose last `num_last` dimensions are worked along."""
    if flow.rows.is_uniform(tensor):
        raise Mixes("works on a tensor sized by the number of rows")
    layout = flow.rows.layout(tensor)
    if layout is not None and layout.dim >= tensor.dim() - num_last:
        raise Mixes("works along the rows")
    return layout


_NUM_SPATIAL = {
    2: """max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
    _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d fractional_max_pool2d im2col
    adaptive_avg_pool2d max_pool2d lppool2d mkldnn_max_pool2d""",
    3: """max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d upsample_trilinear3d
    _upsample_nearest_exact3d reflection_pad3d replication_pad3d adaptive_avg_pool3d pixel_shuffle pixel_unshuffle max_pool3d""",
    1: "max_pool1d upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d avg_pool1d",
}


def _spatial(num_last: int) -> Rule:
    def pool(flow: Flow, call: OperatorCall) -> Result:
        """Pooling, resampling and padding of the last dimensions."""
        (first, *_) = call.tensors
        only(flow, call, "self", "input")
        return [behind(flow, first, num_last)] * len(call.outputs)

    return pool


for _number, _names in _NUM_SPATIAL.items():
    rule(_names)(_spatial(_number))


@rule("constant_pad_nd")
def pad(flow: Flow, call: OperatorCall) -> Result:
    """Pads other dimensions than the rows'."""
    layout, padding = flow.rows.layout(call["self"]), call["pad"]
    if layout is not None:
        # The list of paddings begins with the last dimension.
        at = 2 * (call["self"].dim() - 1 - layout.dim)
        if any(padding[at : at + 2]):
            raise Mixes("pads the rows")
    return layout


@rule("cat concat concatenate")
def cat(flow: Flow, call: OperatorCall) -> Result:
    """Concatenates along another dimension; all tensors have their rows in the same dimension."""
    # torch.cat ignores tensors of shape (0,), whatever the dimensions of the others.
    tensors = [t for t in call["tensors"] if t.dim() > 1 or t.numel()]
    found = flow.rows.broadcast(tensors, call.outputs[0].dim())
    if found is not None and call.get("dim", 0) % call.outputs[0].dim() == found.dim:
        raise Mixes("concatenates along the rows")
    if found is None:
        raise Mixes("joins tensors sized by the number of rows")
    return found


@rule("stack")
def stack(flow: Flow, call: OperatorCall) -> Result:
    """Stacks along a new dimension."""
    tensors = call["tensors"]
    found = flow.rows.broadcast(tensors, tensors[0].dim())
    if found is None:
        raise Mixes("joins tensors sized by the number of rows")
    return found.at(found.dim + (call.get("dim", 0) % (tensors[0].dim() + 1) <= found.dim))


@rule("repeat")
def repeat(flow: Flow, call: OperatorCall) -> Result:
    """Along other dimensions."""
    layout, times = flow.rows.layout(call["self"]), call["repeats"]
    if layout is None:
        raise Mixes("repeats a tensor sized by the number of rows")
    dim = layout.dim + len(times) - call["self"].dim()
    if times[dim] != 1:
        raise Mixes("repeats rows")
    return layout.at(dim)


@rule("native_layer_norm _fused_rms_norm rms_norm layer_norm")
def layer_norm(flow: Flow, call: OperatorCall) -> Result:
    """Over the last dimensions."""
    only(flow, call, "input")
    return behind(flow, call["input"], len(call["normalized_shape"]))


@rule("native_layer_norm_backward")
def layer_norm_backward(flow: Flow, call: OperatorCall) -> Result:
    """The gradient of its input, whose code differentiates itself; those of weights are sums over rows."""
    only(flow, call, "grad_out", "input", "mean", "rstd")
    layout = behind(flow, call["input"], len(call["normalized_shape"]))
    if any(call["output_mask"][1:]) or layout is None:
        raise Mixes("sums over the rows")
    flow.rows.broadcast([call["grad_out"], call["input"]], call["input"].dim())
    return layout


@rule("native_group_norm group_norm")
def group_norm(flow: Flow, call: OperatorCall) -> Result:
    """Group norm, over all dimensions but the first."""
    only(flow, call, "input")
    layout = flow.rows.layout(call["input"])
    if layout is not None and layout.dim:
        raise Mixes("takes the norm over rows")
    return layout


@rule(
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training cudnn_batch_norm
    miopen_batch_norm _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional"""
)
def batch_norm(flow: Flow, call: OperatorCall) -> Result:
    """Batch norm: pointwise with given statistics; with those of the batch per channel, and rows may be channels (instance norm)."""
    subject = call["input"]
    rest = [t for n in ("weight", "bias", "running_mean", "running_var") if isinstance(t := call.get(n), torch.Tensor)]
    layout = flow.rows.layout(subject)
    trains = call.get("training", "no_training" not in call.name and "no_update" not in call.name)
    if layout is None:
        raise Mixes("has rows in its statistics")
    if layout.dim == 1:
        for tensor in rest:
            if flow.rows.layout(tensor) != layout.at(0) and len(tensor) != 1:
                raise Mixes("combines rows with a tensor that varies along them")
    elif trains or any(flow.rows.layout(t) is not None for t in rest):
        raise Mixes("takes statistics over the rows")
    # Instance norm is a batch norm of (1, batch * channels, ...) in torch (Normalization.cpp, `instance_norm`):
    # there the rows are channels, and statistics are their own.
    statistics = layout.at(0) if layout.dim == 1 else None
    return [layout, *[statistics if o.dim() == 1 and o.dtype != torch.uint8 else None for o in call.outputs[1:]]]


@rule("convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable conv_depthwise3d")
def convolution(flow: Flow, call: OperatorCall) -> Result:
    """Each image by itself; rows in a spatial dimension only where the kernel has size 1 there."""
    subject = call.tensors[0]
    only(flow, call, "input", "self")
    layout, weight = flow.rows.layout(subject), call["weight"]
    if layout is None or flow.rows.is_uniform(subject):
        raise Mixes("convolves a tensor sized by the number of rows")
    # An input without a batch dimension, or rows that a grouped convolution would take for channels.
    if subject.dim() != weight.dim() or layout.dim == 1:
        raise Mixes("mixes channels")
    if layout.dim > 1:
        at = layout.dim - 2
        geometry = [
            tree_leaves(call.get(n))[at % len(tree_leaves(call.get(n)))]
            for n in ("stride", "padding", "output_padding")
            if call.get(n)
        ]
        if weight.shape[layout.dim] != 1 or any(g != d for g, d in zip(geometry, (1, 0, 0), strict=False)):
            raise Mixes("mixes neighbouring rows")
    return layout


@rule("embedding")
def embedding(flow: Flow, call: OperatorCall) -> Result:
    """Looks up a row of the table for each index."""
    only(flow, call, "indices")
    # The counts are over the indices of one call, which for a part are fewer.
    if call.get("scale_grad_by_freq"):
        raise Mixes("divides gradients by how often a row is looked up")
    layout = flow.rows.layout(call["indices"])
    if layout is None:
        raise Mixes("indexes with or into a tensor sized by the number of rows")
    return layout


@rule("_fft_r2c _fft_c2r _fft_c2c fft_r2c")
def fft(flow: Flow, call: OperatorCall) -> Result:
    """Along other dimensions."""
    return worked_on(flow, call)[0]


@rule("nll_loss_forward nll_loss2d_forward")
def nll_loss(flow: Flow, call: OperatorCall) -> Result:
    """Unreduced."""
    only(flow, call, "self", "target")
    layout, target = flow.rows.layout(call["self"]), flow.rows.layout(call["target"])
    # A reduced loss takes rows together; sums and means that parts can be put together for are met before the
    # rules (`totals`).
    if call["reduction"] != 0 or layout is None or layout.dim == 1:
        raise Mixes("reduces over the rows")
    # The target has no class dimension, which is dimension 1 of the scores.
    expected = layout if not layout.dim else layout.at(layout.dim - 1)
    if target != expected:
        raise Mixes("compares rows with other rows")
    return [expected, *[None] * (len(call.outputs) - 1)]


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss binary_cross_entropy_with_logits")
def element_loss(flow: Flow, call: OperatorCall) -> Result:
    """Unreduced."""
    if call.get("reduction", 1) != 0:
        raise Mixes("reduces over the rows")
    return pointwise(flow, call)


@rule("grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback grid_sampler cudnn_grid_sampler")
def grid(flow: Flow, call: OperatorCall) -> Result:
    """Samples each image with its own grid."""
    found = [flow.rows.layout(t) for t in call.tensors]
    if any(layout != found[0] for layout in found) or found[0] is None or found[0].dim:
        raise Mixes("samples from another row")
    return found[0]

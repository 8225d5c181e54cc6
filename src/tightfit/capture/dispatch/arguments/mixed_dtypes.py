"""What operators on a card ask of the dtypes of their arguments beside each other, and torch's kernels for shapes alone do not look at.

The words are those of the CUDA kernels, seen on an H200 under torch 2.11 and read in torch 2.13.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.refusals import (
    Check,
    is_on_card,
    name,
    name_in_c,
    refuse_unless,
    type_of,
)

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)
_POSITIONS = (torch.int64, torch.int32)
_INDICES = (*_POSITIONS, *_MASKS)
_NO_DIFFERENCE_OF_BOOLS = "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or `logical_xor()` operator instead."


def _expected(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"expected scalar type {name(one.dtype)} but found {name(other.dtype)}"


def _alike(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    refuse_unless(args[0].dtype == args[1].dtype, _expected(args[0], args[1]))


def _is_dense(tensor: torch.Tensor) -> bool:
    # Products with sparse matrices have kernels of their own.
    return tensor.layout is torch.strided


def _product(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    one, other = args
    if _is_dense(one) and _is_dense(other):
        names = [name_in_c(t.dtype) for t in args]
        same = one.dtype == other.dtype
        refuse_unless(same, f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}")


def _added_product(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    added, one, other = args[:3]
    if all(map(_is_dense, args[:3])):
        a, b, c = name(added.dtype), name(one.dtype), name(other.dtype)
        refuse_unless(a == c, f"self and mat2 must have the same dtype, but got {a} and {c}")
        refuse_unless(b == c, f"mat1 and mat2 must have the same dtype, but got {b} and {c}")


def _convolution(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    given = {"input": args[0], "weight": args[1], "bias": args[2]}
    types = {whose: type_of(tensor) for whose, tensor in given.items() if tensor is not None}
    for whose, found in types.items():
        words = f"Input type ({types['input']}) and {whose} type ({found}) should be the same"
        refuse_unless(found == types["input"], words)


def _class_loss(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    scores, target, weight = args[:3]
    found = name(target.dtype)
    refuse_unless(found in ("Long", "Byte"), f"expected target dtype to be Long or Byte, but got {found}")
    # The kernel for images reads int64 alone (NLLLoss2d.cu).
    refuse_unless(found == "Long" or target.dim() < 2, f"expected scalar type Long but found {found}")
    if weight is not None:
        refuse_unless(
            weight.dtype == scores.dtype, f"expected scalar type {name(scores.dtype)} but found {name(weight.dtype)}"
        )


def _binary_loss(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    scores, target = args[:2]
    refuse_unless(scores.dtype == target.dtype, f"Found dtype {name(target.dtype)} but expected {name(scores.dtype)}")


def _logits_loss(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    """aten/src/ATen/native/Loss.cpp: `(1 - target).mul_(input)`."""
    scores, target = args[:2]
    refuse_unless(target.dtype != torch.bool, _NO_DIFFERENCE_OF_BOOLS)
    result = torch.result_type(target, scores)
    words = f"result type {name(result)} can't be cast to the desired output type {name(target.dtype)}"
    refuse_unless(torch.can_cast(result, target.dtype), words)


def _soft_margin_backward(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    """aten/src/ATen/native/Loss.cpp: `at::exp(-target * input)`."""
    words = "Negation, the `-` operator, on a bool tensor is not supported. If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
    refuse_unless(args[2].dtype != torch.bool, words)


def _huber_backward(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    """aten/src/ATen/native/Loss.cpp: the iterator of this backward pass promotes nothing, as those of the other losses do."""
    grad, scores, target = args[:3]
    for other in (target, grad):
        words = f"Found dtype {name(other.dtype)} but expected {name(scores.dtype)}"
        refuse_unless(other.dtype == scores.dtype, words)


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    written, indices, values = args[:3]
    given = [index.dtype for index in indices if index is not None]
    refuse_unless(
        all(dtype in _INDICES for dtype in given),
        "tensors used as indices must be long, int, byte or bool tensors",
        IndexError,
    )
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    # One value of the host is filled in behind a mask, in whatever dtype.
    is_filled = values.numel() == 1 and not is_on_card(values) and all(dtype in _MASKS for dtype in given)
    if accumulates:
        refuse_unless(written.dtype == values.dtype, _expected(written, values))
    elif not is_filled:
        refuse_unless(
            written.dtype == values.dtype,
            f"Index put requires the source and destination dtypes match, got {name(written.dtype)} for the destination and {name(values.dtype)} for the source.",
        )


def _index_add(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    written, index, source = args[0], args[2], args[3]
    words = f"index_add_(): Expected dtype int32/int64 for index but got: {name(index.dtype)}"
    refuse_unless(index.dtype in _POSITIONS, words)
    refuse_unless(
        written.dtype == source.dtype,
        f"index_add_(): self ({name(written.dtype)}) and source ({name(source.dtype)}) must have the same scalar type",
    )


def _index_copy(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    written, index, source = args[0], args[2], args[3]
    words = f"index_copy_(): Expected a long tensor for index, but got {name(index.dtype)}"
    refuse_unless(index.dtype == torch.int64, words)
    refuse_unless(
        written.dtype == source.dtype,
        f"index_copy_(): self and source expected to have the same dtype, but got (self) {name(written.dtype)} and (source) {name(source.dtype)}",
    )


def _in_place(args: Sequence[Any], _: Mapping[str, Any], *, divides: bool) -> None:
    written, other = args[:2]
    result = torch.result_type(written, other)
    if divides and not (result.is_floating_point or result.is_complex):
        result = torch.get_default_dtype()
    refuse_unless(
        torch.can_cast(result, written.dtype),
        f"result type {name(result)} can't be cast to the desired output type {name(written.dtype)}",
    )


def _added_batches(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    added, one, other = (name(tensor.dtype) for tensor in args[:3])
    refuse_unless(added == other, f"self and mat2 must have the same dtype, but got {added} and {other}")
    refuse_unless(one == other, f"mat1 and mat2 must have the same dtype, but got {one} and {other}")


def _dot(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    one, other = (name(tensor.dtype) for tensor in args[:2])
    refuse_unless(one == other, f"dot : expected both vectors to have same dtype, but found {one} and {other}")


def _normalised(args: Sequence[Any], _: Mapping[str, Any], *, first: int) -> None:
    """Layers and groups: weight and bias are of the input's dtype."""
    for parameter in args[first : first + 2]:
        if parameter is not None:
            refuse_unless(parameter.dtype == args[0].dtype, _expected(args[0], parameter))


def _batch_normalised(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    """Batches in training: weight and bias are of one dtype, the input's, or float32 where that is half."""
    given, weight, bias = args[:3]
    if not args[5] or weight is None:
        return
    halves = (torch.float16, torch.bfloat16)
    if given.dtype in halves and weight.dtype != given.dtype:
        refuse_unless(weight.dtype == torch.float32, f"Expected weight to have type Float but got {name(weight.dtype)}")
    pairs = [("#1 'input'", given, "#2 'weight'", weight)] if given.dtype not in halves else []
    pairs += [("#2 'weight'", weight, "#3 'bias'", bias)] if bias is not None else []
    for one_name, one, other_name, other in pairs:
        refuse_unless(
            one.dtype == other.dtype,
            f"Expected tensor for argument {one_name} to have the same type as tensor for argument {other_name}; but type "
            f"{type_of(one)} does not equal {type_of(other)} (while checking arguments for cudnn_batch_norm)",
        )


def _difference(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    dtypes = [torch.bool if type(arg) is bool else getattr(arg, "dtype", None) for arg in args[:2]]
    refuse_unless(dtypes != [torch.bool, torch.bool], _NO_DIFFERENCE_OF_BOOLS)
    refuse_unless(
        torch.bool not in dtypes,
        "Subtraction, the `-` operator, with a bool tensor is not supported. If you are trying to invert a mask, use the `~` or `logical_not()` operator instead.",
    )


def _difference_in_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    _difference(args, kwargs)
    _in_place(args, kwargs, divides=False)


def _added_quotients(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    are_whole = [not (arg.is_floating_point() or arg.is_complex()) for arg in args[1:3]]
    refuse_unless(
        not all(are_whole),
        "Integer division with addcdiv is no longer supported, and in a future  release addcdiv will perform a true division of "
        "tensor1 and tensor2. The historic addcdiv behavior can be implemented as (input + value * torch.trunc(tensor1 / "
        "tensor2)).to(input.dtype) for integer inputs and as (input + value * tensor1 / tensor2) for float inputs.",
    )


def _added_in_place(args: Sequence[Any], kwargs: Mapping[str, Any], *, divides: bool) -> None:
    if divides:
        _added_quotients(args, kwargs)
    result = functools.reduce(torch.promote_types, (arg.dtype for arg in args[:3]))
    refuse_unless(
        torch.can_cast(result, args[0].dtype),
        f"result type {name(result)} can't be cast to the desired output type {name(args[0].dtype)}",
    )


def _masked_select(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    refuse_unless(args[1].dtype == torch.bool, "masked_select: expected BoolTensor for mask")


def _masked_scatter(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    found = name_in_c(args[1].dtype)
    words = f"masked_scatter_ only supports boolean masks, but got mask with dtype {found}"
    refuse_unless(args[1].dtype == torch.bool, words)


def _index_select(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    words = f"\"index_select_out_cuda_impl\" not implemented for '{name(args[2].dtype)}'"
    refuse_unless(args[2].dtype in _POSITIONS, words, NotImplementedError)


def _index_fill(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    words = "index_fill_(): Expected dtype int64 for index."
    refuse_unless(args[2].dtype == torch.int64, words, IndexError)


def _long_targets(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    found = name(args[1].dtype)
    refuse_unless(args[1].dtype == torch.int64, f"expected scalar type Long but found {found}")


MIXED: dict[OpOverload, Check] = {
    aten.mm.default: _product,
    aten.addmm.default: _added_product,
    aten.bmm.default: _alike,
    aten.addbmm.default: _added_batches,
    aten.mv.default: _alike,
    aten.dot.default: _dot,
    aten._cdist_forward.default: _alike,
    aten.grid_sampler_2d.default: _alike,
    aten.grid_sampler_3d.default: _alike,
    aten.convolution.default: _convolution,
    aten.native_layer_norm.default: functools.partial(_normalised, first=2),
    aten.native_group_norm.default: functools.partial(_normalised, first=1),
    aten.native_batch_norm.default: _batch_normalised,
    # Up to torch 2.12 it is chosen before the operator is called.
    aten.cudnn_batch_norm.default: _batch_normalised,
    aten.nll_loss_forward.default: _class_loss,
    aten.nll_loss2d_forward.default: _class_loss,
    aten.multi_margin_loss.default: _long_targets,
    aten.multilabel_margin_loss_forward.default: _long_targets,
    aten.binary_cross_entropy.default: _binary_loss,
    aten.binary_cross_entropy_with_logits.default: _logits_loss,
    aten.huber_loss_backward.default: _huber_backward,
    aten.soft_margin_loss_backward.default: _soft_margin_backward,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_copy_.default: _index_copy,
    aten.index_select.default: _index_select,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill_.int_Scalar: _index_fill,
    aten.masked_select.default: _masked_select,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_.default: _masked_scatter,
    aten.add_.Tensor: functools.partial(_in_place, divides=False),
    aten.mul_.Tensor: functools.partial(_in_place, divides=False),
    aten.div_.Tensor: functools.partial(_in_place, divides=True),
    aten.sub_.Tensor: _difference_in_place,
    aten.sub.Tensor: _difference,
    aten.rsub.Scalar: _difference,
    aten.rsub.Tensor: _difference,
    aten.addcdiv.default: _added_quotients,
    aten.addcdiv_.default: functools.partial(_added_in_place, divides=True),
    aten.addcmul_.default: functools.partial(_added_in_place, divides=False),
}
"""The check of each operator that asks for dtypes that go together."""

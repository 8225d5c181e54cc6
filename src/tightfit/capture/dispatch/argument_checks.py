"""What operators on a card ask of the dtypes and devices of their arguments, and torch's kernels for shapes alone do not look at.

Without these checks a program that ends in its first forward pass (a model in half precision that is given float32, images of bytes, targets of
int32) would be traced to its end, and said to fit. The words are those of the CUDA kernels of torch 2.13. Left out is what is not known of them for certain:
normalisations with parameters of another dtype, and what only the kernels of the host lack.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors.faults import for_torch

aten = torch.ops.aten

Check = Callable[[Sequence[Any], Mapping[str, Any]], None]

_KINDS = (FakeTensor, torch.Tensor, torch.nn.Parameter)
_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
# As C++ prints what a tensor's `dtype()` returns.
_OF_C = {"Half": "c10::Half", "BFloat16": "c10::BFloat16", "Long": "long int", "Int": "int", "Byte": "unsigned char"}


GENERATORS: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()
"""The generators that the program has made, which say what device they are for, by their address in C++: an operator may be given another object for one."""


def check_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of a call as the operator's CUDA kernel does.

    Raises:
        RuntimeError: the kernel would refuse them, with its words.
    """
    check = _CHECKS.get(operator)
    if check is not None and not any(map(_stands_in, args)):
        check(args, kwargs)


def _stands_in(value: Any) -> bool:
    """Whether a value stands in for a tensor, which it computes when it is asked for its dtype. Its class may be equal to that of a tensor."""
    return isinstance(value, torch.Tensor) and not any(type(value) is kind for kind in _KINDS)


def check_generator(generator: torch.Generator | None, *, is_of_host: bool) -> None:
    """Checks that random numbers are drawn from a generator of the device where they go.

    Raises:
        RuntimeError: it is one of the other device, with torch's words.
    """
    made = None if generator is None else GENERATORS.get(generator._cdata)  # pyrefly: ignore[missing-attribute]
    wanted = "cpu" if is_of_host else "cuda"
    if made is not None and made.device.type != wanted:
        raise for_torch(RuntimeError(f"Expected a '{wanted}' device type for generator but found '{made.device.type}'"))


def check_indices(indexed: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    """Checks that a tensor on the host is not indexed by one on the card.

    Raises:
        RuntimeError: it is, with torch's words.
    """
    if not is_on_card(indexed) and any(is_on_card(index) for index in indices if index is not None):
        words = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        raise for_torch(RuntimeError(words))


def is_on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the virtual card, and not on the host."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _type(tensor: torch.Tensor) -> str:
    return f"torch.{'cuda.' if is_on_card(tensor) else ''}{_name(tensor)}Tensor"


def _name(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, str(tensor.dtype))


def _refuse_unless(is_right: bool, words: str, kind: type[Exception] = RuntimeError) -> None:
    if not is_right:
        raise for_torch(kind(words))


def _is_dense(tensor: torch.Tensor) -> bool:
    # Products with sparse matrices have kernels of their own.
    return tensor.layout is torch.strided


def _product(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    one, other = args
    if _is_dense(one) and _is_dense(other):
        names = [_OF_C.get(_name(t), _name(t).lower()) for t in args]
        same = one.dtype == other.dtype
        _refuse_unless(same, f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}")


def _added_product(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    added, one, other = args[:3]
    if all(map(_is_dense, args[:3])):
        a, b, c = _name(added), _name(one), _name(other)
        _refuse_unless(a == c, f"self and mat2 must have the same dtype, but got {a} and {c}")
        _refuse_unless(b == c, f"mat1 and mat2 must have the same dtype, but got {b} and {c}")


def _convolution(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    given = {"input": args[0], "weight": args[1], "bias": args[2]}
    types = {name: _type(tensor) for name, tensor in given.items() if tensor is not None}
    for name, found in types.items():
        _refuse_unless(
            found == types["input"], f"Input type ({types['input']}) and {name} type ({found}) should be the same"
        )


def _class_loss(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    scores, target, weight = args[:3]
    found = _name(target)
    _refuse_unless(found in ("Long", "Byte"), f"expected target dtype to be Long or Byte, but got {found}")
    if weight is not None:
        _refuse_unless(weight.dtype == scores.dtype, f"expected scalar type {_name(scores)} but found {_name(weight)}")


def _binary_loss(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    scores, target = args[:2]
    _refuse_unless(scores.dtype == target.dtype, f"Found dtype {_name(target)} but expected {_name(scores)}")


def _index_put(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    written, _, values = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    # One value is filled in behind a mask, in whatever dtype; sums are of a kernel of their own.
    if not accumulates and values.numel() != 1:
        _refuse_unless(
            written.dtype == values.dtype,
            f"Index put requires the source and destination dtypes match, got {_name(written)} for the destination and {_name(values)} for the source.",
        )


def _index_add(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    written, source = args[0], args[3]
    _refuse_unless(
        written.dtype == source.dtype,
        f"index_add_(): self ({_name(written)}) and source ({_name(source)}) must have the same scalar type",
    )


def _index_copy(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    written, source = args[0], args[3]
    _refuse_unless(
        written.dtype == source.dtype,
        f"index_copy_(): self and source expected to have the same dtype, but got (self) {_name(written)} and (source) {_name(source)}",
    )


def _in_place(args: Sequence[Any], _: Mapping[str, Any], *, divides: bool) -> None:
    written, other = args[:2]
    result = torch.result_type(written, other)
    if divides and not (result.is_floating_point or result.is_complex):
        result = torch.get_default_dtype()
    _refuse_unless(
        torch.can_cast(result, written.dtype),
        f"result type {_NAMES.get(result, result)} can't be cast to the desired output type {_name(written)}",
    )


def _floating(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str) -> None:
    given = args[0]
    is_right = given.is_floating_point() or given.is_complex()
    _refuse_unless(is_right, f"\"{kernel}\" not implemented for '{_name(given)}'", NotImplementedError)


def _floating_statistics(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    is_right = args[0].is_floating_point() or args[0].is_complex()
    _refuse_unless(is_right, "std and var only support floating point and complex dtypes")


def _bits(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str) -> None:
    result = torch.result_type(*args[:2])
    is_right = not (result.is_floating_point or result.is_complex)
    _refuse_unless(is_right, f"\"{kernel}\" not implemented for '{_NAMES.get(result, result)}'", NotImplementedError)


def _bits_of(name: str) -> dict[OpOverload, Check]:
    check = functools.partial(_bits, kernel="_".join(("bitwise", name, "cuda")))
    packet = getattr(aten, f"bitwise_{name}")
    in_place = getattr(aten, f"bitwise_{name}_")
    return {each.Tensor: check for each in (packet, in_place)} | {each.Scalar: check for each in (packet, in_place)}


_CHECKS: dict[OpOverload, Check] = {
    aten.mm.default: _product,
    aten.addmm.default: _added_product,
    aten.convolution.default: _convolution,
    aten.nll_loss_forward.default: _class_loss,
    aten.nll_loss2d_forward.default: _class_loss,
    aten.binary_cross_entropy.default: _binary_loss,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_add_.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_copy_.default: _index_copy,
    aten.add_.Tensor: functools.partial(_in_place, divides=False),
    aten.sub_.Tensor: functools.partial(_in_place, divides=False),
    aten.mul_.Tensor: functools.partial(_in_place, divides=False),
    aten.div_.Tensor: functools.partial(_in_place, divides=True),
    aten._softmax.default: functools.partial(_floating, kernel="host_softmax"),
    aten._log_softmax.default: functools.partial(_floating, kernel="host_softmax"),
    aten.gelu.default: functools.partial(_floating, kernel="GeluCUDAKernelImpl"),
    aten.silu.default: functools.partial(_floating, kernel="silu_cuda"),
    aten.var.correction: _floating_statistics,
    aten.std.correction: _floating_statistics,
    **_bits_of("and"),
    **_bits_of("or"),
    **_bits_of("xor"),
}

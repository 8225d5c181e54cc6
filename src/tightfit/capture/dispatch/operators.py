"""Facts about each operator, derived from its schema once and cached."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.flops import formula
from tightfit.capture.dispatch.geometry import Sizes, sizes_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """`is_view`: returns aliases of the same storage and runs no kernel. `resizes`: may change the storage size of an argument.

    `is_composite`: is made of others and has no kernel of its own; it only arrives whole under `torch.inference_mode`.
    `flops` counts the operations of a call and `sizes` reads those of its product, where it is one. `updates_lists`: one of `torch._foreach_*_`, which writes to its first list and returns nothing.
    `has_known_shape`: the metadata of its outputs follow from those of its tensors and from its other arguments; if `is_elementwise`, numbers among these say nothing of them.
    """

    name: str
    is_view: bool
    is_mutable: bool
    resizes: bool
    creates: bool
    is_composite: bool
    updates_lists: bool
    has_known_shape: bool
    is_elementwise: bool
    flops: Callable[..., int] | None
    sizes: Callable[[Sequence[Any], Any], Sizes | None] | None


@functools.cache
def facts(operator: OpOverload) -> OperatorFacts:
    """The facts of `operator`, from its schema."""
    schema = operator._schema
    returns = [r.alias_info for r in schema.returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return OperatorFacts(
        name=operator.name().replace("::", "."),
        is_view=is_view or operator in _RENAMES,
        is_mutable=schema.is_mutable,
        resizes=schema.is_mutable
        and (
            schema.name.startswith("aten::resize")
            # `out=` variants resize their output inside of the kernel, where no dispatch mode sees it.
            or schema.name == "aten::set_"
            or any(a.is_out for a in schema.arguments)
        ),
        creates=any(alias is None for alias in returns),
        is_composite=operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA),
        updates_lists=schema.name.startswith("aten::_foreach_") and not schema.returns,
        has_known_shape=_has_known_shape(operator),
        is_elementwise=torch.Tag.pointwise in operator.tags
        or schema.name.startswith(("aten::_foreach_", "aten::_fused_")),
        flops=formula(operator),
        sizes=sizes_of(operator),
    )


# `_unsafe_view` returns an alias that its schema does not declare (native_functions.yaml), so that autograd
# need not track it as a view; `reshape` ends in it.
_RENAMES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.lift_fresh.default,
}


def _has_known_shape(operator: OpOverload) -> bool:
    """As `FakeTensorMode._validate_cache_key` (torch/_subclasses/fake_tensor.py) has it, for torch's own operators."""
    if operator.namespace != "aten" or operator in _OF_STORAGES or any(a.is_out for a in operator._schema.arguments):
        return False
    if operator.is_view and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    unknown = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    # The size of a selection is that of its indices, where these are no masks.
    return operator is torch.ops.aten.index.Tensor or not unknown.intersection(operator.tags)


# What they return depends on the size of a storage, or is a host tensor that became one of the card.
_OF_STORAGES = {
    getattr(packet, overload)
    for packet in (
        torch.ops.aten.as_strided,
        torch.ops.aten.as_strided_,
        torch.ops.aten.as_strided_copy,
        torch.ops.aten.as_strided_scatter,
        torch.ops.aten.lift,
        torch.ops.aten.lift_fresh,
        torch.ops.aten.lift_fresh_copy,
        torch.ops.aten.resize_,
        torch.ops.aten.resize_as_,
        torch.ops.aten.set_,
    )
    for overload in packet.overloads()
}


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator, which are nested at most one list deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


def are_alike(args: Sequence[Any]) -> bool:
    """Whether all lists of tensors among `args`, of which the first is one, have the same shapes and real numbers on one device."""
    lists = [
        value for value in args if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor)
    ]
    first = lists[0] if lists else ()
    if not first or any(len(other) != len(first) for other in lists):
        return False
    shapes, device = [tensor.shape for tensor in first], first[0].device
    return all(
        isinstance(tensor, FakeTensor)
        and tensor.shape == shape
        and tensor.is_floating_point()
        and tensor.device == device
        for other in lists
        for tensor, shape in zip(other, shapes, strict=True)
    )


def written(operator: OpOverload, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that `operator` writes to."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = (
                kwargs.get(argument.name)
                if argument.name in kwargs
                else args[position]
                if position < len(args)
                else None
            )
            yield from tensors((value,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is non-overlapping and dense: some order of its dimensions is contiguous. torch's own function has had several names."""
    if tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True

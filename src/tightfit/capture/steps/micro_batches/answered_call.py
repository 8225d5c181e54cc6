"""Answers a call of a model with tensors like those of an earlier call, whose backward pass writes that of the earlier one to the tape again."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.micro_batches.deferred_results import DeferredResult, Gone, gone
from tightfit.capture.steps.micro_batches.graph_entries import Edge
from tightfit.capture.steps.micro_batches.object_trees import Tree, taken_apart

Layout = tuple[Any, ...]
"""What a kernel that reads a tensor depends on: its dtype, sizes and strides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedTensor:
    """One tensor of a result: its storage, counted from the call's first one, and its layout."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_view: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a call returns: its leaves, plain ones as they are, and what they are leaves of."""

    leaves: tuple[Any, ...]
    tree: Tree

    def tensors(self) -> list[ReturnedTensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, ReturnedTensor)]


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor; a loss that is summed has a gradient without strides, which kernels copy first."""
    return (
        tensor.dtype,
        tensor.layout,
        tuple(tensor.size()),
        tensor.stride() if tensor.layout == torch.strided else (),
    )


def returned_by(
    gpu: VirtualGpu, result: Any, first_storage: int
) -> tuple[Returned, tuple[Edge, ...], tuple[Gone, ...]] | None:
    """What a call that has allocated storages from `first_storage` on has returned, with the edges of its graph that the trained tensors are, and whether those that
    are not computed have gone; or None if its like cannot be made without running it."""
    taken = taken_apart(result)
    if taken is None:
        return None
    leaves, tree = taken
    edges, are_gone = list[Edge](), list[Gone]()
    described: list[Any] = []
    storages = set[int]()
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(leaf)
            continue
        if (deferred := DeferredResult.of(leaf)) is not None:
            described.append(deferred)
            are_gone.append(gone(leaf))
            continue
        index = gpu.storages.index_of(leaf)
        # What the program reads of a result with known values decides where it goes on.
        if index is None or index < first_storage or index in storages or gpu.known_values.known(leaf):
            return None
        if gpu.conditions.is_about(leaf):
            return None
        is_whole = not leaf.storage_offset() and leaf.untyped_storage().nbytes() == _num_bytes(leaf)
        if not is_whole or type(leaf) is not FakeTensor or leaf.requires_grad is (leaf.grad_fn is None):
            return None
        storages.add(index)
        if leaf.grad_fn is not None:
            edges.append((leaf.grad_fn._sequence_nr(), leaf.output_nr))
        described.append(
            ReturnedTensor(
                storage=index - first_storage,
                size=tuple(leaf.size()),
                stride=leaf.stride(),
                dtype=leaf.dtype,
                requires_grad=leaf.requires_grad,
                is_view=leaf._is_view(),
            )
        )
    return Returned(leaves=tuple(described), tree=tree), tuple(edges), tuple(are_gone)


def _num_bytes(tensor: torch.Tensor) -> int:
    """The bytes from the first element to the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0


def answer(
    gpu: VirtualGpu,
    returned: Returned,
    first_storage: int,
    start: torch.Tensor,
    on_backward: Callable[[Sequence[Layout | None]], None],
    differs: Callable[[], NoReturn],
) -> tuple[Any, int, list[torch.UntypedStorage], list[Gone]]:
    """A result like the one that was `returned`, the sequence number of its node, the storages of its tensors, and whether those that are not computed have gone.

    The tape has the storages already, from `first_storage` on. `start` is a leaf that requires a gradient, and gets none. `on_backward` is called when the
    backward pass comes to the result, with the gradients of its trained tensors, `differs` when one that is not computed is touched.
    """
    made = []
    for leaf in returned.tensors():
        tensor = gpu.empty(leaf.size, leaf.stride, leaf.dtype)
        gpu.storages.follow(tensor, first_storage + leaf.storage)
        made.append(tensor)
    storages = [tensor.untyped_storage() for tensor in made]
    is_trained = [leaf.requires_grad for leaf in returned.tensors()]
    trained = [tensor for tensor, has_node in zip(made, is_trained, strict=True) if has_node]
    _Answered.apply(start, on_backward, trained)
    node = trained[0].grad_fn
    assert node is not None
    number = node._sequence_nr()
    # A write in place to a view makes other nodes.
    is_view = [leaf.requires_grad and leaf.is_view for leaf in returned.tensors()]
    tensors = iter([t.view(t.size()) if is_seen else t for t, is_seen in zip(made, is_view, strict=True)])
    leaves = list[Any]()
    are_gone = list[Gone]()
    for leaf in returned.leaves:
        if isinstance(leaf, DeferredResult):
            leaves.append(leaf.made(differs))
            are_gone.append(gone(leaves[-1]))
        else:
            leaves.append(next(tensors) if isinstance(leaf, ReturnedTensor) else leaf)
    return returned.tree.made(iter(leaves)), number, storages, are_gone


class _Answered(torch.autograd.Function):
    """The node of tensors that were made."""

    @staticmethod
    def forward(
        ctx: Any,
        _start: torch.Tensor,
        on_backward: Callable[[Sequence[Layout | None]], None],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.on_backward = on_backward
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.on_backward([None if gradient is None else layout_of(gradient) for gradient in gradients])
        return None, None, None

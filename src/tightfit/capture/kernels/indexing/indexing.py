"""Scratch memory of lookups and their gradients: embedding, index, index_put, nonzero.

The gradient of an embedding is the large one: beyond 3,072 tokens its kernel sorts the tokens and sums runs of at most ten of them in a
float32 buffer that is as wide as the embedding.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.indexing.sorting import radix_sort_bytes, scan_bytes
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, accumulate_size, contiguous_copy

aten = torch.ops.aten

_UNSORTED_EMBEDDINGS = 3072  # embedding_dense_backward_cuda, Embedding.cu
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD, EmbeddingBackwardKernel.cu


def _embedding_backward(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu."""
    grad: torch.Tensor = arguments["grad_output"]
    indices: torch.Tensor = arguments["indices"]
    yield from contiguous_copy(indices)
    yield from contiguous_copy(grad)
    num_indices, index_bytes = indices.numel(), indices.element_size()
    copies = (not indices.is_contiguous()) + (not grad.is_contiguous())
    # Few tokens are added by a kernel that finds duplicates within a block, without a sort.
    if num_indices <= _UNSORTED_EMBEDDINGS and not arguments["scale_grad_by_freq"]:
        return
    by_index = num_indices * index_bytes
    yield by_index  # sorted_indices
    yield by_index  # orig_indices
    yield by_index  # range
    yield radix_sort_bytes(num_indices, index_bytes, index_bytes)
    # The sort's storage goes first, then the range: neither is needed once the tokens are sorted.
    yield -(copies + 4)
    yield -(copies + 3)
    if arguments["scale_grad_by_freq"]:
        yield by_index
    segments = min(num_indices, arguments["num_weights"])
    partial_segments = num_indices // _ROWS_PER_THREAD + segments
    yield by_index  # segment_offsets
    yield 8
    yield segments * index_bytes
    yield segments * index_bytes
    yield scan_bytes(segments, index_bytes)
    yield 8
    yield partial_segments * index_bytes
    yield partial_segments * grad.shape[-1] * accumulate_size(grad.dtype)


def _index_put(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`index_put_with_sort_kernel` (Indexing.cu), taken for accumulate=True: linear indices, sorted, with their origin.

    The order is that of recordings of such a call: the wrapped indices, scaled by their stride, of which the last stay; then the two sorted
    arrays, the range that is sorted along, and the sort's own storage.
    """
    tensor: torch.Tensor = arguments["self"]
    values: torch.Tensor = arguments["values"]
    # Without accumulation the kernel writes in any order and needs no sort.
    if not arguments["accumulate"]:
        return
    indices = [index for index in arguments["indices"] if index is not None]
    if any(index.dtype is torch.bool for index in indices):
        # The number of true entries is that of the values that are put there.
        num_indices = values.shape[0] if values.dim() else tensor.numel()
    else:
        num_indices = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    if not num_indices:
        return
    blocks = 0
    for copy in contiguous_copy(tensor):
        yield copy
        blocks += 1
    for _ in indices:
        yield num_indices * 8
        yield num_indices * 8
        blocks += 2
        yield -(blocks - 1)
    yield from contiguous_copy(values)
    for _ in range(3):
        yield num_indices * 8
    yield radix_sort_bytes(num_indices, 8, 8)


def _index(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    """A boolean mask becomes the coordinates of its true entries (`expandTensors`, IndexingUtils.h), 8 bytes for each of its dimensions."""
    output = outputs[0]
    masks = [index for index in arguments["indices"] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if output is None or not masks:
        return
    covered = sum(mask.dim() for mask in masks)
    rest = arguments["self"].shape[covered:].numel()
    for mask in masks:
        yield output.numel() // max(rest, 1) * mask.dim() * 8


def _masked_select(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    """`masked_select_out_cuda_impl` (IndexKernel.cpp) indexes with the expanded mask."""
    if outputs[0] is not None:
        yield outputs[0].numel() * 8 * max(arguments["mask"].dim(), arguments["self"].dim())


def _nonzero(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`nonzero_cuda_out_impl` (Nonzero.cu): a contiguous input and the storage of a CUB selection, about a status per tile."""
    tensor: torch.Tensor = arguments["self"]
    yield from contiguous_copy(tensor)
    yield scan_bytes(tensor.numel(), 4)


def _masked_scatter(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`launch_masked_scatter_kernel` (IndexKernel.cu): the prefix sum of the mask, 8 bytes an entry."""
    yield arguments["self"].numel() * 8
    yield scan_bytes(arguments["self"].numel(), 8)


def _scatter_copy(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`index_add_cuda_impl` and `index_select` (Indexing.cu) read strided tensors in place; only indices are made contiguous."""
    yield from contiguous_copy(arguments["index"])


def _embedding_bag_backward(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`embedding_bag_backward_cuda_sum_avg` (EmbeddingBag.cu): the sorted path of the plain embedding, over bags."""
    grad, indices = arguments["grad"], arguments["indices"]
    num_indices, index_bytes = indices.numel(), indices.element_size()
    segments = min(num_indices, arguments["num_weights"])
    partial_segments = num_indices // _ROWS_PER_THREAD + segments
    for _ in range(3):
        yield num_indices * index_bytes
    yield partial_segments * index_bytes
    yield partial_segments * grad.shape[-1] * accumulate_size(grad.dtype)


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_embedding_backward, (aten.embedding_dense_backward.default,)),
    (_embedding_bag_backward, (aten._embedding_bag_dense_backward.default,)),
    (
        _index_put,
        (
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
            aten._unsafe_index_put.default,
        ),
    ),
    (_index, (aten.index.Tensor,)),
    (_masked_select, (aten.masked_select.default,)),
    (_masked_scatter, (aten.masked_scatter.default, aten.masked_scatter_.default)),
    (_nonzero, (aten.nonzero.default,)),
    (_scatter_copy, (aten.index_add.default, aten.index_add_.default, aten.index_select.default)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}

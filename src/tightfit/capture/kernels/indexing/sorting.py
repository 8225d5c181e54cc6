"""Scratch memory of sorting and of the operators built on it: sort, topk, unique, randperm, multinomial, scans.

The temporary storage of CUB itself is not documented; for the radix sorts it is dominated by one alternate buffer of keys and values
(`DispatchRadixSort`, "onesweep" path), the rest is estimated from its tile sizes and stays below two percent of that.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, ceil_div, num_bytes

aten = torch.ops.aten

_SMALL_SORT = 4096  # should_use_small_sort, Sorting.cpp
_RADIX_DIGITS = 256


def radix_sort_bytes(num_items: int, key_bytes: int, value_bytes: int) -> int:
    """Temporary storage of one cub::DeviceRadixSort call, in bytes.

    A single tile needs 1 byte (seen in recordings); beyond it an alternate buffer of keys and values, digit counts for every pass and the
    look-back states of every tile. Tile sizes: cub's `DeviceRadixSortPolicy` for compute capability 8.0 (384 threads; 21 items of 4 bytes).
    """
    items_per_single_tile = 256 * max(1, 19 * 4 // max(key_bytes, 4))
    if num_items <= items_per_single_tile:
        return 1
    tiles = ceil_div(num_items, 384 * max(1, 21 * 4 // max(key_bytes + value_bytes, 4)))
    return num_items * (key_bytes + value_bytes) + key_bytes * _RADIX_DIGITS * 4 + tiles * _RADIX_DIGITS * 4


def scan_bytes(num_items: int, item_bytes: int) -> int:
    """Temporary storage of one cub::DeviceScan call: a status and a value per tile of about 1920 items of 4 bytes."""
    return ceil_div(num_items * item_bytes, 7680) * (item_bytes + 8) + 767


def _sort(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    """aten/src/ATen/native/cuda/Sort.cpp and SortStable.cu."""
    tensor: torch.Tensor = arguments["self"]
    num_items = tensor.numel()
    if tensor.dim() == 0 or num_items == 0:
        return
    dim = arguments["dim"] % tensor.dim()
    length = tensor.shape[dim]
    # A bitonic or warp-wide merge sort in shared memory, in place (`sortKeyValueInplace`, Sort.cu).
    if length <= _SMALL_SORT:
        return
    size = tensor.element_size()
    if tensor.stride(dim) != 1 or not tensor.is_contiguous():
        yield num_items * size
    output = outputs[0]
    if output is not None and (output.stride(dim) != 1 or not output.is_contiguous()):
        yield num_items * size
        yield num_items * 8
    segments = num_items // length
    # The thresholds of `launch_stable_sort_kernel`, SortStable.cu: one sort after another; one sort over all
    # with the segment as a second key; or CUB's segmented sort.
    if segments == 1 or length >= 1_000_000:
        yield length * 8
        yield radix_sort_bytes(length, size, 8)
    elif segments < 128:
        yield num_items * 8
        yield num_items * 8
        yield num_items * size
        yield radix_sort_bytes(num_items, size, 8)
    else:
        yield num_items * 8
        yield num_items * (size + 8)


def _uses_many_blocks(num_slices: int, length: int) -> bool:
    """`should_use_multiblock`, TensorTopK.cu."""
    bounds = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return length >= next((shortest for most, shortest in bounds if num_slices <= most), 400)


def _topk(arguments: Arguments, outputs: Outputs, card: Card) -> Iterator[int]:
    """aten/src/ATen/native/cuda/TensorTopK.cu: digit counts of every block; then the k results are sorted."""
    tensor: torch.Tensor = arguments["self"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return
    if not tensor.is_contiguous():
        yield num_bytes(tensor)
    length = tensor.shape[arguments["dim"] % tensor.dim()]
    slices = tensor.numel() // length
    if _uses_many_blocks(slices, length):
        # get_items_per_thread: 40 registers a thread, 65536 registers a multiprocessor, blocks of 256 threads, 4 to 64 items a thread.
        items = min(max(ceil_div(tensor.numel(), card.num_multiprocessors * 6 * 256), 4), 64)
        blocks = slices * ceil_div(length, items * 256)
        yield slices * tensor.element_size()
        yield 2 * slices * 4
        yield 2 * slices * 4
        yield blocks * _RADIX_DIGITS * 2
        yield blocks * 4
        yield blocks * 4
    if arguments["sorted"] and arguments["k"] > _SMALL_SORT and outputs[0] is not None:
        yield num_bytes(outputs[0])
        yield outputs[0].numel() * 8


def _unique(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    """`unique_cuda_template`, UniqueCub.cu: a sorted copy; with the inverse its origin too. What the sort needs besides is gone before the outputs are made."""
    tensor: torch.Tensor = arguments["self"]
    num_items, size = tensor.numel(), tensor.element_size()
    made = sum(num_bytes(output) for output in outputs if output is not None)
    yield num_items * size
    if arguments["return_inverse"]:
        yield num_items * 8
        yield max(0, num_items * 8 + radix_sort_bytes(num_items, size, 8) - made)
    else:
        yield max(0, radix_sort_bytes(num_items, size, 0) - made)


def _scan(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """A scan over everything runs in CUB, one along a dimension needs a contiguous input (ScanKernels.cpp, ScanUtils.cuh)."""
    tensor: torch.Tensor = arguments["self"]
    if not tensor.is_contiguous():
        yield num_bytes(tensor)
    if tensor.dim() and tensor.numel() == tensor.shape[arguments["dim"]]:
        yield scan_bytes(tensor.numel(), tensor.element_size())


def _randperm(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`randperm_out_cuda` (Randperm.cu): random keys, a range of values, sorted keys."""
    num_items = arguments["n"]
    yield num_items * 4
    yield num_items * 8
    yield num_items * 4
    yield radix_sort_bytes(num_items, 4, 8)


def _multinomial(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """Without replacement, or for one sample: exponential noise of the input's size (`multinomial`, Distributions.cpp)."""
    tensor: torch.Tensor = arguments["self"]
    yield num_bytes(tensor)
    if arguments["replacement"] and arguments["num_samples"] > 1:
        yield num_bytes(tensor)


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_sort, (aten.sort.default, aten.sort.stable)),
    (_topk, (aten.topk.default,)),
    (_unique, (aten._unique2.default,)),
    (_scan, (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)),
    (_randperm, (aten.randperm.default, aten.randperm.generator)),
    (_multinomial, (aten.multinomial.default,)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}

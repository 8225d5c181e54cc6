"""Floating-point operations of an operator: torch's own formulas, except for attention with a causal mask.

Those formulas count every score. The fused kernels leave out the tiles of scores that lie wholly above the diagonal and compute the others whole
(Dao 2023, "FlashAttention-2", section 3.1; the kernels for memory-efficient and cuDNN attention do the same): of n x n tiles n (n + 1) / 2 are left.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

TILE = 128
"""Queries and keys of one tile: flash_fwd_launch_template.h takes 128 queries and 32 to 128 keys, by width and card."""

GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
"""Products of matrices whose rows are in groups, as of experts (aten/src/ATen/native/cuda/GroupedBlas.cpp)."""

# torch/utils/flop_counter.py says so of its own formulas: "We aren't accounting for causal attention here".
_CAUSAL = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{way}").default
    for kernel in ("flash", "efficient", "cudnn")
    for way in ("", "_backward")
}


def formula(operator: OpOverload) -> Callable[..., int] | None:
    """The function that counts the FLOPs of a call of `operator`, from its arguments and `out_val`; None if there is no formula."""
    if operator._overloadpacket.__name__ in GROUPED:
        return _grouped_product
    count = flop_registry.get(operator._overloadpacket)
    if count is None:
        return None
    if operator is torch.ops.aten.convolution_backward.default:
        return _convolution_backward
    if operator not in _CAUSAL:
        return _of_overload(operator, count)
    names = [argument.name for argument in operator._schema.arguments]
    query, causal = names.index("query"), names.index("is_causal")

    def counted(*args: Any, **kwargs: object) -> int:
        queries, keys, values = (tensor.shape for tensor in args[query : query + 3])
        # Up to torch 2.11 the formulas are of as many heads of keys and values as of queries: each head of keys meets all queries that share it.
        of_heads = (torch.Size((*shape[:-3], queries[-3], *shape[-2:])) for shape in (keys, values))
        whole = count(*args[: query + 1], *of_heads, *args[query + 3 :], **kwargs)
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        return round(whole * computed_share(queries[-2], keys[-2])) if is_causal else whole

    return counted


def _grouped_product(*args: Any, out_val: Any = None, **_: object) -> int:
    """Products of the groups of rows of mixture-of-experts models, which torch has no formula for: each row of the result meets the whole depth of one group.

    Where both operands are matrices the groups share out the depth, so that the result of each takes its share.
    """
    left, right = args[0], args[1]
    num_groups = out_val.shape[0] if left.dim() == right.dim() == 2 else 1
    return 2 * out_val.numel() * left.shape[-1] // num_groups


def _convolution_backward(*args: Any, out_val: object = None) -> int:
    """Each gradient takes the operations of the forward pass. torch's own formula counts that of a grouped weight as if there were no groups: 32 times too
    much for a ResNeXt, as often as there are channels for a depthwise convolution.
    """
    gradient, _, weight = args[:3]
    is_transposed, wanted = args[7], args[10]
    pixels = (args[1] if is_transposed else gradient).shape
    forward = 2 * weight.numel() * pixels[0] * math.prod(pixels[2:])
    return forward * (bool(wanted[0]) + bool(wanted[1]))


def _of_overload(operator: OpOverload, count: Callable[..., int]) -> Callable[..., int]:
    """torch writes a formula for the default overload; those of others take what they have besides (`out_dtype`) for something else."""
    packet = operator._overloadpacket
    known = (
        {argument.name for argument in packet.default._schema.arguments} if "default" in packet.overloads() else None
    )
    is_counted = [known is None or argument.name in known for argument in operator._schema.arguments]
    if all(is_counted):
        return count

    def counted(*args: object, **kwargs: object) -> int:
        return count(*(a for a, is_in in zip(args, is_counted, strict=False) if is_in), **kwargs)

    return counted


def computed_share(num_queries: int, num_keys: int) -> float:
    """The share of the tiles of scores that a kernel computes under a causal mask whose diagonal begins at the first query and key."""
    rows, columns = -(-num_queries // TILE), -(-num_keys // TILE)
    return sum(min(row, columns) for row in range(1, rows + 1)) / (rows * columns)

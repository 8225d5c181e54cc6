"""Scratch memory of CUDA kernels: what an aten operator allocates besides its outputs.

`SCRATCH` maps an operator to its rule. Operators without a rule take no scratch memory worth counting (elementwise kernels, softmax of
contiguous tensors, pooling, views) or are listed as unknown in docs/how-it-works/cuda-rules.md.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels import convolution, losses, matmul, normalization, recurrent, reductions, spectral
from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.attention import attention_scratch
from tightfit.capture.kernels.indexing import indexing, sorting
from tightfit.capture.kernels.rule import Outputs, Rule, Uncertain, bind

SCRATCH: dict[OpOverload, Rule] = {
    **attention_scratch.RULES,
    **convolution.RULES,
    **indexing.RULES,
    **losses.RULES,
    **matmul.RULES,
    **normalization.RULES,
    **recurrent.RULES,
    **reductions.RULES,
    **sorting.RULES,
    **spectral.RULES,
}


def scratch_events(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, card: Card
) -> tuple[int, ...]:
    """The requests of one call's kernel to the caching allocator, besides its outputs.

    Returns requested bytes in order; `-k` frees the k-th block of this call, counting from one. Blocks that are not freed stay allocated until
    the operator returns. `outputs` is what the operator returned (a tensor, or a sequence that may hold `None`); only shapes, strides and types
    are read.
    """
    rule = SCRATCH.get(operator)
    if rule is None or any(isinstance(value, torch.Tensor) and value.layout != torch.strided for value in args):
        # The rules are those of dense kernels: that a sparse matrix cannot be read by cuBLAS would be a dense copy of it, which nobody makes.
        return ()
    if args and isinstance(args[0], torch.Tensor) and not args[0].numel():
        # No kernel runs: an expert that no token goes to, an image without a box.
        return ()
    listed = outputs if isinstance(outputs, tuple | list) else (outputs,)
    tensors: Outputs = [value if isinstance(value, torch.Tensor) else None for value in listed]
    return tuple(_without_empty_blocks(rule(bind(operator, args, kwargs), tensors, card)))


def _without_empty_blocks(events: Iterable[int]) -> Iterator[int]:
    """The requests without those of no bytes, which the allocator is not asked for, and what is freed by the numbers that the others then have."""
    numbers: list[int] = []
    for event in events:
        if event < 0:
            if numbers[-event - 1]:
                yield -numbers[-event - 1]
            continue
        # An uncertain size of 0 stays: its range may reach further up.
        is_asked_for = bool(event) or isinstance(event, Uncertain)
        numbers.append(max(numbers, default=0) + 1 if is_asked_for else 0)
        if is_asked_for:
            yield event


def scratch_bytes(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, card: Card
) -> tuple[int, ...]:
    """The blocks of scratch memory that are allocated at the call's peak, in order of allocation, in bytes.

    Taking them all, and freeing them all when the operator returns, gives the same peak as the exact order of `scratch_events`.
    """
    blocks: list[int] = []
    alive: dict[int, int] = {}
    highest: tuple[int, ...] = ()
    for event in scratch_events(operator, args, kwargs, outputs, card):
        if event < 0:
            del alive[-event - 1]
            continue
        alive[len(blocks)] = event
        blocks.append(event)
        if sum(alive.values()) > sum(highest):
            highest = tuple(alive.values())
    return highest

"""Arguments that a card's kernel takes in a dtype beside the others', and torch's rules for shapes do not, or give another result for.

Seen on an H200 under torch 2.11 (tests/recordings/calls_on_a_card.json), and read in torch 2.13: losses of two dtypes are in that of the scores (Loss.cpp
makes the result like its input), classes may be numbers of eight bits (NLLLoss1d.cu, `AT_DISPATCH_NLL_LOSS_INDEX_TYPES`), and what is added to a
product with a vector is cast (Blas.cpp, `addmv`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# The argument, and the one whose dtype the rule is given for it, or None for the int64 of classes.
_AS: dict[OpOverload, tuple[int, int | None]] = {
    aten.nll_loss_forward.default: (1, None),
    aten.nll_loss_backward.default: (2, None),
    aten.addmv.default: (0, 1),
    aten.soft_margin_loss.default: (1, 0),
    aten.soft_margin_loss_backward.default: (2, 1),
    aten.huber_loss.default: (1, 0),
    aten.binary_cross_entropy.default: (2, 0),
    aten.binary_cross_entropy_backward.default: (3, 1),
}


def for_the_rule(operator: OpOverload, args: Sequence[Any], empty: Callable[..., torch.Tensor]) -> Sequence[Any]:
    """The arguments with the one in question in the dtype that the rule for shapes takes, made by `empty` of size, stride, dtype and device."""
    which = _AS.get(operator)
    if which is None or len(args) <= which[0] or args[which[0]] is None:
        return args
    changed, followed = which
    dtype = torch.int64 if followed is None else args[followed].dtype
    tensor = args[changed]
    if tensor.dtype == dtype:
        return args
    cast = empty(tensor.size(), tensor.stride(), dtype, tensor.device)
    return [*args[:changed], cast, *args[changed + 1 :]]

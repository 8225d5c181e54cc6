"""Whether a card's kernel would take the arguments of a call, which torch's kernels for shapes alone do not look at.

Without these checks a program that ends in its first forward pass (a model in half precision that is given float32, images of bytes, targets of
int32) would be traced to its end, and said to fit. Left out is what is not known of the kernels for certain, and what only those of the host lack.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.arguments.kernel_dtypes import KERNELS
from tightfit.capture.dispatch.arguments.mixed_dtypes import MIXED
from tightfit.capture.kernels.refusals import is_on_card
from tightfit.errors.faults import for_torch

_KINDS = (FakeTensor, torch.Tensor, torch.nn.Parameter)


GENERATORS: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()
"""The generators that the program has made, which say what device they are for, by their address in C++: an operator may be given another object for one."""


def check_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of a call as the operator's CUDA kernel does.

    Raises:
        RuntimeError: the kernel would refuse them, with its words.
    """
    checks = _CHECKS.get(operator)
    if checks is not None and not any(map(_stands_in, args)):
        for check in checks:
            check(args, kwargs)


_CHECKS = {
    operator: [table[operator] for table in (MIXED, KERNELS) if operator in table] for operator in {**MIXED, **KERNELS}
}


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

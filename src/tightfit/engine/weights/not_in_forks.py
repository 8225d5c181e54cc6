"""Weights whose memory a fork does not have: there, whoever reads one of them is told so.

The memory itself is left out of forks by the system (madvise(2), MADV_DONTFORK), as what a fork would see there changes with its parent's updates. A view or
an array of it is an access to no memory then, which ends the fork; a worker that reads no weight goes on.
"""

import contextlib
import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tightfit.errors import ApplyError
from tightfit.torch_hooks.weak_references import WeakTable

if TYPE_CHECKING:
    from tightfit.engine.weights.streamed_weight import StreamedWeight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Lent:
    """The addresses of a weight's memory; while it is streamed it comes back there."""

    begin: int
    end: int
    weight: "weakref.ref[StreamedWeight]"


_LENT = WeakTable[torch.Tensor, _Lent]()


class WeightOfTheParent(torch.nn.Parameter):
    """A parameter in a fork, whose memory is the other process's."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ApplyError(
            "a forked process uses a weight that its parent trains on disk; start the process by spawn, or fork it before the model is moved, "
            "or plan without weights on disk (a smaller --disk)"
        )


def keep_out_of_forks(weight: "StreamedWeight") -> None:
    """Notes a weight with memory that forks do not have."""
    begin = weight.bytes_at_host.data_ptr()
    _LENT[weight.parameter] = _Lent(begin=begin, end=begin + len(weight.bytes_at_host), weight=weakref.ref(weight))


def forget_those_elsewhere() -> None:
    """Forgets the weights that lie in other memory for good."""
    for parameter, lent in _LENT.items():
        if not _is_there(parameter, lent):
            del _LENT[parameter]


def _in_child() -> None:
    for parameter, lent in _LENT.items():
        if not isinstance(parameter, WeightOfTheParent) and _is_there(parameter, lent):
            # One of a class with a layout of its own stays what it is, and reading it ends the process.
            with contextlib.suppress(TypeError):
                parameter.__class__ = WeightOfTheParent


def _is_there(parameter: torch.Tensor, lent: _Lent) -> bool:
    weight = lent.weight()
    if weight is not None and weight.is_streamed and weight.is_ours():
        return True
    return parameter.device.type == "cpu" and lent.begin <= parameter.data_ptr() < lent.end


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

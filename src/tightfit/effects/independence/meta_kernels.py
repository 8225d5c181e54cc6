"""Runs operators on fake tensors by torch's own meta kernels at once.

`FakeTensorMode` ends in the same kernels for these operators (torch/_subclasses/fake_tensor.py, `_dispatch_impl`), after a look at all that others need: devices that differ,
constants, sizes that depend on values, decompositions. A proof of two layers has hundreds of calls, and that look was most of its time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# Views, and operators whose results have the device of their arguments and a kernel in C++ for tensors without data.
_OPERATORS = """alias as_strided detach diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view
    _unsafe_view _reshape_alias add sub rsub mul div neg pow sqrt rsqrt reciprocal exp log log1p expm1 abs sign sin cos tanh sigmoid silu gelu relu
    leaky_relu elu softplus hardtanh hardswish erf clamp clamp_min clamp_max minimum maximum eq ne lt le gt ge logical_not logical_and logical_or
    bitwise_not bitwise_and bitwise_or where addcmul addcdiv lerp tril triu mm bmm addmm baddbmm sum mean amax amin any all cumsum
    _softmax _log_softmax cat clone embedding"""
_NAMES = frozenset(_OPERATORS.split())


class MetaKernels:
    """Those operators for the tensors of one mode; of none where that is not torch's own: the virtual GPU has strides of its own."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._is_plain = type(fake) is FakeTensorMode
        # By identity, with the operator: it is hashed in Python.
        self._known: dict[int, tuple[OpOverload, bool]] = {}

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the operator returns, or `NotImplemented` where `FakeTensorMode` has to be asked."""
        known = self._known.get(id(func))
        if not self._is_plain:
            return NotImplemented
        if known is None:
            known = self._known[id(func)] = (func, _is_known(func))
        if not known[1] or (kwargs and not _is_plain(kwargs)):
            return NotImplemented
        device = self._device_of(args, None)
        if device is None:
            return NotImplemented
        with in_kernel_invocation_manager(self._fake):
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return self._wrapped(made, device)
        return type(made)(self._wrapped(each, device) for each in made)

    def _device_of(self, values: Sequence[Any], found: torch.device | None) -> torch.device | None:
        """The device of all tensors among the arguments; None where one of them is not plainly a fake one, or there are several devices."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if type(value) is not FakeTensor or value.fake_mode is not self._fake or value.constant is not None:
                    return None
                if value.is_conj() or value.is_neg() or (found is not None and value.fake_device != found):
                    return None
                found = value.fake_device
            elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
                found = self._device_of(value, found)
                if found is None:
                    return None
        return found

    def _wrapped(self, made: torch.Tensor, device: torch.device) -> torch.Tensor:
        # An operator in place returns its argument.
        return made if isinstance(made, FakeTensor) else FakeTensor(self._fake, made, device)


def _is_known(func: OpOverload) -> bool:
    is_named = func.namespace == "aten" and func.overloadpacket.__name__.rstrip("_") in _NAMES
    return is_named and torch.Tag.inplace_view not in func.tags and not any(a.is_out for a in func._schema.arguments)


def _is_plain(kwargs: Mapping[str, Any]) -> bool:
    return all(
        value is None or isinstance(value, bool | int | float | torch.memory_format) for value in kwargs.values()
    )

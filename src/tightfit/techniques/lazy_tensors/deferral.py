"""Shared code of deferred tensors: which properties need no values, and which calls write.

Torch passes every call on such a tensor to its class as `__torch_function__`; properties arrive as the `__get__` of their descriptor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def fact(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `func` without the dispatch to the tensor's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def name_of(func: Callable[..., Any]) -> str:
    """The name of the function, or of the property."""
    name = func.__name__
    if name != "__get__":
        return name
    descriptor: Any = func.__self__  # pyrefly: ignore
    if isinstance(descriptor, property):
        # What a trace has put in the place of torch's own.
        return next(name for name, value in vars(torch.Tensor).items() if value is descriptor)
    return descriptor.__name__


def changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes to one of its arguments."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs


_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "setitem",
        "set",
    )
)


# What a tensor tells without its values.
FACTS = frozenset(
    (
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "device", "dtype", "layout", "stride"),
        *(
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "is_mkldnn",
            "is_mps",
            "is_xla",
            "is_xpu",
        ),
        *(
            "is_sparse_csr",
            "is_inference",
            "is_contiguous",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "is_same_size",
        ),
        *(
            "requires_grad",
            "grad_fn",
            "is_leaf",
            "element_size",
            "itemsize",
            "nbytes",
            "get_device",
            "output_nr",
            "names",
        ),
        *("has_names", "storage_offset", "__len__", "__hash__", "_version"),
    )
)

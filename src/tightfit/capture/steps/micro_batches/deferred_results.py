"""Tensors among the results of a call that a technique has not computed, such as logits whose loss is computed in chunks.

One holds what it would be computed from. It is no obstacle to a repetition where it has gone before the backward pass begins; in the place of one that is
repeated stands a tensor that nobody may touch.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

KINDS = set[type]()
"""The classes of such tensors; techniques add theirs."""

Gone = Callable[[], bool]
"""Whether a tensor is there no more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeferredResult:
    """All that there is to see of one."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "DeferredResult | None":
        """What `tensor` is, or None if it is an ordinary one."""
        if not isinstance(tensor, tuple(KINDS)):
            return None
        return cls(size=tuple(tensor.size()), stride=tensor.stride(), dtype=tensor.dtype)

    def made(self, differs: Callable[[], NoReturn]) -> torch.Tensor:
        """One like it; `differs` is called as soon as it is touched."""
        with torch._C._DisableTorchDispatch():
            tensor = torch.Tensor._make_wrapper_subclass(
                _Untouched, self.size, strides=self.stride, dtype=self.dtype, device=torch.device("cuda")
            )
        tensor.__dict__["_differs"] = differs
        return tensor


def gone(tensor: torch.Tensor) -> Gone:
    """Tells when `tensor` has gone, and does not keep it."""
    reference = weakref.ref(tensor)
    return lambda: reference() is None


class _Untouched(torch.Tensor):
    """Ends the trace when anything is asked of it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is _Untouched:
                leaf.__dict__["_differs"]()
        raise AssertionError("one of the arguments is such a tensor")

"""Runs an operator that finds no memory once more after memory was freed: one that found none for its result has changed nothing.

An operator that writes to many tensors at once may have written to some of them; it is run again only where it needs no memory of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.guarding.memory.out_of_memory import is_out_of_memory


class RetriedOperators(TorchDispatchMode):
    """`free` is called before an operator is run again.

    `has_written`: an operator that writes to a tensor has run. Versions do not tell: those of `parameter.data` are its own.
    """

    def __init__(self, free: Callable[[], object]) -> None:
        super().__init__()
        self.has_written = False
        self._free = free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if places := _written_lists(func):
            # Below a dispatch mode torch does not count the writes of operators on lists, by which autograd and we find them.
            written = [t for n in places if n < len(args) for t in args[n]]
            versions = [tensor._version for tensor in written]
            result = self._run(func, args, kwargs or {})
            increment_version([t for t, v in zip(written, versions, strict=True) if t._version == v])
        else:
            result = self._run(func, args, kwargs or {})
        self.has_written = self.has_written or func._schema.is_mutable
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not _may_run_again(func, args):
                raise
        # Outside of the handler, where the frames of the error are gone.
        self._free()
        return func(*args, **kwargs)


@functools.cache
def _written_lists(func: Any) -> tuple[int, ...]:
    """The places of the arguments that are lists of tensors which an operator writes to, such as `_foreach_add_` and `_fused_adamw_`."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        n for n, a in arguments if a.alias_info is not None and a.alias_info.is_write and "List" in str(a.type)
    )


def _may_run_again(func: Any, args: Any) -> bool:
    """Whether an operator that found no memory has changed nothing."""
    if not func._schema.is_mutable:
        return True
    written = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
    if len(written) < 2:
        return True
    # Lists of alike tensors are updated by one kernel, without memory; others one by one (ATen/native/ForeachUtils.h, `can_use_fast_route`).
    first = written[0]
    return all(t.dtype == first.dtype and t.device == first.device and t.layout == torch.strided for t in written)

"""Hides the virtual GPU while a library is imported that would load its CUDA kernels for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.torch_hooks.manifest import CUDA_IS_AVAILABLE
from tightfit.torch_hooks.replaced import Replaced


class _Hiding:
    """Owner of the replacement: the GPU is hidden for as long as this object exists."""


def _put(inner: Callable[..., bool], owners: Callable[[], list[_Hiding]]) -> Callable[..., bool]:
    def is_available(*args: Any, **kwargs: Any) -> bool:
        return not owners() and inner(*args, **kwargs)

    return is_available


_IS_AVAILABLE: Replaced[_Hiding] = Replaced(CUDA_IS_AVAILABLE, _put)


@contextmanager
def no_card() -> Iterator[None]:
    """`torch.cuda.is_available` says no inside.

    Raises:
        ApplyError: this torch has no such name.
    """
    # bitsandbytes cannot be imported where torch has no CUDA and a card seems to be there (docs/adr/0006).
    hiding = _Hiding()
    leave = _IS_AVAILABLE.enter(hiding)
    try:
        yield
    finally:
        leave()

"""Notifies owners of data loaders that begin to hand out batches: they draw an order, and seeds for their workers, from random generators of theirs."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import LOADER_ITER
from tightfit.torch_hooks.replaced import Leave, Replaced

Loader = torch.utils.data.DataLoader[Any]


class LoaderOwner(Protocol):
    """Is notified of loaders. It is held weakly."""

    def before_loader_begins(self, loader: Loader) -> None:
        """A loader is about to make an iterator."""
        ...


def on_loader_begin(owner: LoaderOwner) -> Leave:
    """Notifies `owner` of loaders that begin, until the returned function is called or the owner is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _ITER.enter(owner)


def _put_iter(inner: Callable[..., Any], owners: Callable[[], list[LoaderOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __iter__(loader: Loader, /) -> Any:  # noqa: N807 - the name that it stands for
        for owner in owners():
            owner.before_loader_begins(loader)
        return inner(loader)

    return __iter__


_ITER: Replaced[LoaderOwner] = Replaced(LOADER_ITER, _put_iter)

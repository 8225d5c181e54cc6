"""Notifies owners of data loaders that begin to hand out batches, and of each batch.

Where they begin they draw an order, and seeds for their workers, from random generators of theirs.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import LOADER_ITER, LOADER_NEXT
from tightfit.torch_hooks.replaced import Leave, Replaced

Loader = torch.utils.data.DataLoader[Any]


class LoaderOwner(Protocol):
    """Is notified of loaders. It is held weakly."""

    def before_loader_begins(self, loader: Loader) -> None:
        """A loader is about to make an iterator."""
        ...

    def after_loader_began(self, loader: Loader, batches: Iterator[Any]) -> None:
        """It has made it."""
        ...

    def before_batch(self, batches: Iterator[Any]) -> None:
        """An iterator that a loader has made is about to make its next batch."""
        ...


def on_loaders(owner: LoaderOwner) -> Leave:
    """Notifies `owner` of loaders that begin and of their batches, until the returned function is called or the owner is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    with contextlib.ExitStack() as leaves:
        leaves.callback(_ITER.enter(owner))
        leaves.callback(_NEXT.enter(owner))
        return leaves.pop_all().close


def _put_iter(inner: Callable[..., Any], owners: Callable[[], list[LoaderOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __iter__(loader: Loader, /) -> Any:  # noqa: N807 - the name that it stands for
        for owner in owners():
            owner.before_loader_begins(loader)
        batches = inner(loader)
        for owner in owners():
            owner.after_loader_began(loader, batches)
        return batches

    return __iter__


def _put_next(inner: Callable[..., Any], owners: Callable[[], list[LoaderOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __next__(batches: Iterator[Any], /) -> Any:  # noqa: N807
        for owner in owners():
            owner.before_batch(batches)
        return inner(batches)

    return __next__


_ITER: Replaced[LoaderOwner] = Replaced(LOADER_ITER, _put_iter)
_NEXT: Replaced[LoaderOwner] = Replaced(LOADER_NEXT, _put_next)

"""Copies of weights in half precision, which autocast keeps until its outermost context ends (`cached_cast` in aten/src/ATen/autocast_mode.cpp).

Its cache refers to the weight weakly, in C++, and a tensor that something refers to so cannot be given the contents of another. On a card it never
is: setting the data of a weight, from the card to the host say, leaves the weight's C++ object what it is, and its copy stays in the cache. Here the
contents are exchanged, so the cache is emptied first, and its copies are kept alive as long as the cache would.
"""

import weakref
from collections.abc import Callable

import torch

from tightfit.capture.observe.attribution import Attribution
from tightfit.capture.replace import replace


class CachedCasts:
    """What autocast's cache holds: by the weight, the copy that was made of it. The tape is told."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self.when_cleared: list[Callable[[], None]] = []
        """Called when the cache is emptied by the program, or by the end of its outermost autocast context."""
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._clear = torch.clear_autocast_cache

    def install(self) -> None:
        """Follows the end of autocast contexts."""

        def clear_autocast_cache() -> None:
            self._clear()
            self._made.clear()
            self._kept.clear()
            for each in self.when_cleared:
                each()
            recorder = self._attribution.recorder
            recorder.casts.end(len(recorder.events["kind"]), is_of_module=bool(self._attribution.modules))

        replace(torch, clear_autocast_cache=clear_autocast_cache)

    def note(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """A copy was made, by the last operator, of a tensor on the card in another dtype; the conditions are those under which torch caches it."""
        if (
            source.is_leaf
            and source.requires_grad
            and not source._is_view()
            and torch.is_autocast_cache_enabled()
            and copy.dtype == torch.get_autocast_dtype("cuda")
            and _is_in_context()
        ):
            # One that was kept for it is not made anew on a card.
            self._kept.pop(id(source), None)
            self._made[id(source)] = weakref.ref(copy)
            recorder = self._attribution.recorder
            recorder.casts.add(recorder.num_operators - 1)

    def release(self, tensor: torch.Tensor) -> None:
        """Has the cache refer to a tensor no more."""
        if id(tensor) not in self._made:
            return
        for number, reference in self._made.items():
            copy = reference()
            if copy is not None:
                self._kept[number] = copy.untyped_storage()
        self._made.clear()
        self._clear()


def _is_in_context() -> bool:
    # `torch.is_autocast_enabled` says no here: autocast is off below the operator that it has cast for.
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0

"""What functions with a cache (`functools.lru_cache`) have remembered in a step: run again, the step would not call them, and not draw what they drew."""

from collections.abc import Iterable
from typing import Any

from tightfit.effects.bytecode.plain_functions import computes_only
from tightfit.effects.state import Snapshot


class RememberedResults:
    """The caches that a step can reach, as they were at its beginning. One that was empty is emptied again; from others nothing can be taken."""

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        caches: dict[int, tuple[str, Any]] = {}
        for snapshot in snapshots:
            caches |= {id(cache): (path, cache) for path, cache in snapshot.reach.caches}
        self._before = [(path, cache, cache.cache_info()) for path, cache in caches.values()]

    def obstacle(self) -> str:
        """Why the caches cannot be what they were; empty if they can, or if the functions do nothing but compute what is remembered."""
        for path, cache, before in self._before:
            if before.currsize and cache.cache_info().misses != before.misses and not computes_only(cache.__wrapped__):
                return f"{path} has remembered a result, and may have done more than to compute it"
        return ""

    def restore(self) -> None:
        """Empties those that were empty."""
        for _, cache, before in self._before:
            if not before.currsize and cache.cache_info().misses != before.misses:
                cache.cache_clear()

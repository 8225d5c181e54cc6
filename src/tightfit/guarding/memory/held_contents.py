"""What containers hold, taken by reference before an update that may be run again: an optimizer's states, and the lists and counts that it keeps among them."""

from collections import deque
from typing import Any


class HeldContents:
    """The items of `container`, and of the dicts, lists, sets and deques within it. Tensors are not copied."""

    def __init__(self, container: Any) -> None:
        self._held: list[tuple[Any, Any]] = []
        waiting, seen = [container], set[int]()
        while waiting:
            each = waiting.pop()
            if id(each) in seen or not isinstance(each, dict | list | set | deque):
                continue
            seen.add(id(each))
            # Of their own class: one that makes its values when it is asked for them is to make none.
            held = dict(each) if isinstance(each, dict) else list(each)
            self._held.append((each, held))
            waiting += dict.values(each) if isinstance(each, dict) else held

    def restore(self) -> None:
        """Puts the items back, in place."""
        for container, held in self._held:
            container.clear()
            if isinstance(container, list | deque):
                container.extend(held)
            else:
                container.update(held)

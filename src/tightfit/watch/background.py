"""Work that may take its time (a network, another program), in a thread of its own, so that the agent never waits for it."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

_END_SECONDS = 5.0


class Background(Generic[Item]):
    """Handles items one after the other. At most `max_waiting` wait; of more the oldest is dropped. `trouble` says why the last one failed, empty if it did not."""

    def __init__(self, name: str, handle: Callable[[Item], None], *, max_waiting: int) -> None:
        """`handle` may raise anything: it is said, and the next item is handled."""
        self.name = name
        self.trouble = ""
        self.num_dropped = 0
        self._handle = handle
        self._waiting: queue.Queue[Item | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name=f"tightfit watch {name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hands over an item, at once."""
        while True:
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                self._drop()

    def close(self) -> None:
        """Waits for what was handed over, a few seconds at most; what is still going on then ends with the process."""
        while True:
            try:
                self._waiting.put_nowait(None)
                break
            except queue.Full:
                self._drop()
        self._thread.join(_END_SECONDS)

    def _drop(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return
        self.num_dropped += 1

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._handle(item)
            # A thread that ended here would handle nothing more, without a word.
            except Exception as error:  # noqa: BLE001 - another package's errors have no common class
                self.trouble = f"{self.name}: {str(error) or type(error).__name__}"
            else:
                self.trouble = ""

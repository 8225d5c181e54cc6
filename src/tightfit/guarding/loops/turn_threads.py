"""Which threads run a turn of a loop: the one that it began in, and torch's own, in which hooks of a backward pass are called on a card."""

import threading

from tightfit.torch_hooks.manifest import GRAPH_TASK_ID


class TurnThreads:
    """Of the turns in the thread in which this is made."""

    def __init__(self) -> None:
        self._own = threading.get_ident()

    def is_here(self) -> bool:
        """Whether the caller runs in one of them. A backward pass that another thread of the program's runs cannot be told apart, and counts."""
        return threading.get_ident() == self._own or GRAPH_TASK_ID.call() != -1

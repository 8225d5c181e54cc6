"""What a session has to say to the user: when a plan is put on, and later, when a run shows more."""

from collections.abc import Callable, Iterable


class Notes(list[str]):
    """Lines for the user. `tell` is given those that come after it was set; None: nobody is told, and whoever reads the list finds them."""

    tell: Callable[[str], None] | None = None

    def append(self, note: str) -> None:
        super().append(note)
        if self.tell is not None:
            self.tell(note)

    def extend(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.append(note)

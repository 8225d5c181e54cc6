"""What IPython hands to an object that it shows in a terminal."""

from typing import Protocol


class Printer(Protocol):
    """The part of IPython's RepresentationPrinter that is used."""

    def text(self, obj: str) -> None:
        """Prints a text as it is."""

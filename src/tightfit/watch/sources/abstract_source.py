"""The interface of a source, and what it raises when its driver does not answer."""

import abc
from typing import ClassVar

from tightfit.watch.machine.readings import ProcessFacts, Reading


class SourceLost(Exception):
    """The driver does not answer; the message says why, in one line. The source can be asked again."""


class AbstractSource(abc.ABC):
    """One way to read the cards of a machine. Subclasses are final."""

    name: ClassVar[str]
    """As people call it: `NVML`, `simulated`."""

    @abc.abstractmethod
    def read(self, now: float) -> Reading:
        """All cards and processes at this moment (`now` is in Unix seconds). Takes milliseconds. A driver that was away is opened again.

        Raises:
            SourceLost: the driver does not answer.
        """

    @abc.abstractmethod
    def facts(self, pid: int) -> ProcessFacts:
        """Whose process it is, at this moment. What cannot be found out is said as `?`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets the driver go."""

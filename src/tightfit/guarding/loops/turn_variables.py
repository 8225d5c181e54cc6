"""The variables of one turn of a loop: what they had at its beginning, and what they are bound to where it is taken back. No torch."""

from typing import Any

from tightfit.guarding.loops.names_of_turn import TurnNames


class TurnVariables:
    """The rewritten loop hands the variables over one by one, and asks what to do with them after an error."""

    def __init__(self, names: TurnNames) -> None:
        self._names = names
        self.at_begin: dict[str, Any] = {}
        """By name; without those that the turn binds first."""
        self._ids: dict[str, int] = {}

    def sees(self, name: str, value: Any) -> None:
        """A variable that the turn reads or binds, and its value at the beginning."""
        if name in self._names.bound:
            self._ids[name] = id(value)
        # What the turn binds first is not kept: it may be the output of the turn before.
        if name not in self._names.fresh:
            self.at_begin[name] = value

    def compares(self, name: str, value: Any) -> None:
        """After an error: the value that a variable has."""
        if self._ids.get(name) == id(value):
            del self._ids[name]
        else:
            self._ids[name] = -1

    def drops(self, name: str) -> bool:
        """Whether a variable is to be dropped: the failed attempt has bound it, and its value may be large."""
        return self._ids.get(name) == -1

    def had(self, name: str) -> bool:
        """Whether a variable is to be bound to what it had at the beginning."""
        return name in self.at_begin

    def value(self, name: str) -> Any:
        """That value."""
        return self.at_begin.pop(name)

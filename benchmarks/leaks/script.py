"""What a script of this benchmark is: a generator function that sets up and then yields once per step, and what is to be found in it.

A line that allocates what leaks ends in `# leaks here`; several may, where the graph of a step is retained.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

Function = Callable[[str], Iterator[None]]
MARK = "# leaks here"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script. `cause` is empty for a clean one; `holder` is a part of the path that has to be named, empty where no Python object holds the memory."""

    function: Function
    cause: str
    holder: str
    steps: int
    is_virtual: bool

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.__name__

    @property
    def file(self) -> Path:
        """Where the function is."""
        return Path(inspect.getsourcefile(self.function) or "")

    @property
    def lines(self) -> set[int]:
        """The lines that allocate what leaks: those of the script, or of the classes that it uses, that are marked with its name or with none."""
        lines, begin = inspect.getsourcelines(self.function)
        own = {begin + at for at, line in enumerate(lines) if MARK in line}
        named = f"{MARK}: {self.name}"
        return own | {
            at for at, line in enumerate(self.file.read_text().splitlines(), 1) if line.rstrip().endswith(named)
        }


LEAKING: list[Script] = []
CLEAN: list[Script] = []


def leaking(
    cause: str, *, holder: str = "", steps: int = 14, is_virtual: bool = False
) -> Callable[[Function], Function]:
    """Registers a script that leaks; its docstring begins with the report that it stands for."""

    def register(function: Function) -> Function:
        LEAKING.append(Script(function=function, cause=cause, holder=holder, steps=steps, is_virtual=is_virtual))
        return function

    return register


def clean(*, steps: int = 14, is_virtual: bool = False) -> Callable[[Function], Function]:
    """Registers a script that does not leak."""

    def register(function: Function) -> Function:
        CLEAN.append(Script(function=function, cause="", holder="", steps=steps, is_virtual=is_virtual))
        return function

    return register

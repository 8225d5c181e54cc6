"""Standard input of a rank: reading it is refused, since what one rank reads the others would not. An empty one would be taken for the program's data."""

from collections.abc import Callable
from typing import Never

from tightfit.capture.child_process import program_stdin

WHY = "it reads standard input, which only one process could: give it what it reads in a file or as an argument"


def refuse_input(refuse: Callable[[str], Exception]) -> None:
    """From now on reading `sys.stdin` raises what `refuse` makes."""

    def asked() -> Never:
        raise refuse(WHY)

    program_stdin.install(asked, None)

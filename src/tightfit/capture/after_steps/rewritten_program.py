"""The user's program with checks in its loops: the files that were rewritten, their loops and branches, and what ran.

The script and the user's own modules are compiled through here; installed packages are not, and neither is a file that cannot be parsed.
"""

import ast
import builtins
import dis
import inspect
import os
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType

from tightfit.capture.after_steps.branches_seen import BranchesSeen
from tightfit.capture.after_steps.rewriting import LEAVE, LEAVING, LEFT, SEEN, STEPS, UNTIL, Branch, Rewriter, UserLoop
from tightfit.capture.observe.attribution import is_of_another_library, is_user_file
from tightfit.capture.replace import replace

_FOR_ITER = dis.opmap["FOR_ITER"]


class LoopLeft(BaseException):
    """Leaves a loop in the middle of its turn. A BaseException, so that a script's `except Exception` does not catch it."""


class RewrittenProgram:
    """What the code of the program refers to: loop `n` asks `leave[n]` in each turn, counts in `steps[n]` the training steps since it began
    (-1: it was left), and branch `n` sets its mark in `seen`. `until` is a file and a line where the trace is to end.
    """

    def __init__(self, until: tuple[str, int] | None = None) -> None:
        self._until = until
        self.loops: list[UserLoop] = []
        self.branches: list[Branch] = []
        self.trees: dict[str, ast.Module] = {}
        self.leave = bytearray()
        self.seen = BranchesSeen()
        self.steps: list[int] = []
        self.leaving = -1
        """The loop that a `LoopLeft` is on its way to."""
        self._asks = 0
        self._of_file: dict[str, list[tuple[int, UserLoop]]] = {}

    def install(self, left: Callable[[int], bool], reached: Callable[[], None]) -> None:
        """Gives the code its names, and compiles the user's modules when they are imported. `left` is asked whether to leave a loop, `reached` is
        called at the line where the trace is to end."""
        # Among the builtins, since every module of the program sees these; `vars(module)` and `globals()` stay as they are.
        for name, value in (
            (LEAVE, self.leave),
            (LEFT, left),
            (STEPS, self.steps),
            (SEEN, self.seen.marks),
            (UNTIL, reached),
            (LEAVING, self._caught_by),
        ):
            setattr(builtins, name, value)
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            code = self.compiled(loader.get_data(path), path) if is_user_file(path) else None
            return plain(loader, fullname) if code is None else code

        replace(SourceFileLoader, get_code=get_code)

    def _caught_by(self, number: int) -> type[LoopLeft] | tuple[()]:
        """What the handler of a loop catches."""
        return LoopLeft if number == self.leaving else ()

    def compiled(self, source: bytes, path: str) -> CodeType | None:
        """The code of a file with its checks; None if it cannot be parsed."""
        loops, branches = len(self.loops), len(self.branches)
        until = None if self._until is None or os.path.realpath(path) != self._until[0] else self._until[1]
        try:
            tree = Rewriter(path, self.loops, self.branches, until=until).rewrite(ast.parse(source, path))
            code = compile(tree, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            # Python itself says what is wrong when it compiles the file; where it finds nothing, the file runs as it is.
            del self.loops[loops:], self.branches[branches:]
            return None
        self.trees[path] = tree
        self._of_file[path] = [(n, self.loops[n]) for n in range(loops, len(self.loops))]
        self.leave.extend([self._asks] * (len(self.loops) - loops))
        self.steps.extend([0] * (len(self.loops) - loops))
        self.seen.marks.extend(bytes(len(self.branches) - branches))
        return code

    def ask_in_each_turn(self) -> None:
        """From now on each turn of each loop asks whether to leave it."""
        self._asks = 1
        self.leave[:] = bytes([1]) * len(self.leave)

    def is_rewritten(self, path: str) -> bool:
        """Whether the file at `path` was compiled here."""
        return path in self._of_file

    def around(self, frame: FrameType | None) -> Iterator[int]:
        """The loops that run now, by their numbers, from the innermost out."""
        while frame is not None:
            yield from reversed(self._in_frame(frame))
            frame = frame.f_back

    def inside(self, number: int) -> Iterator[int]:
        """The loops that may run within a loop: those in its body, and those of other functions, which it may call."""
        outer = self.loops[number]
        for inner, loop in enumerate(self.loops):
            is_elsewhere = (loop.file, loop.scope) != (outer.file, outer.scope)
            if is_elsewhere or (inner != number and outer.first <= loop.line <= outer.last):
                yield inner

    def loop_to_leave(self, frame: FrameType | None, num_steps: int) -> int | None:
        """The innermost loop of the user's in which so many training steps have ended, if nothing but the user's code, torch and Python is called
        from there on: what else is in between may not expect a `LoopLeft`."""
        while frame is not None:
            for number in reversed(self._in_frame(frame)):
                if self.is_held_by_generator(number, frame):
                    return None
                if self.steps[number]:
                    return number if self.steps[number] >= num_steps else None
            file = frame.f_code.co_filename
            if not self.is_rewritten(file) and (is_user_file(file) or is_of_another_library(file)):
                return None
            frame = frame.f_back
        return None

    def is_held_by_generator(self, number: int, frame: FrameType) -> bool:
        """Whether a loop that runs in `frame` never ends and hands out what it does by `yield`: whoever asks it for more by `next` in a loop, which is
        the one to be left, knows of no end."""
        is_generator = self.loops[number].is_endless and frame.f_code.co_flags & inspect.CO_GENERATOR
        return bool(is_generator) and any(self.steps[n] > 0 for n in self.around(frame.f_back))

    def _in_frame(self, frame: FrameType) -> list[int]:
        code, line = frame.f_code, frame.f_lineno
        found = []
        for number, loop in self._of_file.get(code.co_filename, ()):
            if (code.co_firstlineno, code.co_name) != loop.scope or self.steps[number] < 0:
                continue
            # At the line of `for` a loop is running only while it asks its iterable for the next item.
            is_next = loop.is_for and line == loop.line and code.co_code[frame.f_lasti] == _FOR_ITER
            if is_next or loop.first <= line <= loop.last:
                found.append(number)
        return found

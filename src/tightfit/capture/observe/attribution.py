"""Attributes each operator to a module and to a line of the user's own code.

Modules are followed by wrapping `Module.__call__`. In a backward pass there is no module and, on autograd's own thread, no user frame
either; there the place of the forward operator that made the node is taken, found by the node's sequence number, which autograd assigns
just before the forward operator is dispatched.
"""

import contextlib
import os
import re
import sys
import sysconfig
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from tightfit.capture.observe.recorder import Recorder
from tightfit.errors.package_folders import package_folders
from tightfit.errors.program_folder import relative_to_begin
from tightfit.tape import Phase

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


_LIBRARY_FOLDERS = tuple(
    {
        os.path.realpath(folder) + os.sep
        for folder in (
            *package_folders(),
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
            os.path.dirname(torch.__file__),
            os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        )
    }
)


class Attribution:
    """Finds the module path and the user's line of the operator that is being dispatched."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.modules: list[torch.nn.Module] = []
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        # By the sequence numbers of nodes. Each thread has its own, so that those of a recomputation, on autograd's, are numbers of a forward pass too: they
        # are kept apart by how many backward passes are around the one that runs them.
        self._places: list[dict[int, tuple[int, int]]] = [{}]
        self._depth = 0
        # By identity: two functions that are written alike have equal code, whatever their files. The code is kept, so that its number stays its own.
        self._is_user_code: dict[int, tuple[CodeType, bool]] = {}
        self._lines: dict[tuple[int, int], int] = {}
        self.call_code: CodeType | None = None
        """The code that calls a module: its frame divides what runs in the module from what has called it."""
        self.lines_below: dict[FrameType, int] = {}
        """The line below each such frame that is on the stack; whoever calls the module takes its frame out again."""

    def locate(self) -> tuple[int, int]:
        """The place of the operator that is being dispatched: (module, line), as indices of strings."""
        in_backward = self.recorder.phase == Phase.BACKWARD
        # In a backward pass a module runs only in a recomputation, and then the frames on the stack say more
        # than the node.
        if in_backward and not self.modules:
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._places[self._depth].get(node._sequence_nr(), (0, 0))
        place = (self.path_of(self.modules[-1]) if self.modules else 0, self.line())
        if in_backward:
            line = place[1] or self._places[self._depth].get(_sequence_number_of_running_node(), (0, 0))[1]
            place = (place[0], line)
            # In a recomputation operators make nodes as well, which a reentrant checkpoint runs in a backward pass of its own.
            if len(self._places) == self._depth + 1:
                self._places.append({})
            self._places[self._depth + 1][torch.autograd._get_sequence_nr() - 1] = place
        elif torch.is_grad_enabled():
            # The first operator that finds a number as the latest is the one that it was assigned for;
            # operators without gradients after it find the same number.
            self._places[0].setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def forget_graph(self) -> None:
        """The backward pass is over: the sequence numbers of its graph are no longer needed."""
        self._places = [{}]

    @contextlib.contextmanager
    def inner_backward(self) -> Iterator[None]:
        """Around a backward pass within another one, of a recomputation's own graph."""
        self._depth += 1
        if len(self._places) == self._depth:
            self._places.append({})
        try:
            yield
        finally:
            self._depth -= 1

    def line(self) -> int:
        """The innermost line of the user's own code, as an index of strings; 0 where there is none on this thread.

        Below the call of a module nothing moves before it returns, so that the walk ends there from the second operator on.
        """
        frame: FrameType | None = sys._getframe(1)
        index, passed = 0, []
        while frame is not None:
            code = frame.f_code
            if code is self.call_code:
                below = self.lines_below.get(frame)
                if below is not None:
                    index = below
                    break
                passed.append(frame)
            elif self._is_users(code):
                index = self._line_of(code, frame.f_lineno)
                break
            frame = frame.f_back
        for call in passed:
            self.lines_below[call] = index
        return index

    def _is_users(self, code: CodeType) -> bool:
        known = self._is_user_code.get(id(code))
        if known is None:
            known = self._is_user_code[id(code)] = code, is_user_file(code.co_filename)
        return known[1]

    def _line_of(self, code: CodeType, number: int) -> int:
        index = self._lines.get((id(code), number))
        if index is None:
            index = self._lines[id(code), number] = self.recorder.strings.intern(f"{short(code.co_filename)}:{number}")
        return index

    def where(self, *, otherwise: str = "a library") -> str:
        """The user's line as text, for an assumption; `otherwise` where none of the program's is on the stack."""
        index = self.line() or self.locate()[1]
        return self.recorder.strings.texts[index] or otherwise

    def weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """The parameters that the modules which were called hold themselves, each with the path of its module as an index of strings."""
        for module, path in self._paths.items():
            yield from ((parameter, path) for parameter in module._parameters.values() if parameter is not None)

    def called(self, module: torch.nn.Module) -> None:
        """Notes that `module` is called by itself, as a list of modules never is: what wraps forwards has an effect on these alone."""
        self.recorder.called_modules[self.path_of(module)] = None

    def path_of(self, module: torch.nn.Module) -> int:
        """The path of `module`, which is being called, as an index of strings."""
        index = self._paths.get(module)
        if index is None:
            root = self.modules[0]
            prefix = type(root).__name__
            # `named_modules` leaves out a module that it has named before: a shared one has the first of its
            # paths.
            for name, child in root.named_modules():
                path = f"{prefix}.{name}" if name else prefix
                self._paths.setdefault(child, self.recorder.strings.intern(path))
                classes, name_of_class = self.recorder.module_classes, type(child).__name__
                if classes.setdefault(path, name_of_class) != name_of_class:
                    classes[path] = ""
            # What a forward makes for itself (a loss function, often) is a part of the module that runs it.
            around = reversed(self.modules[: self.modules.index(module)])
            index = next((self._paths[m] for m in (module, *around) if m in self._paths), 0)
        return index


def user_line() -> str:
    """The innermost line of the user's own code on this thread, as text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def _sequence_number_of_running_node() -> int:
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def is_user_file(filename: str) -> bool:
    if filename.startswith("<") or _INSTALLED.search(filename):
        return False
    return not os.path.realpath(filename).startswith(_LIBRARY_FOLDERS)


_STANDARD_LIBRARY = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
# Unlike `_LIBRARY_FOLDERS` without site-packages: another library that reads gradients (a trainer, a clipper)
# is reported.
_OF_TORCH = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
)


def is_users_or_other(filename: str) -> bool:
    """Whether code in `filename` is neither torch's nor ours: the user's own, or another library's."""
    return not os.path.realpath(filename).startswith(_OF_TORCH)


def is_of_another_library(filename: str) -> bool:
    """Whether code in `filename` is that of an installed package other than torch and ours."""
    if filename.startswith("<") or is_user_file(filename) or not is_users_or_other(filename):
        return False
    # site-packages lies within the standard library's folder.
    return bool(_INSTALLED.search(filename)) or not os.path.realpath(filename).startswith(_STANDARD_LIBRARY)


def short(filename: str) -> str:
    """A file name for display: relative to the working folder if it is inside of it."""
    relative = relative_to_begin(filename)
    return filename if relative.startswith("..") else relative

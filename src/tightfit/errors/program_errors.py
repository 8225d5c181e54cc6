"""Exceptions of the user's program: as one line, with the place in the program's own code and the first cause, and as its traceback."""

import os
import runpy
import shlex
import sys
import sysconfig
import traceback

from tightfit.errors.faults import chain, is_own_file
from tightfit.errors.package_folders import package_folders
from tightfit.errors.program_folder import relative_to_begin

_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
# What runs a script or imports a module on our behalf (runpy is frozen in some builds, and a file in others).
_RUNNERS = ("<frozen runpy>", "<frozen importlib._bootstrap", runpy.__file__)
IN_A_THREAD = "arguments from the 'CUDA' backend"
"""What torch says of an operator on a virtual tensor where no virtual GPU is: in threads that the program has started."""
# What a build for CUDA says there, which looks for a card first: without a driver, and beside a card that is hidden.
_NO_CARD = ("Found no NVIDIA driver on your system", "No CUDA GPUs are available")
_STARTING_THREADS = tuple(
    os.path.join(sysconfig.get_path("stdlib"), *parts)
    for parts in (("threading.py",), ("concurrent", "futures", "thread.py"), ("multiprocessing", "pool.py"))
)
_ASSUMED = "_tightfit_assumed"
NO_STDIN = "a trace has no standard input: give the program what it asks for in its arguments, or in a file"
_ONE_OF_MANY = "torchrun sets it: tightfit estimate with --gpus N traces one of the N processes that it would start"
# What is wrong with an environment and not with a program: what the error says, and what helps.
_REMEDIES = {
    # PyPI's torchvision for Linux is built for CUDA, and its operators are not registered with a CPU build of torch; transformers imports it if it is there.
    "operator torchvision::": (
        "install the torchvision that was built with your torch (pip install --force-reinstall torchvision, "
        "with --index-url https://download.pytorch.org/whl/cpu beside a CPU build), or uninstall it where nothing needs it"
    ),
    "relative import with no known parent": "it is a module of a package: give it as python -m takes it (package.module), from the folder above the package",
    "NVML Shared Library Not Found": "a trace has no NVML: ask torch.cuda.mem_get_info() or nvidia-smi, which answer with the virtual GPU",
    "name 'get_ipython' is not defined": "it is there in a notebook only: take out the lines that call it, which were magics (%) and commands (!)",
    "EOF when reading a line": NO_STDIN,
    **dict.fromkeys(("'LOCAL_RANK'", "'WORLD_SIZE'", "'RANK'"), _ONE_OF_MANY),
}

_IN_THE_MAIN_ONE = (
    "the program uses the GPU in a thread of its own, where a trace does not follow it: copy to the GPU in the main thread, "
    "at least while it is traced"
)


def is_of_a_thread(error: BaseException) -> bool:
    """Whether torch says with `error` that the program has used the GPU in a thread that a trace does not follow."""
    said = " ".join(map(_first_line, chain(error)))
    frames = (frame for link in chain(error) for frame in traceback.extract_tb(link.__traceback__))
    return IN_A_THREAD in said or (
        any(each in said for each in _NO_CARD) and any(frame.filename in _STARTING_THREADS for frame in frames)
    )


def says_of_a_thread(line: str) -> bool:
    """Whether `line`, of `one_line`, is of such an error."""
    return _IN_THE_MAIN_ONE in line


def note_assumed(error: BaseException, where: str, answer: str) -> None:
    """Notes on an exception of a traced program that a value of which it may be the result was assumed, at the line `where`."""
    setattr(
        error,
        _ASSUMED,
        f"; a trace has no values of the GPU: the one read at {where} was assumed to be {answer}, which may have led here",
    )


def assumed(error: BaseException) -> str:
    """What `note_assumed` has noted on `error`, to be put behind its message."""
    return getattr(error, _ASSUMED, "")


def one_line(label: str, error: BaseException) -> str:
    """A line that says that `label` raised `error`, where, and what its first cause was."""
    if isinstance(error, SyntaxError) and error.filename:
        of_a_notebook = (error.text or "").lstrip().startswith(("%", "!"))
        helps = "; a line with % or ! is of a notebook: take it out" if of_a_notebook else ""
        return f"{label} has a syntax error at {relative_to_begin(error.filename)}:{error.lineno}: {error.msg}{helps}"
    *_, first = links = chain(error)
    place = _place(error) or _place(first)
    where = f" at {place}" if place else ""
    cause = (
        "" if first is error else f" (caused by {type(first).__name__}{_at(first, place)}: {_cut(_first_line(first))})"
    )
    said = " ".join(map(_first_line, links))
    helps = next((f"; {remedy}" for known, remedy in _REMEDIES.items() if known in said), "")
    if is_of_a_thread(error):
        helps = f"; {_IN_THE_MAIN_ONE}"
    helps = helps or _helps_to_find(label, first)
    return f"{label} raised {_class_name(error)}{where}: {_cut(_first_line(error))}{cause}{helps}{assumed(error)}"


def _cut(message: str) -> str:
    """Without the screen that torch goes on for with what it was built with."""
    return message[: message.index(IN_A_THREAD) + len(IN_A_THREAD)] if IN_A_THREAD in message else message


def _helps_to_find(label: str, error: BaseException) -> str:
    """What helps where a file or a module was not found that may be somewhere else, or an argument that was not given."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    if isinstance(error, IndexError) and last is not None and "argv" in (last.line or ""):
        return "; the program's own arguments go after --"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str) and not os.path.isabs(error.filename):
        folder = os.path.dirname(label)
        if folder and os.path.exists(os.path.join(folder, error.filename)):
            return (
                f"; it is beside the program, which runs in the folder that you are in: cd {shlex.quote(folder)} first"
            )
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"; programs run with {sys.executable}: install it there"
    return ""


def program_trace(error: BaseException) -> str:
    """The traceback of `error` and its causes as plain Python would print it: without the frames of this package and of what runs a script."""
    whole = traceback.TracebackException.from_exception(error)
    waiting, seen = [whole], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        kept = [f for f in part.stack if not is_own_file(f.filename) and not f.filename.startswith(_RUNNERS)]
        # A failure that has no frame of the program's (of an import, say) is better shown whole.
        part.stack = traceback.StackSummary.from_list(kept or part.stack)
        waiting += [p for p in (part.__cause__, part.__context__, *(part.exceptions or ())) if p is not None]
    return "".join(whole.format())


def _class_name(error: BaseException) -> str:
    """The name of its class, or of the first one above that is not torch's own for tensors without data: a real run raises that one."""
    return next(kind.__name__ for kind in type(error).__mro__ if not kind.__module__.startswith("torch._subclasses"))


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    if not said:
        return _condition(error) or "(no message)"
    # What a worker of a data loader raised: its message ends the text, behind the traceback that was sent.
    if len(said) > 1 and said[1].startswith("Original Traceback"):
        return f"{said[0].removesuffix('.')}: {said[-1]}"
    # Transformers' lazy imports end their message with this hint, which makes no sense without the traceback.
    return said[0].removesuffix(" (look up to see its traceback):")


def _condition(error: BaseException) -> str:
    """The line of an `assert` without a message, which says what was asked for; empty for other errors."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    line = (last.line or "").strip() if last is not None and isinstance(error, AssertionError) else ""
    return line if line.startswith("assert") else ""


def _at(error: BaseException, known: str | None) -> str:
    place = _place(error)
    return f" at {place}" if place and place != known else ""


def _place(error: BaseException) -> str | None:
    """The innermost line of the program's own code, or else of a library's, that an exception went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_own_file(f.filename)]
    libraries = ("<", *_STANDARD, *package_folders())
    own = [f for f in frames if not f.filename.startswith(libraries) and "site-packages" not in f.filename]
    # Code that a library generated (torch.fx), or a command of an installed package, leaves no frame of the program's own.
    found = own or frames
    return f"{relative_to_begin(found[-1].filename)}:{found[-1].lineno}" if found else None

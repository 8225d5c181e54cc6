"""The command line: `tightfit COMMAND ...`. Each command is a file of its own and is imported only when it is used.

Data goes to stdout, messages and progress to stderr. Exit codes: 0 it fits or is done, 1 it does not fit, 2 usage, 3 it could not be done,
4 a bug in tightfit itself. `--debug`, with any command, shows the traceback of an error.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError, UnusedCliTokensError

from tightfit import __version__
from tightfit.cli.arguments.typed_words import check_words
from tightfit.errors import ProgramError, TightfitError, UsageError
from tightfit.errors.faults import internal_error

# A shell reports a process that signal N ended as 128 + N; these codes look the same to a script.
_SIGPIPE = 13
_INTERRUPTED = 130
_DEBUG = "--debug"
# How cyclopts ends its message about a value of another type.
_TYPES = re.compile(r"into ([\w|\[\], ]+)\.")
_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path", "None": "nothing"}
_MODULE = "-m"
# Errors of the file system (permissions, a full disk) about a path that the user named are no bugs of ours.
_OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR)

app = App(
    name="tightfit",
    version=__version__,
    help="Estimate the GPU memory of a PyTorch script without the GPU, and make it fit.",
    help_format="plaintext",
    help_epilogue="tightfit COMMAND --help lists the options. With --debug, any command shows the traceback of an error.",
    # The return value of a command is the exit code; by default cyclopts would end the process with it.
    result_action="return_value",
    # Otherwise cyclopts turns Ctrl-C into sys.exit(130) without a message.
    suppress_keyboard_interrupt=False,
    # No --no-json beside --json, and no "[default: ...]": each help text says its default in words.
    default_parameter=Parameter(negative=(), show_default=False),
)
# The help texts are repeated here, so that `tightfit --help` imports no command. Grouped by the question that a user has.
_GROUPS = {
    "Will it fit?": {
        "estimate": "Estimate the peak GPU memory of a script on one GPU or several; no GPU is needed.",
    },
    "Make it fit": {
        "plan": "Find the fastest combination of techniques with which a script fits.",
        "run": "Run an unmodified script with a plan applied.",
        "techniques": "List the techniques, and what each trades for memory.",
    },
    "Serve it": {
        "serve": "Estimate what a language model needs to be served, and for how many requests there is room.",
    },
    "What happened?": {
        "record": "Run a script and record its memory.",
        "doctor": "Explain the memory of a run: categories, allocation sites, growth, fragmentation, suggestions.",
        "report": "Show the memory of a run or a plan as an HTML page, Perfetto tracks, JSON or text.",
        "diff": "Compare two runs: what grew, and the first allocation that differs.",
        "replay": "Replay a recording of torch's caching allocator with other settings or less memory.",
    },
    "This machine": {
        "devices": "List the known GPUs and those of this machine, or show one.",
        "watch": "Watch the GPUs: who uses how much memory, and what the next hour needs.",
        "calibrate": "Measure the GPU of this machine, for more accurate estimates.",
        "forecast": "Forecast the memory of running processes from their past: the next maximum, with an upper bound.",
        "place": "Assign offsets to buffers with known lifetimes.",
    },
}
_COMMANDS = {name: text for commands in _GROUPS.values() for name, text in commands.items()}
_OF_SCRIPTS = ("estimate", "plan", "run", "record", "doctor", "report", "diff")
# Sort keys keep groups and commands in this order; by default cyclopts takes that of the alphabet.
for _at, (_heading, _commands) in enumerate(_GROUPS.items()):
    _group = Group(_heading, sort_key=_at)
    for _row, (_name, _help) in enumerate(_commands.items()):
        app.command(f"tightfit.cli.{_name}:{_name}", name=_name, help=_help, group=_group, sort_key=_row)
_options = Group("Options", sort_key=len(_GROUPS))
for _flag in ("--help", "--version"):
    app[_flag].group = _options


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; errors are one line on stderr, after their traceback with `--debug`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    # Only before --: what follows belongs to the user's script.
    is_debug = _DEBUG in words[:end]
    try:
        check_words(words[:end])
        result = app([*_own_words(words[:end]), *words[end:]], exit_on_error=False, print_error=False)
        # Here, where a closed pipe can be caught, and not when the interpreter shuts down.
        sys.stdout.flush()
    except CycloptsError as error:
        return _say(_usage_error(error, words[:end]), is_debug=is_debug)
    except TightfitError as error:
        return _say(error, is_debug=is_debug)
    except KeyboardInterrupt:
        sys.stderr.write("tightfit: interrupted\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does; what is still buffered must not be written when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + _SIGPIPE
    except Exception as error:  # noqa: BLE001 - what a program raises that a command runs ends in `tightfit.cli.arguments.programs`
        # Nothing but our own code runs up to here: programs of the user end in `exit_code_of`.
        return _say(_own(error, words), is_debug=is_debug)
    # --help and --version return None.
    return result if isinstance(result, int) else 0


def _usage_error(error: CycloptsError, words: Sequence[str]) -> UsageError:
    from tightfit.capture.targets.target_files import refuse_launcher

    # Messages of cyclopts can span several lines.
    line = _TYPES.sub(lambda found: f"into {_kinds(found[1])}.", " ".join(str(error).split()))
    if isinstance(error, UnusedCliTokensError):
        line = f"{words[0]} takes no {' '.join(error.unused_tokens or ())}"
    if not isinstance(error, UnknownOptionError):
        return UsageError(f"{line} (see tightfit --help)")
    try:
        # Its options come before the script (`torchrun --nproc_per_node 2 train.py`).
        refuse_launcher("".join(words[1:2]))
    except UsageError as refused:
        return refused
    others = _commands_with(error.token.keyword or error.token.value or "", but="".join(words[:1]))
    hints = [
        *([f"it is one of tightfit {', '.join(others)}"] if others else ()),
        *(["a script's own options go after --"] if words and words[0] in _OF_SCRIPTS else ()),
        "see tightfit --help",
    ]
    return UsageError(f"{line} ({'; '.join(hints)})")


def _kinds(types: str) -> str:
    """Types of Python in words: `int|Literal[all]` is a whole number or all."""
    words = [word for kind in types.split("|") for word in kind.removeprefix("Literal[").removesuffix("]").split(", ")]
    return " or ".join(_KINDS.get(word, word) for word in words)


def _commands_with(option: str, *, but: str) -> list[str]:
    """The other commands that have an option."""
    option = option.partition("=")[0]
    return [
        name
        for name in _COMMANDS
        if name != but and any(option in each.names for each in app[name].assemble_argument_collection())
    ]


def _own_words(words: Sequence[str]) -> list[str]:
    """The words before --, without --debug, and with a module after `-m`, as python takes it, in the form of a target."""
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] == _MODULE:
            kept[-1] = word if "." in word else _top_module(word)
        elif word != _DEBUG:
            kept.append(word)
    return kept


def _top_module(name: str) -> str:
    """The target that `python -m NAME` runs: the file of that name, or the `__main__` of a package."""
    from tightfit.capture.targets.target_files import module_file

    package = f"{name}.__main__"
    return package if module_file(package) and not Path(f"{name}.py").is_file() else f"{name}.py"


def _own(error: Exception, words: Sequence[str]) -> TightfitError:
    """The TightfitError for an exception that our own code raised."""
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return TightfitError(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    return internal_error(error, f"tightfit {words[0]}" if words and words[0] in _COMMANDS else "tightfit")


def _say(error: TightfitError, *, is_debug: bool) -> int:
    if is_debug:
        sys.stderr.write(error.trace or "".join(traceback.format_exception(error)))
    hint = f" ({_DEBUG} shows the traceback)" if isinstance(error, ProgramError) and not is_debug else ""
    sys.stderr.write(f"tightfit: {error}{hint}\n")
    return error.exit_code

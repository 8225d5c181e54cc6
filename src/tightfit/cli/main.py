"""The command line: `tightfit COMMAND ...`. Each command is a file of its own and is imported only when it is used.

Data goes to stdout, messages and progress to stderr. Exit codes: 0 it fits or is done, 1 it does not fit, 2 usage, 3 it could not be done,
4 a bug in tightfit itself. `--debug`, with any command, shows the traceback of an error.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from tightfit import __version__
from tightfit.errors import ProgramError, TightfitError, UsageError
from tightfit.errors.faults import internal_error

# A shell reports a process that signal N ended as 128 + N; these codes look the same to a script.
_SIGPIPE = 13
_INTERRUPTED = 130
_DEBUG = "--debug"
# Errors of the file system (permissions, a full disk) about a path that the user named are no bugs of ours.
_OF_THE_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR)

app = App(
    name="tightfit",
    version=__version__,
    help="Makes a PyTorch workload fit the GPU it is given, as fast as it can run there.",
    help_format="plaintext",
    help_epilogue="With --debug, any command shows the traceback of an error.",
    # The return value of a command is the exit code; by default cyclopts would end the process with it.
    result_action="return_value",
    # Otherwise cyclopts turns Ctrl-C into sys.exit(130) without a message.
    suppress_keyboard_interrupt=False,
    # No --no-json beside --json, and no "[default: ...]": each help text says its default in words.
    default_parameter=Parameter(negative=(), show_default=False),
)
# The help texts are repeated here, so that `tightfit --help` imports no command.
_COMMANDS = {
    "estimate": "Say what a workload would hold on a card, without the card.",
    "plan": "Find the fastest combination of techniques with which a workload fits a card.",
    "run": "Run a script with a plan on it, unmodified.",
    "replay": "Replay a recording of torch's allocator (torch.cuda.memory._dump_snapshot), with other settings or less memory.",
    "record": "Run a script and record its memory, on the card or (where there is none) on a virtual one.",
    "doctor": "Explain the memory of one run: who holds it, what grows, what is wasted, what to do next.",
    "diff": "Compare two runs, recorded or estimated: what grew, and where they part first.",
    "techniques": "List the techniques that a plan can be made of, and what each trades.",
    "devices": "List the known cards, or show one of them.",
    "report": "Show what held a card's memory over a run: an HTML page, tracks for Perfetto, JSON or text.",
    "place": "Give buffers with known lifetimes addresses that fit a capacity, or say why they do not fit.",
    "calibrate": "Measure the card of this machine, for estimates that fit it.",
}
for _name, _help in _COMMANDS.items():
    app.command(f"tightfit.cli.{_name}:{_name}", name=_name, help=_help)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; errors are one line on stderr, after their traceback with `--debug`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    # Only before --: what follows belongs to the user's script.
    is_debug = _DEBUG in words[:end]
    try:
        result = app([*(w for w in words[:end] if w != _DEBUG), *words[end:]], exit_on_error=False, print_error=False)
        # Here, where a closed pipe can be caught, and not when the interpreter shuts down.
        sys.stdout.flush()
    except CycloptsError as error:
        # Messages of cyclopts can span several lines.
        line = " ".join(str(error).split())
        hint = "a script's own options go after --; " if isinstance(error, UnknownOptionError) else ""
        return _say(UsageError(f"{line} ({hint}see tightfit --help)"), is_debug=is_debug)
    except TightfitError as error:
        return _say(error, is_debug=is_debug)
    except KeyboardInterrupt:
        sys.stderr.write("tightfit: interrupted\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does; what is still buffered must not be written when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + _SIGPIPE
    except Exception as error:  # noqa: BLE001 - what a program raises that a command runs ends in `tightfit.cli.programs`
        # Nothing but our own code runs up to here: programs of the user end in `exit_code_of`.
        return _say(_own(error, words), is_debug=is_debug)
    # --help and --version return None.
    return result if isinstance(result, int) else 0


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


def main() -> None:
    """The entry point of the program `tightfit`."""
    # Shells have what they start in the background ignore interrupts: it would go on, and the traced program with it, when asked to stop.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())

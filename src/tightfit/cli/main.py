"""The command line: `tightfit COMMAND ...`. Each command lives in a file of its own and is imported only when it is asked for.

Data goes to stdout, talk and progress to stderr. Exit codes: 0 it fits or is done, 1 it does not fit, 2 usage, 3 it could not be done.
"""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from tightfit import __version__
from tightfit.errors import TightfitError, UsageError

_SIGPIPE = 13

app = App(
    name="tightfit",
    version=__version__,
    help="Makes a PyTorch workload fit the GPU it is given, as fast as it can run there.",
    help_format="plaintext",
    result_action="return_value",
    default_parameter=Parameter(negative=(), show_default=False),
)
# The help of each is said here, so that `tightfit --help` imports none of them.
_COMMANDS = {
    "estimate": "Say what a workload would hold on a card, without the card.",
    "plan": "Find the fastest combination of techniques with which a workload fits a card.",
    "run": "Run a script with a plan on it, unmodified.",
    "replay": "Replay a recording of torch's allocator (torch.cuda.memory._dump_snapshot), with other settings or less memory.",
    "record": "Run a script and record its memory, on the card or (where there is none) on the host.",
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
    """Runs a command line and returns its exit code; errors are one line on stderr."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        line = " ".join(str(error).split())
        hint = "a script's own options go after --; " if isinstance(error, UnknownOptionError) else ""
        sys.stderr.write(f"tightfit: {line} ({hint}see tightfit --help)\n")
        return UsageError.exit_code
    except TightfitError as error:
        sys.stderr.write(f"tightfit: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("tightfit: interrupted\n")
        return 130
    except BrokenPipeError:
        # Who read the answer has seen enough, as `head` does; what is still buffered must not be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + _SIGPIPE
    return result if isinstance(result, int) else 0


def main() -> None:
    """The program `tightfit`."""
    sys.exit(run())

"""The program `tightfit`, also as `python -m tightfit`. An interrupt that comes while the command line is being imported is one line too, and SIGTERM is
at any time."""

import os
import signal
import sys

from tightfit.cli.arguments import terminated


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    # Shells have what they start in the background ignore interrupts: it would go on, and the traced program with it, when asked to stop.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    try:
        terminated.close_first()
        from tightfit.cli.main import run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("tightfit: interrupted\n")
        code = 130
    except terminated.Terminated:
        code = 143
        terminated.end()
    sys.exit(code)


def _open_streams() -> None:
    """Opens what the caller has closed (`>&-`) as nothing: a file of the user's would get its number, and what is printed would be written there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()

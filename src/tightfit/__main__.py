"""The program `tightfit`, also as `python -m tightfit`. An interrupt that comes while the command line is being imported is one line too."""

import sys


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    try:
        from tightfit.cli.main import run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("tightfit: interrupted\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()

"""What a library prints when it is made does not come between an answer and who reads it."""

import subprocess
import sys

_PRINTS = """
import ctypes, os, sys
from tightfit.planner.silenced import made_silently

libc = ctypes.CDLL(None)

def make():
    libc.puts(b"a licence")
    os.write(1, b"a banner")
    return "made"

libc.puts(b"before")
print(made_silently(make))
libc.puts(b"after")
"""


def test_what_is_printed_in_c_goes_nowhere_and_what_was_printed_before_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", _PRINTS], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["after", "before", "made"]


def test_without_stdout_the_object_is_made_all_the_same() -> None:
    program = (
        "import os, sys; os.close(1); from tightfit.planner.silenced import made_silently as m; sys.exit(m(lambda: 7))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7

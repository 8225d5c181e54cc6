"""`tightfit watch` in a real terminal: it is drawn, follows its size, obeys keys and signals, and leaves the terminal as it was."""

import re
import sys
from pathlib import Path

from tests.watch.tmux import Terminal, terminal

WATCH = f"{sys.executable} -m tightfit watch --simulate 2x4"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]")


def start(found: Terminal) -> str:
    found.type(f"{WATCH}; echo ended with $?", "Enter")
    return found.wait_for("q quit")


def test_keys_sizes_and_the_end(tmp_path: Path) -> None:
    with terminal(tmp_path) as found:
        start(found)
        lines = found.wait_for("python").splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80
        assert sum("/80.0G" in line for line in lines) == 2
        assert COLOUR.search(found.screen(escapes=True))
        found.type("h")
        found.wait_for("select a process (also Alt-k Alt-j)")
        found.type("Down")
        found.wait_for("select a process", gone=True)
        found.resize(140, 45)
        # Tall enough for the history.
        found.wait_for("the last hour, peak")
        found.resize(30, 8)
        found.wait_for("the last hour", gone=True)
        found.wait_for("GPU-MEM")
        found.resize(100, 30)
        found.type("Down", "K")
        found.wait_for("send SIGKILL to process")
        found.type("y")
        found.wait_for("simulated processes take no signals")
        found.type("q")
        # The shell's own screen is back, with what it showed before.
        assert "watch --simulate 2x4" in found.wait_for("ended with 0")


def test_a_signal_ends_it_and_a_stop_hands_the_terminal_over(tmp_path: Path) -> None:
    with terminal(tmp_path, NO_COLOR="1") as found:
        start(found)
        found.wait_for("python")
        assert not COLOUR.search(found.screen(escapes=True))
        found.type("C-z")
        found.wait_for("q quit", gone=True)
        # What is typed before the shell is back is echoed by it twice.
        found.wait_for("Stopped")
        found.type("stty -a | grep -o -e '-\\?icanon'", "Enter")
        found.wait_for("\nicanon")
        found.type("fg", "Enter")
        found.wait_for("q quit")
        found.type("C-z")
        found.wait_for("q quit", gone=True)
        found.type("kill -TERM %1; fg; echo gone with $?", "Enter")
        found.wait_for("gone with 0")
        found.type("stty -a | grep -o -w -e '-\\?echo'", "Enter")
        found.wait_for("\necho\n")


def test_a_terminal_that_can_do_nothing_gets_a_table(tmp_path: Path) -> None:
    with terminal(tmp_path, TERM="dumb") as found:
        found.type(f"{WATCH}; echo ended with $?", "Enter")
        assert "next hour" in found.wait_for("ended with 0")

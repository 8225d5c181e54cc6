"""Starts the ranks of a run on this machine, and ends all of them when one ends otherwise than well. Without torch.

Not by torch's own launcher: that one reports in thirty lines, waits half a minute for ranks that do not end, and shows the output of all of them. The ranks get its variables
all the same, so that torchrun may start them in its stead (on several machines, say).
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tightfit.ranks.run_folder import run_folder

LOST = 113
"""The exit code of a rank that has ended because another one had."""
FOLDER = "TIGHTFIT_RANKS_FOLDER"
SEED = "TIGHTFIT_RANKS_SEED"
TAKEN = "signal-{}"
"""The file, in the folder of the run, that says that the script has a function for the signal with this number."""
ENDED = "ended-{}"
"""The file, in the folder of the run, that is not empty when the rank with this number has come to the end of the script with all others."""
# A rank that met the same error as the first one says so itself within this time.
_GRACE_SECONDS, _KILL_SECONDS = 5.0, 3.0
_POLL_SECONDS = 0.05


def is_rank() -> bool:
    """Whether this process was started as a rank, by `run_ranks` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(command: Sequence[str], num_ranks: int, say: Callable[[str], None], *, on_cards: bool) -> int:
    """Runs `command` as so many ranks, of which the first has this process's output. Returns the exit code of the run."""
    with run_folder() as (folder, kept):
        environment = _environment(num_ranks, folder, on_cards=on_cards)
        ranks = [_started(command, rank, environment, folder, kept) for rank in range(num_ranks)]
        with _ended_with(ranks, folder):
            try:
                return _watch(ranks, folder, say)
            except KeyboardInterrupt:
                return _told(ranks, signal.SIGINT)
            except _Told:
                return _told(ranks, signal.SIGTERM)


class _Told(BaseException):
    """This process was told to end (SIGTERM), and the script has a function for that."""


def _told(ranks: Sequence["subprocess.Popen[bytes]"], number: int) -> int:
    """The exit code of ranks that get a signal, and save what they have, however long that takes; another signal ends them."""
    try:
        for each in ranks:
            # Not its workers: they would be gone before the rank meets the others, and handles it.
            each.send_signal(number)
        _wait_for(ranks, math.inf)
    except (KeyboardInterrupt, _Told):
        _end(ranks)
    codes = [each.returncode for each in ranks]
    code = codes[0] or next((code for code in codes if code not in (0, LOST)), 0)
    return 128 - code if code < 0 else code


def _environment(num_ranks: int, folder: Path, *, on_cards: bool) -> dict[str, str]:
    """What all ranks have in their environment, besides their own numbers."""
    seed = os.urandom(4)
    return {
        # Sets of strings are iterated in an order that Python draws for each process.
        "PYTHONHASHSEED": str(int.from_bytes(seed[:3], "big")),
        # As torchrun sets it: so many processes would each take all cores.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)) if on_cards else "1",
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        FOLDER: str(folder),
        SEED: str(int.from_bytes(seed, "big")),
    }


def _started(
    command: Sequence[str], rank: int, environment: Mapping[str, str], folder: Path, kept: Sequence[int]
) -> "subprocess.Popen[bytes]":
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(
            command,
            env=environment,
            # What one rank reads the others would not: `rank_input` says so.
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=None if rank == 0 else err,
            # Signals of the terminal come through this process, once.
            start_new_session=True,
            pass_fds=kept,
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _watch(ranks: Sequence["subprocess.Popen[bytes]"], folder: Path, say: Callable[[str], None]) -> int:
    """Waits until all ranks have ended well, or one has not; then the others are ended. Returns the exit code."""
    # None of them can be left to notice the end of another one: the first may be at work of its own, or wait for ever for what was not sent.
    while None in (codes := _codes(ranks, folder)) and not any(codes):
        time.sleep(_POLL_SECONDS)
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return 0
    _wait_for(ranks, _GRACE_SECONDS)
    codes = _codes(ranks, folder)
    _end(ranks)
    if codes[0] is not None and codes[0] > 0 and codes[0] != LOST:
        # It has said why, as a run on one card does.
        return codes[0]
    rank = _first_of(failed, codes)
    code = ranks[rank].returncode
    say(f"rank {rank} {_how(code)}{_why(folder / f'{rank}.err', code)}; the other ranks were ended with it")
    return 128 - code if code < 0 else code or 1


def _first_of(failed: Sequence[int], codes: Sequence[int | None]) -> int:
    """The rank that the others have ended for: one that was seen to end first, and by itself."""
    by_itself = [rank for rank, code in enumerate(codes) if code is not None and code != LOST]
    # Gloo may abort a process whose connections break.
    of_itself = [rank for rank in by_itself if codes[rank] != -signal.SIGABRT]
    in_order = [*(rank for rank in of_itself if rank in failed), *(rank for rank in of_itself if codes[rank])]
    return next(iter([*in_order, *of_itself, *by_itself, *failed]))


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed ({signal.Signals(-code).name})"
    if code == LOST:
        return "lost the connection to the others"
    return f"ended with exit code {code}" if code else "ended before the others"


def _why(file: Path, code: int) -> str:
    """The last line that a rank has written to its stderr, if it ended with an error."""
    lines = file.read_text(errors="replace").strip().splitlines() if code > 0 else []
    return f": {lines[-1].removeprefix('tightfit: ')[:300]}" if lines else ""


@contextlib.contextmanager
def _ended_with(ranks: Sequence["subprocess.Popen[bytes]"], folder: Path) -> Iterator[None]:
    """However this process is left, all ranks have ended."""

    def terminated(number: int, _: object) -> None:
        if (folder / TAKEN.format(number)).exists():
            raise _Told
        _end(ranks)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(ranks)


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends what still runs, by force where it does not end."""
    for each in ranks:
        if each.poll() is None:
            _signal(each, signal.SIGTERM)
    _wait_for(ranks, _KILL_SECONDS)
    for each in ranks:
        if each.poll() is None:
            _signal(each, signal.SIGKILL)
        each.wait()


def _wait_for(ranks: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Until all have ended, and no longer than that."""
    until = time.monotonic() + seconds
    while None in _codes(ranks) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _codes(ranks: Sequence["subprocess.Popen[bytes]"], folder: Path | None = None) -> list[int | None]:
    """The exit code of each rank that has ended, as of now. All are asked, also where the first one still runs.

    With the `folder` of the run, that of a rank which was through is 0 where its process was aborted after that: a thread of gloo's or autograd's that lets go of a tensor
    while Python ends is ended by Python, and with it the process ("terminate called without an active exception").
    """
    codes = [each.poll() for each in ranks]
    if folder is None:
        return codes
    return [
        0 if code == -signal.SIGABRT and _size(folder / ENDED.format(rank)) else code for rank, code in enumerate(codes)
    ]


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    # Its own group too: workers of its loaders.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)

"""Who keeps the server of traces removes the folder of a trace whenever it is told to end: before it has read of the folder, and more than once."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are ended by others")


def _kept(folder: Path, told: Callable[[], None]) -> int:
    """The exit code of a keeper whose server has a trace in `folder`; `told` runs in it when its signals are handled and nothing is read yet."""
    from tightfit.capture.processes import keeper

    reads, writes = os.pipe()
    os.write(writes, f"{folder}\n".encode())
    own = os.fork()
    if own == 0:
        code = 1
        try:
            server = os.fork()
            if server == 0:
                os.close(reads)
                time.sleep(60)
                os._exit(0)
            os.close(writes)
            keeper.linux.signal_at_parents_end = lambda _: told()
            keeper._wait_for(server, reads)
            code = 0
        finally:
            os._exit(code)
    os.close(reads)
    os.close(writes)
    return os.waitstatus_to_exitcode(os.waitpid(own, 0)[1])


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]])
def test_a_folder_is_removed_whenever_the_signal_comes(numbers: list[signal.Signals], tmp_path: Path) -> None:
    folder = tmp_path / "of a trace"
    (folder / "dropped").mkdir(parents=True)
    (folder / "dropped").chmod(0)

    def told() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    assert _kept(folder, told) == 0
    assert not folder.exists()

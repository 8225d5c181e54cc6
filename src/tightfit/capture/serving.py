"""The process that captures are forked from: it has imported torch, and nothing of any workload.

It is told of a capture through a socket, with a file descriptor for the capture's stderr and a socket of its own to say the exit code on. When the
other end of that socket is closed the capture is killed: so none outlives who asked for it. With one thread, and nothing of torch run, a fork is
the process that a fresh one would have become.
"""

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

ONE_THREAD = "OPENBLAS_NUM_THREADS"
"""numpy would start threads at its import, which a fork does not have; what the user set is put back in each capture."""
CANNOT_FORK = 75  # EX_TEMPFAIL of sysexits.h
IDLE_SECONDS = 600.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h: a capture is killed when its origin dies, however that comes


class Server:
    """Forks a capture for each request on `control`. `run` is what a capture does with the path of its request; it does not return."""

    def __init__(self, control: socket.socket, run: Callable[[str], None]) -> None:
        self._control: socket.socket | None = control
        self._run = run
        self._captures: dict[
            int, tuple[int, socket.socket]
        ] = {}  # by the file descriptor of the process: its id, and who waits

    def serve(self) -> None:
        """Serves until nobody can ask any more and the last capture is over, or nobody has asked for long. Ends the process."""
        # Where torch cannot be imported each capture says so, in the words of a fresh process.
        with contextlib.suppress(Exception):
            importlib.import_module("tightfit.capture.session")
        if len(os.listdir("/proc/self/task")) > 1:
            os._exit(CANNOT_FORK)
        try:
            while self._turn():
                pass
        except KeyboardInterrupt:
            pass
        for process, _ in self._captures.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)

    def _turn(self) -> bool:
        control = self._control
        waiting = {reply.fileno(): process for process, reply in self._captures.values()}
        watched = [*self._captures, *waiting, *([] if control is None else [control.fileno()])]
        if not watched:
            return False
        ready = select.select(watched, [], [], None if self._captures else IDLE_SECONDS)[0]
        for descriptor in ready:
            if descriptor in self._captures:
                self._over(descriptor)
            elif descriptor in waiting:
                os.kill(waiting[descriptor], signal.SIGKILL)
            else:
                self._begin()
            return True  # what else is ready still is in the next turn
        return False

    def _begin(self) -> None:
        assert self._control is not None
        request, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 2)
        if not request:
            self._control = None
            return
        reply, errors = descriptors
        process = os.fork()
        if not process:
            self._become(request.decode(), reply, errors)
        os.close(errors)
        self._captures[os.pidfd_open(process)] = (process, socket.socket(fileno=reply))

    def _become(self, request: str, reply: int, errors: int) -> None:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            assert self._control is not None
            self._control.close()
            os.close(reply)
            for descriptor, (_, other) in self._captures.items():
                os.close(descriptor)
                other.close()
            os.dup2(errors, 2)
            os.close(errors)
            set_by_user = os.environ.pop(f"TIGHTFIT_{ONE_THREAD}", "")
            os.environ.pop(ONE_THREAD)
            if set_by_user:
                os.environ[ONE_THREAD] = set_by_user
            sys.argv[1:] = [request]
            self._run(request)
        finally:
            os._exit(1)

    def _over(self, descriptor: int) -> None:
        process, reply = self._captures.pop(descriptor)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with reply, contextlib.suppress(BrokenPipeError):
            reply.send(str(code).encode())

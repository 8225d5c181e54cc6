"""Children that begin with torch already imported: a server process imports it once, and forks for each child that is requested.

Importing torch takes longer than tracing a small program, and a plan traces many times. A server is kept for each requesting thread, as long as
the part of the environment that the interpreter and torch read is the same. It ends with that thread, and after a while without work. Without
`fork`, or if the server fails, the child is an ordinary one (`tightfit.capture.processes.children`).

    python -m tightfit.capture.processes.fork_server SOCKET PARENT SECONDS '["MODULE", "MODULE:FUNCTION", "import ...", ...]'
"""

import atexit
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tightfit.capture.processes.children import child, die_with_parent
from tightfit.capture.processes.containment import namespaces
from tightfit.capture.processes.containment.policy import Containment
from tightfit.capture.processes.keeper import Kept, keep

IDLE_SECONDS = 300
"""A server ends when it has not been asked for so long: in a notebook minutes pass between two estimates."""
_IS_SUPPORTED = sys.platform == "linux"
# Variables that are read when Python starts or when torch, numpy and the libraries that programs begin with are imported; all others are set anew in
# each child: torchrun's too, which torch reads when a process joins a group.
_READ_AT_START = re.compile(
    "TIGHTFIT_CONTAINMENT|HOME|XDG_|HF_|HUGGINGFACE|TRANSFORMERS|ACCELERATE|PEFT|LIGHTNING|PL_|DISABLE_|PYTHON|LD_|LC_|LANG|TZ|GLIBC|MALLOC|VIRTUAL_ENV|TORCH(?!ELASTIC)|PYTORCH|ATEN|USE_|CUDA|NVIDIA|NCCL|TRITON"
    "|OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|BLIS|NUMEXPR|NPY|NUMPY"
)
_MAX_BYTES = 1 << 20
_STATEMENTS = ("import ", "from ")
NOT_CLOSED_IN = 97
"""The exit code of a child that the kernel did not close in."""
NO_ROOM = 98
"""The exit code of a child that could not write its answer: the folder for temporary files is full."""


class ForkedChild:
    """A child of the server, used like `subprocess.Popen`. `returncode` is None while it runs."""

    def __init__(self, server: "_Server", pid: int, errors: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._errors = errors
        self._said: list[bytes] = []

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the child to end.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._server.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the child", timeout or 0)
            said = self._server.connection.recv(_MAX_BYTES)
            self._server.is_busy = False
            # The kernel's killer may have taken the server, and its child with it.
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        """Ends it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            if self._server.is_kept:
                # Then the server ends what it has started too.
                self.send_signal(signal.SIGKILL)
            else:
                os.killpg(self.pid, signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Sends it a signal.

        Raises:
            OSError: it has ended.
        """
        if self._server.is_kept:
            # Its process id is one of another namespace: only the server can send it one.
            self._server.connection.send(str(int(number)).encode())
        else:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[None, bytes | None]:
        """Its output to stderr, if that is read, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._errors is not None:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._errors], [], [], left)[0]:
                raise subprocess.TimeoutExpired("the child", timeout or 0)
            if not (piece := os.read(self._errors, _MAX_BYTES)):
                break
            # Kept here: whoever is told that it takes longer asks again.
            self._said.append(piece)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return None, b"".join(self._said) if self._errors is not None else None


class _Server:
    """The client side of one server process."""

    def __init__(self, environment: Mapping[str, str], preloaded: Sequence[str], *, is_kept: bool) -> None:
        # Packets, so that one `recv` is one message, and a closed end reads as empty.
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = environment
        self.preloaded = preloaded
        self.asked_by = os.getpid()
        self.is_busy = False
        self.is_kept = is_kept
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tightfit.capture.processes.fork_server"),
                    *(str(theirs.fileno()), str(self.asked_by), str(IDLE_SECONDS), json.dumps(preloaded)),
                    *(["kept"] if is_kept else []),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def end(self) -> None:
        """Ends the process; in a process that was forked from its owner, only closes the connection."""
        self.connection.close()
        if self.asked_by == os.getpid():
            # A keeper is told to, and ends what the server has started.
            (self.process.terminate if self.is_kept else self.process.kill)()
            self.process.wait()

    def serves(self, environment: Mapping[str, str], preloaded: Sequence[str], *, is_kept: bool) -> bool:
        """Whether a child forked from this server begins as a fresh process with that environment would."""
        names = environment.keys() | self.environment.keys()
        changed = [name for name in names if environment.get(name) != self.environment.get(name)]
        return (
            self.asked_by == os.getpid()
            and not self.is_busy
            and self.preloaded == preloaded
            and self.is_kept == is_kept
            and self.process.poll() is None
            and not any(map(_READ_AT_START.match, changed))
        )

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stderr: int,
        containment: Containment | None = None,
        imports: Sequence[str] = (),
    ) -> int | None:
        """Forks a child that calls `module`'s `main(*arguments, pid of the server)`. Returns its process id; None if the server does not answer."""
        self.is_busy = True
        try:
            order = {
                "module": module,
                "arguments": arguments,
                "environment": dict(environment),
                "folder": os.getcwd(),
                "containment": None if containment is None else dataclasses.asdict(containment),
                "imports": list(imports),
            }
            socket.send_fds(self.connection, [json.dumps(order).encode()], [1, stderr])
            said = self.connection.recv(_MAX_BYTES)
        except OSError:
            said = b""
        except BaseException:
            # Whether there is a child by now is not known: it ends with the server.
            self.end()
            raise
        if not said:
            self.end()
            return None
        return int(said)


# With the thread that made each one, since Linux ends a server with that thread.
_servers: list[tuple[int, _Server]] = []


@atexit.register
def _end_all() -> None:
    while _servers:
        _servers.pop()[1].end()


@contextlib.contextmanager
def forked_child(
    module: str,
    request: Path,
    *,
    environment: Mapping[str, str],
    reads_errors: bool,
    preloaded: Sequence[str],
    containment: Containment | None = None,
    imports: Sequence[str] = (),
) -> Iterator["ForkedChild | subprocess.Popen[bytes]"]:
    """As `tightfit.capture.processes.children.child`, but faster: the child is forked from a server that has imported the `preloaded` modules, and
    called the functions that are named behind a colon there, and run the import statements. `imports` are more of these, which the server imports when they are first asked for.

    With `containment` it is closed in, by the kernel where that is possible.
    """
    server = _server(environment, preloaded, is_kept=containment is not None) if _IS_SUPPORTED else None
    pipe, write = os.pipe() if reads_errors else (None, 2)
    pid = None
    try:
        if server is not None:
            pid = server.fork(module, [str(request)], environment, write, containment, imports)
        if server is not None and pid is not None:
            if write != 2:
                os.close(write)
                write = 2
            with _forked(ForkedChild(server, pid, pipe)) as forked:
                yield forked
    finally:
        for end in (pipe, write if write != 2 else None):
            if end is not None:
                os.close(end)
    if pid is None:
        with child(module, request, environment=environment, reads_errors=reads_errors) as process:
            yield process


def begin(environment: Mapping[str, str], preloaded: Sequence[str], *, is_kept: bool) -> None:
    """Begins the server that `forked_child` will ask with the same environment, modules and containment (`is_kept`), and does not wait for it."""
    if _IS_SUPPORTED:
        _server(environment, preloaded, is_kept=is_kept)


@contextlib.contextmanager
def _forked(forked: ForkedChild) -> Iterator[ForkedChild]:
    try:
        yield forked
    finally:
        if forked.poll() is None:
            forked.kill()
            forked.wait()


def _server(environment: Mapping[str, str], preloaded: Sequence[str], *, is_kept: bool) -> _Server:
    # Linux sends the parent's death signal when the thread that started the child ends, not the process
    # (prctl(2), PR_SET_PDEATHSIG): a server belongs to the thread that made it.
    thread = threading.get_native_id()
    idle = []
    for owner, known in _servers[:]:
        if known.asked_by != os.getpid() or known.process.poll() is not None:
            _end(owner, known)
        elif owner == thread and known.serves(environment, preloaded, is_kept=is_kept):
            # The last in the list is the last that was used.
            _forget(owner, known)
            _servers.append((owner, known))
            return known
        elif owner == thread and known.preloaded == preloaded and known.is_kept == is_kept and not known.is_busy:
            idle.append(known)
    # The last one is kept, for who changes a variable for one trace and then changes it back.
    for known in idle[:-1]:
        _end(thread, known)
    server = _Server(environment, preloaded, is_kept=is_kept)
    _servers.append((thread, server))
    return server


def _end(owner: int, server: _Server) -> None:
    _forget(owner, server)
    server.end()


def _forget(owner: int, server: _Server) -> None:
    # Another thread may have been faster.
    with contextlib.suppress(ValueError):
        _servers.remove((owner, server))


def serve(
    connection: socket.socket, preloaded: Sequence[str], kept: Kept | None = None, idle_seconds: int = IDLE_SECONDS
) -> None:
    """Imports the preloaded modules, and forks for each request, one child at a time, until none has come for `idle_seconds`."""
    imported = set[str]()
    _import(preloaded, imported)
    gc.callbacks.append(_take_back_before_all_is_collected)
    folder = os.getcwd()
    while select.select([connection], [], [], idle_seconds)[0]:
        said, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 2)
        if not said:
            return
        if not said.startswith(b"{"):
            # A signal to a child that has ended meanwhile.
            continue
        order = json.loads(said)
        _import(order["imports"], imported)
        with kept.child_in(order["containment"]["shared"]) if kept is not None else contextlib.nullcontext():
            with warnings.catch_warnings():
                # The threads of linear algebra libraries, which know what a fork is.
                warnings.simplefilter("ignore", DeprecationWarning)
                server, pid = os.getpid(), os.fork()
            # By both, as either may come to it first: the child may begin others, and the client may kill the group once it has the pid.
            os.setpgid(pid, pid or os.getpid())
            if pid == 0:
                connection.close()
                if kept is not None:
                    kept.leave()
                _run(order, descriptors, server, folder)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
            status = _status_of(pid, connection if kept is not None else None)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _import(names: Sequence[str], imported: set[str]) -> None:
    for name in names:
        if name in imported:
            continue
        imported.add(name)
        if name.startswith(_STATEMENTS):
            try:
                exec(name, {})
            except BaseException:  # noqa: BLE001 - the child is to begin without what was half imported
                os._exit(1)
            gc.freeze()
            continue
        module, _, function = name.partition(":")
        # A missing or broken module is reported by the child.
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
        # What was imported stays: a child that looks at all objects there are neither goes through it, nor copies its pages by that.
        gc.freeze()


def _take_back_before_all_is_collected(phase: str, collection: Mapping[str, int]) -> None:
    """The garbage collector's threshold for a full collection counts all objects: tensors in reference cycles die when they would without a server."""
    if phase == "start" and collection["generation"] == 2:
        gc.unfreeze()


def _status_of(pid: int, connection: socket.socket | None) -> int:
    """Waits for the child, and sends it the signals that are asked for meanwhile; SIGKILL if nobody is there to ask any more."""
    if connection is not None:
        child = os.pidfd_open(pid)
        number = 0
        while number != signal.SIGKILL and connection in select.select([connection, child], [], [])[0]:
            number = int(connection.recv(_MAX_BYTES) or signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, number)
        os.close(child)
    return os.waitpid(pid, 0)[1]


def _run(order: dict[str, object], descriptors: Sequence[int], server: int, folder: str) -> None:
    """Runs one request in the forked process and ends it."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        environment = order["environment"]
        assert isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        containment = order["containment"]
        if isinstance(containment, dict) and os.getppid() == 0:
            # The server is in another namespace of process ids, so this process is in its own.
            server, code = 0, NOT_CLOSED_IN
            namespaces.enter_as(containment, str(order["folder"]))
            code = 1
        os.chdir(str(order["folder"]))
        # Caches of the server: its temporary folder, and listings of folders that have got new files since.
        tempfile.tempdir = None
        importlib.invalidate_caches()
        # As `python -m` has it.
        if sys.path and sys.path[0] == folder:
            sys.path[0] = os.getcwd()
        name, arguments = str(order["module"]), order["arguments"]
        assert isinstance(arguments, list)
        module = importlib.import_module(name)
        sys.argv = [module.__file__ or name, *arguments, str(server)]
        module.main(*sys.argv[1:])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter ends with what nobody caught
        traceback.print_exc()
    finally:
        os._exit(code)


def main(descriptor: str, parent: str, idle_seconds: str, preloaded: str, *words: str) -> None:
    """The server process, or its keeper."""
    die_with_parent(int(parent))
    connection = socket.socket(fileno=int(descriptor))
    serve(connection, json.loads(preloaded), keep() if "kept" in words else None, int(idle_seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a guarded turn does to the world outside of its memory is noted, whatever does it; what libraries do for themselves is not."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from tightfit.effects import outside_calls
from tightfit.effects.state import again, differences, snapshot_of_arguments
from tightfit.guarding.loops.outside_effects import OutsideEffects

FORKING = multiprocessing.get_context("fork")


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutsideEffects]:
    monkeypatch.chdir(tmp_path)
    found = OutsideEffects()
    found.begin()
    yield found
    found.end()


def forked() -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


def run(target: Callable[[], object]) -> None:
    process = FORKING.Process(target=target)
    process.start()
    process.join()


def with_descriptor(call: Callable[[int], object]) -> Callable[[], object]:
    """A call with a descriptor that is open since before the turn."""

    def made() -> Callable[[], object]:
        descriptor = os.open("open.bin", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 16)
        return lambda: call(descriptor)

    return made


def with_queue(call: Callable[[Any], object], kind: Callable[[], Any]) -> Callable[[], object]:
    def made() -> Callable[[], object]:
        items = kind()
        items.put(0)
        return lambda: call(items)

    return made


def with_pair(call: Callable[[Any, Any], object], kind: Callable[[], Any]) -> Callable[[], object]:
    def made() -> Callable[[], object]:
        one, other = kind()
        other.send(b"x")

        def called() -> None:
            call(one, other)
            one.close()
            other.close()

        return called

    return made


def plainly(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: call


EFFECTS: dict[str, Any] = {
    "fork": plainly(forked),
    "posix_spawn": plainly(lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)),
    "spawnv": plainly(lambda: os.waitpid(multiprocessing.util.spawnv_passfds(b"/bin/true", [b"true"], []), 0)),
    "a process": plainly(lambda: run(int)),
    "chdir": plainly(lambda: os.chdir(".")),
    "chmod": plainly(lambda: os.chmod(".", 0o700)),
    "utime": plainly(lambda: os.utime(".")),
    "umask": plainly(lambda: os.umask(os.umask(0o22))),
    "kill": plainly(lambda: os.kill(os.getpid(), signal.SIGCHLD)),
    "raise_signal": plainly(lambda: signal.raise_signal(signal.SIGCHLD)),
    "write": with_descriptor(lambda descriptor: os.write(descriptor, b"x")),
    "pwrite": with_descriptor(lambda descriptor: os.pwrite(descriptor, b"x", 0)),
    "writev": with_descriptor(lambda descriptor: os.writev(descriptor, [b"x"])),
    "pwritev": with_descriptor(lambda descriptor: os.pwritev(descriptor, [b"x"], 0)),
    "read": with_descriptor(lambda descriptor: os.read(descriptor, 1)),
    "readv": with_descriptor(lambda descriptor: os.readv(descriptor, [bytearray(1)])),
    "lseek": with_descriptor(lambda descriptor: os.lseek(descriptor, 1, os.SEEK_CUR)),
    "sendfile": with_descriptor(lambda descriptor: os.sendfile(descriptor, descriptor, 0, 1)),
    "copy_file_range": with_descriptor(lambda descriptor: os.copy_file_range(descriptor, descriptor, 1, 0, 8)),
    "put of threads": with_queue(lambda items: items.put(1), queue.Queue),
    "get of threads": with_queue(lambda items: items.get(), queue.Queue),
    "put of processes": with_queue(lambda items: items.put(1), FORKING.Queue),
    "get of processes": with_queue(lambda items: items.get(), FORKING.Queue),
    "put of simple queues": with_queue(lambda items: items.put(1), FORKING.SimpleQueue),
    "send of pipes": with_pair(lambda one, other: one.send(1), FORKING.Pipe),
    "recv of pipes": with_pair(lambda one, other: one.recv_bytes(), FORKING.Pipe),
    "recv of sockets": with_pair(lambda one, other: one.recv(1), socket.socketpair),
    "sendmsg": with_pair(lambda one, other: one.sendmsg([b"x"]), socket.socketpair),
    "a file": plainly(lambda: Path("file.txt").write_text("x")),
    "the end": plainly(lambda: atexit.unregister(atexit.register(int))),
    "a thread": plainly(lambda: threading.Thread(target=int).start()),
}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("kind", EFFECTS)
def test_what_reaches_outside_is_noted(kind: str, effects: OutsideEffects) -> None:
    call = EFFECTS[kind]()
    effects.clear()
    assert not effects.first
    with contextlib.suppress(OSError):
        call()
    assert effects.first


# `os.environ` is put back, a name that is there already is an error the second time; of the others Python's event is another one's.
UNNOTED = {"putenv", "unsetenv", "mkfifo"}
SAME_EVENT = {"open", "fchdir", "ftruncate", "unlink", "replace"}


def test_each_function_of_the_system_that_techniques_refuse_is_noted(effects: OutsideEffects) -> None:
    from tightfit.guarding.loops.outside_effects import _EVENTS
    from tightfit.torch_hooks.library_calls import _GIVING, _MOVING

    heard = {event.partition(".")[2] for event in _EVENTS if event.startswith("os.")}
    replaced = {path.partition(":")[2] for path in (*_GIVING, *_MOVING) if path.startswith("os:")}
    names = set(outside_calls._BY_MODULE["posix"].split())
    assert names - heard - replaced == UNNOTED | SAME_EVENT


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_files_that_nobody_holds_are_written_and_functions_have_names(effects: OutsideEffects) -> None:
    assert open("file.txt", "w").write("text") == 4  # noqa: SIM115 - that is what is tested
    assert Path("file.txt").read_text() == "text"
    for function in (os.write, os.read, open):
        assert pickle.loads(pickle.dumps(function)) is function


class Numbers(Dataset[int]):
    def __init__(self, path: str = "") -> None:
        self.path = path

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        if self.path:
            Path(self.path).write_text("seen")
        return number


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_a_loader_are_looked_at_themselves(effects: OutsideEffects) -> None:
    for path in ("", "seen.txt", ""):
        effects.clear()
        batches = DataLoader(Numbers(path), num_workers=1, multiprocessing_context="fork")
        assert [int(batch) for batch in batches] == [0, 1, 2, 3]
        del batches
        assert bool(effects.first) == bool(path), effects.first


def test_what_processes_share_is_looked_at() -> None:
    number, array, event, count = FORKING.Value("i"), FORKING.Array("i", 3), FORKING.Event(), FORKING.Semaphore(0)
    for value, change in (
        (number, lambda: setattr(number, "value", 1)),
        (array, lambda: array.__setitem__(0, 1)),
        (event, event.set),
        (count, count.release),
    ):
        before = snapshot_of_arguments({"shared": value})
        assert not differences(before, again(before))
        change()
        assert any(each.is_in_place for each in differences(before, again(before)))


@pytest.mark.parametrize(
    ("module", "is_noted"),
    [
        ("torch._inductor.codecache", False),
        ("tqdm._monitor", False),
        ("torch.utils.data.dataloader", False),
        ("torch.utils.tensorboard.writer", True),
        ("program", True),
    ],
)
def test_what_libraries_do_for_themselves_is_not_noted(module: str, is_noted: bool, effects: OutsideEffects) -> None:
    library: dict[str, Any] = {"__name__": module}
    exec("import threading\ndef start():\n    threading.Thread(target=int).start()", library)
    effects.clear()
    library["start"]()
    assert bool(effects.first) == is_noted

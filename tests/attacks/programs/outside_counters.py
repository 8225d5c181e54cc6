"""Counters outside of what Python refers to: files, databases, shared memory, queues, pipes. Blocks change what they compute when a count is reached."""

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import multiprocessing.shared_memory
import multiprocessing.sharedctypes
import os
import pickle
import queue
import shelve
import socket
import sqlite3
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.attacks.models import Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

Count = Callable[[], int]
Kept = contextlib.ExitStack


def _folder(kept: Kept) -> Path:
    return Path(kept.enter_context(tempfile.TemporaryDirectory()))


def text_file(kept: Kept) -> Count:
    path = f"{_folder(kept)}/calls.txt"
    with open(path, "w") as file:
        file.write("0")

    def count() -> int:
        with open(path) as file:
            calls = int(file.read()) + 1
        with open(path, "w") as file:
            file.write(str(calls))
        return calls

    return count


def text_of_path(kept: Kept) -> Count:
    path = _folder(kept) / "calls.json"
    path.write_text("[0]")

    def count() -> int:
        calls = json.loads(path.read_text())[0] + 1
        path.write_text(json.dumps([calls]))
        return calls

    return count


def growing_file(kept: Kept) -> Count:
    path = _folder(kept) / "log"

    def count() -> int:
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    return count


def open_file(kept: Kept) -> Count:
    file = kept.enter_context(open(_folder(kept) / "log", "a+b", buffering=0))  # noqa: SIM115 - the stack closes it

    def count() -> int:
        file.write(b".")
        return os.fstat(file.fileno()).st_size

    return count


def file_descriptor(kept: Kept) -> Count:
    number = os.open(_folder(kept) / "calls", os.O_RDWR | os.O_CREAT)
    kept.callback(os.close, number)
    os.pwrite(number, struct.pack("q", 0), 0)

    def count() -> int:
        calls = struct.unpack("q", os.pread(number, 8, 0))[0] + 1
        os.pwrite(number, struct.pack("q", calls), 0)
        return calls

    return count


def files_in_folder(kept: Kept) -> Count:
    folder = _folder(kept)

    def count() -> int:
        (folder / str(len(os.listdir(folder)))).touch()
        return len(os.listdir(folder))

    return count


def folders_in_folder(kept: Kept) -> Count:
    folder = _folder(kept)

    def count() -> int:
        os.mkdir(folder / str(len(os.listdir(folder))))
        return len(os.listdir(folder))

    return count


def pickled_file(kept: Kept) -> Count:
    path = _folder(kept) / "state.pkl"
    path.write_bytes(pickle.dumps({"calls": 0}))

    def count() -> int:
        with open(path, "rb") as file:
            state = pickle.load(file)
        state["calls"] += 1
        with open(path, "wb") as file:
            pickle.dump(state, file)
        return state["calls"]

    return count


def file_of_torch(kept: Kept) -> Count:
    path = _folder(kept) / "calls.pt"
    torch.save(torch.zeros(1, dtype=torch.long), path)

    def count() -> int:
        calls = torch.load(path) + 1
        torch.save(calls, path)
        return int(calls)

    return count


def array_in_file(kept: Kept) -> Count:
    path = _folder(kept) / "calls.npy"
    np.save(path, np.zeros(1, dtype=int))

    def count() -> int:
        calls = np.load(path) + 1
        np.save(path, calls)
        return int(calls[0])

    return count


def mapped_array(kept: Kept) -> Count:
    calls = np.memmap(_folder(kept) / "calls", dtype=np.int64, mode="w+", shape=(1,))

    def count() -> int:
        calls[0] += 1
        return int(calls[0])

    return count


def mapped_memory(kept: Kept) -> Count:
    memory = kept.enter_context(mmap.mmap(-1, 4096))

    def count() -> int:
        calls = struct.unpack_from("q", memory)[0] + 1
        struct.pack_into("q", memory, 0, calls)
        return calls

    return count


def shared_memory(kept: Kept) -> Count:
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    kept.callback(memory.unlink)
    kept.callback(memory.close)
    memory.buf[:8] = struct.pack("q", 0)

    def count() -> int:
        calls = struct.unpack("q", memory.buf[:8])[0] + 1
        memory.buf[:8] = struct.pack("q", calls)
        return calls

    return count


def shared_memory_by_name(kept: Kept) -> Count:
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
    kept.callback(memory.unlink)
    kept.callback(memory.close)
    memory.buf[:8] = struct.pack("q", 0)
    name = memory.name

    def count() -> int:
        attached = multiprocessing.shared_memory.SharedMemory(name)
        calls = struct.unpack("q", attached.buf[:8])[0] + 1
        attached.buf[:8] = struct.pack("q", calls)
        attached.close()
        return calls

    return count


def shareable_list(kept: Kept) -> Count:
    memory = multiprocessing.shared_memory.ShareableList([0])
    kept.callback(memory.shm.unlink)
    kept.callback(memory.shm.close)

    def count() -> int:
        memory[0] += 1
        return memory[0]

    return count


def shared_value(kept: Kept) -> Count:
    value = multiprocessing.Value("q", 0)

    def count() -> int:
        with value.get_lock():
            value.value += 1
            return value.value

    return count


def raw_value(kept: Kept) -> Count:
    value = multiprocessing.sharedctypes.RawArray("q", 2)

    def count() -> int:
        value[1] += 1
        return value[1]

    return count


def view_of_bytes(kept: Kept) -> Count:
    view = memoryview(bytearray(8)).cast("q")

    def count() -> int:
        view[0] += 1
        return view[0]

    return count


def memory_by_address(kept: Kept) -> Count:
    cell = ctypes.c_long(0)
    kept.callback(lambda: cell)
    address = ctypes.addressof(cell)

    def count() -> int:
        there = ctypes.c_long.from_address(address)
        there.value += 1
        return there.value

    return count


def simple_queue(kept: Kept) -> Count:
    tokens = queue.SimpleQueue()

    def count() -> int:
        tokens.put(None)
        return tokens.qsize()

    return count


def simple_queue_of_one(kept: Kept) -> Count:
    calls = queue.SimpleQueue()
    calls.put(0)

    def count() -> int:
        calls.put(calls.get() + 1)
        number = calls.get()
        calls.put(number)
        return number

    return count


def queue_of_one(kept: Kept) -> Count:
    calls: queue.Queue[int] = queue.Queue()
    calls.put(0)

    def count() -> int:
        number = calls.get() + 1
        calls.put(number)
        return number

    return count


def queue_of_processes(kept: Kept) -> Count:
    calls = multiprocessing.SimpleQueue()
    kept.callback(calls.close)
    calls.put(0)

    def count() -> int:
        number = calls.get() + 1
        calls.put(number)
        return number

    return count


def pipe(kept: Kept) -> Count:
    end, begin = multiprocessing.Pipe(duplex=False)
    kept.callback(end.close)
    kept.callback(begin.close)
    begin.send(0)

    def count() -> int:
        number = end.recv() + 1
        begin.send(number)
        return number

    return count


def pipe_of_system(kept: Kept) -> Count:
    end, begin = os.pipe()
    kept.callback(os.close, end)
    kept.callback(os.close, begin)
    os.write(begin, struct.pack("q", 0))

    def count() -> int:
        number = struct.unpack("q", os.read(end, 8))[0] + 1
        os.write(begin, struct.pack("q", number))
        return number

    return count


def sockets(kept: Kept) -> Count:
    one, other = map(kept.enter_context, socket.socketpair())
    one.sendall(struct.pack("q", 0))

    def count() -> int:
        number = struct.unpack("q", other.recv(8))[0] + 1
        one.sendall(struct.pack("q", number))
        return number

    return count


def database(kept: Kept) -> Count:
    connection = sqlite3.connect(":memory:")
    kept.callback(connection.close)
    connection.execute("create table calls (number integer)")
    connection.execute("insert into calls values (0)")

    def count() -> int:
        connection.execute("update calls set number = number + 1")
        return connection.execute("select number from calls").fetchone()[0]

    return count


def database_by_name(kept: Kept) -> Count:
    path = _folder(kept) / "calls.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table calls (number integer)")

    def count() -> int:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("insert into calls values (1)")
            return connection.execute("select count(*) from calls").fetchone()[0]

    return count


def shelf(kept: Kept) -> Count:
    calls: Any = kept.enter_context(shelve.open(str(_folder(kept) / "calls")))  # noqa: SIM115 - the stack closes it
    calls["number"] = 0

    def count() -> int:
        calls["number"] += 1
        return calls["number"]

    return count


def semaphore_of_processes(kept: Kept) -> Count:
    semaphore = multiprocessing.Semaphore(0)

    def count() -> int:
        semaphore.release()
        return semaphore.get_value()

    return count


def environment(kept: Kept) -> Count:
    os.environ["CALLS_OF_ATTACK"] = "0"
    kept.callback(os.environ.pop, "CALLS_OF_ATTACK")

    def count() -> int:
        os.environ["CALLS_OF_ATTACK"] = str(int(os.environ["CALLS_OF_ATTACK"]) + 1)
        return int(os.environ["CALLS_OF_ATTACK"])

    return count


def environment_of_system(kept: Kept) -> Count:
    os.putenv("CALLS_OF_ATTACK", "0")
    kept.callback(os.unsetenv, "CALLS_OF_ATTACK")
    read = ctypes.CDLL(None).getenv
    read.restype = ctypes.c_char_p

    def count() -> int:
        calls = int(read(b"CALLS_OF_ATTACK")) + 1
        os.putenv("CALLS_OF_ATTACK", str(calls))
        return calls

    return count


def working_folder(kept: Kept) -> Count:
    here, folder = os.getcwd(), _folder(kept)
    kept.callback(os.chdir, here)
    for number in range(60):
        (folder / str(number)).mkdir()
    os.chdir(folder / "0")

    def count() -> int:
        number = int(Path.cwd().name) + 1
        os.chdir(folder / str(number))
        return number

    return count


COUNTERS = (
    text_file,
    text_of_path,
    growing_file,
    open_file,
    file_descriptor,
    files_in_folder,
    folders_in_folder,
    pickled_file,
    file_of_torch,
    array_in_file,
    mapped_array,
    mapped_memory,
    shared_memory,
    shared_memory_by_name,
    shareable_list,
    shared_value,
    raw_value,
    view_of_bytes,
    memory_by_address,
    simple_queue,
    simple_queue_of_one,
    queue_of_one,
    queue_of_processes,
    pipe,
    pipe_of_system,
    sockets,
    database,
    database_by_name,
    shelf,
    semaphore_of_processes,
    environment,
    environment_of_system,
    working_folder,
)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


class Switching(Block):
    """From call `at` on it is twice as wide; where it is only felt, its gradient is twice as large."""

    def __init__(self, count: Count, at: int, *, is_felt: bool) -> None:
        super().__init__()
        self.count, self.at, self.is_felt = count, at, is_felt

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_late = self.count() >= self.at
        if self.is_felt:
            return x + _Scaled.apply(self.inner(x), 2.0 if is_late else 1.0)
        return x + (2 * self.inner(x) if is_late else self.inner(x))


# What is kept here of the techniques that run code more than once: the others run it as often as a plain step.
_ONLY = ("checkpointing", "micro-batches")
_FELT = (text_file, simple_queue, shared_value, database)


def _register(make: Callable[[Kept], Count], at: int, *, is_felt: bool) -> None:
    def program(t: Trial) -> None:
        with contextlib.ExitStack() as kept:
            count = make(kept)
            train(t, Net([Switching(count, at, is_felt=is_felt) for _ in range(2)]), num_steps=7)

    program.__name__ = f"{make.__name__}_{'felt' if is_felt else 'counts'}_{at}"
    what = make.__name__.replace("_", " ")
    felt = ", which only gradients feel" if is_felt else ""
    attack(
        "recomputation",
        f"blocks count their calls in a counter outside ({what}), and change at call {at}{felt}",
        only=_ONLY,
    )(program)


for _make in COUNTERS:
    _register(_make, 13, is_felt=False)
for _make in _FELT:
    _register(_make, 10, is_felt=True)

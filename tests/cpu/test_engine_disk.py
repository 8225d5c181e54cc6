"""Saved tensors on disk: what goes wrong there is an error before a wrong value is used, loses nothing that it need not, and leaves nothing behind."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.test_engine_saved_tensors import Blocks, Runtime, assert_same, batch, gradients, offload_to_disk, once

from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk import disk_file, disk_threads
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_sizes import PAGE_BYTES, buffer_bytes_for, num_buffers_of, piece_bytes_of
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.slab_notes import notes_on
from tightfit.errors import ApplyError

HOST = torch.device("cpu")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    gc.collect()
    close_gone()
    files, threads = open_files(), set(threading.enumerate())
    yield
    gc.collect()
    close_gone()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10.0)
    assert open_files() == files
    assert set(threading.enumerate()) <= threads


def pages(fill: int, count: int = 1) -> memoryview:
    return memoryview(bytes([fill]) * PAGE_BYTES * count)


def test_a_file_has_its_space_and_no_name(tmp_path: Path) -> None:
    file = DiskFile(10 * PAGE_BYTES - 5, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    found = os.fstat(file.descriptor)
    assert file.num_bytes == found.st_size == 10 * PAGE_BYTES
    assert found.st_blocks * 512 >= 10 * PAGE_BYTES
    assert found.st_nlink == 0
    file.extend(PAGE_BYTES)
    assert os.fstat(file.descriptor).st_size == file.num_bytes == 11 * PAGE_BYTES


def test_a_folder_in_memory_or_without_room_or_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ApplyError, match=r"no file can be written in .*gone"):
        DiskFile(PAGE_BYTES, str(tmp_path / "gone"))
    free = os.statvfs(tmp_path)
    with pytest.raises(ApplyError, match=r"the disk of .* has no .* left .*--disk-folder"):
        DiskFile(4 * free.f_frsize * free.f_blocks, str(tmp_path))
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"21 1 8:1 / / rw - ext4 /dev/sda rw\n22 21 0:5 / {str(tmp_path.parent).replace(' ', chr(92) + '040')} rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(disk_file, "_MOUNTS", str(mounts))
    with pytest.raises(ApplyError, match=r"is in memory \(tmpfs\).*TMPDIR"):
        DiskFile(PAGE_BYTES, str(tmp_path))
    # What proves a plan may run elsewhere than the plan: what is missing there refuses nothing.
    monkeypatch.setattr(disk_file, "is_proof", lambda: True)
    DiskFile(PAGE_BYTES, str(tmp_path))
    with pytest.raises(OSError, match=r"the disk of .* has no"):
        DiskFile(4 * free.f_frsize * free.f_blocks, str(tmp_path))


def test_a_short_write_or_read_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    calls = []

    def some(move: Any, descriptor: int, buffers: list[memoryview], at: int) -> int:
        calls.append(at)
        # All but the last call end within a page.
        length = min(len(buffers[0]), PAGE_BYTES)
        return min(len(buffers[0]), move(descriptor, [buffers[0][:length]], at) + 100)

    file = DiskFile(4 * PAGE_BYTES, str(tmp_path))
    monkeypatch.setattr(os, "pwritev", lambda *each: some(write, *each))
    monkeypatch.setattr(os, "preadv", lambda *each: some(read, *each))
    slab = DiskSlab(0, buffer_bytes_for(4 * PAGE_BYTES), HOST, str(tmp_path))
    buffer = slab.host_part.bytes[-slab.host_part.bytes.data_ptr() % PAGE_BYTES :][: 4 * PAGE_BYTES]
    buffer.copy_(torch.arange(4 * PAGE_BYTES) // PAGE_BYTES)
    expected = buffer.clone()
    file.write(memoryview(buffer.numpy()), 0)
    buffer.zero_()
    file.read(memoryview(buffer.numpy()), 0)
    assert torch.equal(buffer, expected)
    assert calls == [0, PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES] * 2


def test_space_is_allocated_where_the_file_system_leaves_it_to_the_c_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def emulated(descriptor: int, begin: int, num_bytes: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        allocate(descriptor, begin, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    file = DiskFile(3 * PAGE_BYTES, str(tmp_path))
    assert os.fstat(file.descriptor).st_size == file.num_bytes == 3 * PAGE_BYTES


def test_without_direct_access_it_goes_through_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "_takes_direct", lambda _: False)
    saved = assert_same(once, offload_to_disk())
    assert saved.moves.disk is not None and saved.moves.disk.goes_through_the_cache
    assert ["page cache" in note for note in notes_on(HOST, [saved.moves.disk], "activations")] == [True]
    assert saved._statistics["offloaded storages"] > 0


@pytest.mark.parametrize("disk_bytes", [1, PAGE_BYTES, 100_000, 1 << 26, 1 << 40])
def test_buffers_are_whole_pieces_of_whole_pages(disk_bytes: int) -> None:
    given = buffer_bytes_for(disk_bytes)
    assert piece_bytes_of(given) % PAGE_BYTES == 0
    assert num_buffers_of(given) == 4
    # Several choices share their buffers: the pieces grow no larger, there are more of them.
    assert num_buffers_of(3 * given) * piece_bytes_of(3 * given) >= 3 * (given - PAGE_BYTES)
    assert PAGE_BYTES + 4 * piece_bytes_of(given) == given <= (33 << 20)


def test_where_the_driver_refuses_to_lock_buffers_they_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    slab = DiskSlab(PAGE_BYTES, 5 * PAGE_BYTES, torch.device("cuda"))
    assert not slab.is_registered
    assert [len(buffer.bytes) for buffer in slab.buffers()] == [PAGE_BYTES] * 4
    assert all(buffer.bytes.data_ptr() % PAGE_BYTES == 0 for buffer in slab.buffers())


def test_the_file_has_what_is_planned_grows_for_more_and_all_of_it_comes_back() -> None:
    saved = offload_to_disk(disk_bytes=2 * PAGE_BYTES)
    disk = saved.moves.disk
    assert disk is not None and disk.file.num_bytes == 2 * PAGE_BYTES
    assert_same(once, saved)
    grown = disk.file.num_bytes
    assert disk.free_bytes == grown > 2 * PAGE_BYTES
    for _ in range(3):
        assert_same(once, saved)
    assert disk.free_bytes == disk.file.num_bytes == grown


def test_a_disk_that_is_full_in_the_middle_is_an_error_and_training_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saved = offload_to_disk(disk_bytes=16 * PAGE_BYTES)
    model = Blocks(saved)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ApplyError, match=r"the disk of .* has no"):
            once(model)
    assert_same(once, saved)
    assert saved.moves.disk is not None and saved.moves.disk.free_bytes == saved.moves.disk.file.num_bytes


def fails_once(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, error: type[BaseException], *why: object
) -> None:
    working, failed = getattr(module, name), []

    def failing(*arguments: Any) -> Any:
        if not failed:
            failed.append(1)
            raise error(*why)
        return working(*arguments)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (os, "pwritev", (OSError, errno.EIO, "Input/output error")),
        (os, "pwritev", (OSError, errno.ENOSPC, "No space left on device")),
        # Whatever ends a thread.
        (disk_threads, "checksum", (SystemExit,)),
        (os, "pwritev", (OSError,)),
        (threading.Thread, "start", (RuntimeError, "can't start new thread")),
    ],
)
def test_what_cannot_be_written_is_in_host_memory_and_nothing_is_lost(
    module: Any, name: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    saved = offload_to_disk(told=told)
    fails_once(monkeypatch, module, name, *error)
    assert_same(once, saved)
    gc.collect()
    (message,) = told
    assert message.startswith("could not be written to the disk of ") and "not lost" in message and "()" not in message
    assert saved.moves.disk is not None and saved.moves.disk.free_bytes == saved.moves.disk.file.num_bytes


def test_a_write_that_moves_nothing_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    saved = offload_to_disk(told=told)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    assert_same(once, saved)
    assert "only 0 bytes of a page were written" in told[0]


def test_a_byte_that_has_changed_on_the_disk_is_an_error_before_it_is_used_and_the_next_step_is_right() -> None:
    told: list[str] = []
    saved = offload_to_disk(told=told)
    model = Blocks(saved)
    loss = model(batch()).square().mean()
    assert saved.moves.disk is not None and isinstance(saved.moves.disk.file, DiskFile)
    descriptor = os.open(f"/proc/self/fd/{saved.moves.disk.file.descriptor}", os.O_RDWR)
    byte = os.pread(descriptor, 1, 5000)[0]
    os.pwrite(descriptor, bytes([byte ^ 4]), 5000)
    os.close(descriptor)
    with pytest.raises(ApplyError, match=r"could not be read back from the disk of .*checksum"):
        loss.backward()
    assert told
    del loss
    expected = gradients(Blocks(None), once)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, once), strict=True))
    assert saved.moves.disk.free_bytes == saved.moves.disk.file.num_bytes


def test_an_interrupt_while_a_copy_is_waited_for_leaves_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = offload_to_disk()
    model = Blocks(saved)
    fails_once(monkeypatch, futures, "wait", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        once(model)
    expected = gradients(Blocks(None), once)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, once), strict=True))
    # And in the backward pass.
    loss = model(batch()).square().mean()
    fails_once(monkeypatch, futures, "wait", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    del loss
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, once), strict=True))
    gc.collect()
    assert saved.moves.disk is not None and saved.moves.disk.free_bytes == saved.moves.disk.file.num_bytes


@contextlib.contextmanager
def reaped(child: int) -> Iterator[None]:
    try:
        yield
    finally:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_fork_writes_to_a_file_of_its_own_and_reads_what_there_was_before() -> None:
    saved = offload_to_disk()
    model = Blocks(saved)
    expected = gradients(Blocks(None), once)
    loss = model(batch()).square().mean()
    child = os.fork()
    if not child:
        # Whatever goes wrong here must not return into pytest.
        code = 1
        with contextlib.suppress(BaseException):
            loss.backward()
            found = [p.grad.clone() for p in model.parameters()]
            again = gradients(model, once)
            code = int(
                not all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again, strict=True))
            )
        os._exit(code)
    with reaped(child):
        # At the same time: the child reads what this process frees only after it.
        pass
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model, once), strict=True))


KILLED = """
import os, signal, sys
from tests.cpu.test_engine_saved_tensors import Blocks, offload_to_disk, once

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

saved = offload_to_disk(disk_bytes=1 << 24)
once(Blocks(saved))
os.pwritev = killed
once(Blocks(saved))
"""


def test_a_process_that_is_killed_in_the_middle_of_a_write_leaves_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []

"""A file without a name, of a fixed size and allocated at once, that is written and read past the page cache where its file system allows it.

The name is removed as soon as the file is open, so the system frees its space however the process ends. All of its space is allocated before
anything is written: a disk that is too full is an error then, and not in the middle of a step.
"""

import errno
import mmap
import os
import sys
import tempfile

from tightfit.capture.processes.process_role import is_proof
from tightfit.engine.descriptors import Descriptor, close_gone
from tightfit.engine.disk.disk_sizes import PAGE_BYTES, in_pages
from tightfit.engine.disk.error_text import error_text
from tightfit.errors import ApplyError
from tightfit.units import format_bytes

_MOUNTS = "/proc/self/mountinfo"
# File systems that keep their files in memory (tmpfs(5)).
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFile:
    """`num_bytes`, rounded up to whole pages, in `folder`, by default the folder for temporary files (TMPDIR).

    Raises:
        ApplyError: the folder is not on a disk, cannot be written to, or has too little space.
    """

    def __init__(self, num_bytes: int, folder: str | None = None) -> None:
        close_gone()
        self.folder = os.path.realpath(folder or tempfile.gettempdir())
        self.num_bytes = 0
        _check_is_on_disk(self.folder)
        try:
            descriptor, self.is_direct = _opened(self.folder)
        except OSError as error:
            raise _refusal(
                f"no file can be written in {self.folder} ({error_text(error)}); choose another folder with --disk-folder"
            ) from error
        self._open = Descriptor(descriptor)
        self.leaves_the_cache = False
        """Whether what was moved is given back by the page cache."""
        self.extend(in_pages(num_bytes))
        try:
            if self.is_direct and self.num_bytes and not _takes_direct(self.descriptor):
                _through_the_cache(self.descriptor)
                self.is_direct = False
        except OSError as error:
            raise _refusal(
                f"the disk of {self.folder} fails ({error_text(error)}); choose another folder with --disk-folder, or plan without --disk"
            ) from error

    @property
    def descriptor(self) -> int:
        """The file's number in this process."""
        return self._open.number

    def extend(self, num_bytes: int) -> None:
        """Allocates `num_bytes`, whole pages, at the end of the file.

        Raises:
            ApplyError: the disk is full; the file is as it was.
        """
        if not num_bytes:
            return
        try:
            free = os.fstatvfs(self.descriptor)
            # Asked first: a disk that is filled up and emptied again may fail others meanwhile.
            if num_bytes > free.f_bavail * free.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._allocate(num_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise _refusal(
                    f"no file of {format_bytes(num_bytes)} can be made in {self.folder} ({error_text(error)})"
                ) from error
            # What was allocated of it before the disk was full.
            os.ftruncate(self.descriptor, self.num_bytes)
            raise _refusal(
                f"the disk of {self.folder} has no {format_bytes(num_bytes)} left ({error_text(error)}); "
                "choose a folder on another disk with --disk-folder, or plan with a smaller --disk"
            ) from error
        self.num_bytes += num_bytes

    def _allocate(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, self.num_bytes, num_bytes)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
            # Where a file system cannot, the C library writes a byte to each block, which is no whole page.
            cached = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(cached, self.num_bytes, num_bytes)
            finally:
                os.close(cached)

    def write(self, content: memoryview, at: int) -> None:
        """Writes whole pages from `at` on.

        Raises:
            OSError: not all of it was written.
        """
        done = 0
        while done < len(content):
            done += self._moved(os.pwritev(self.descriptor, [content[done:]], at + done), "written")

    def read(self, into: memoryview, at: int) -> None:
        """Reads whole pages from `at` on.

        Raises:
            OSError: not all of it was read.
        """
        done = 0
        while done < len(into):
            done += self._moved(os.preadv(self.descriptor, [into[done:]], at + done), "read")
        if self.leaves_the_cache:
            self.leave_the_cache(at, len(into))

    def use_the_cache(self) -> None:
        """Moves everything through the page cache from now on: memory that is mapped sees what is written then, whatever the file system is (open(2), NOTES:
        "applications should avoid mixing mmap(2) of files with direct I/O to the same files")."""
        if self.is_direct:
            _through_the_cache(self.descriptor)
            self.is_direct = False
        self.leaves_the_cache = True

    def leave_the_cache(self, at: int, num_bytes: int) -> None:
        """Gives the page cache's memory of these bytes back, as far as they are on the disk and nobody reads them as memory."""
        os.posix_fadvise(self.descriptor, at, num_bytes, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Has all that was written on the disk, where that is not so when a write returns.

        Raises:
            OSError: it cannot be.
        """
        if not self.is_direct:
            os.fdatasync(self.descriptor)

    def mapped(self) -> mmap.mmap:
        """All of it as memory of the process's own: a page that is written to is not the file's any more, here and in forks.

        Raises:
            ApplyError: the system has no addresses for it.
        """
        try:
            return mmap.mmap(
                self.descriptor,
                self.num_bytes,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except OSError as error:
            raise _refusal(
                f"a file of {format_bytes(self.num_bytes)} cannot be mapped ({error_text(error)})"
            ) from error

    def _moved(self, num_bytes: int, what: str) -> int:
        # Past the page cache the next call begins at a page again, and moves the rest of this one once more.
        whole = num_bytes // PAGE_BYTES * PAGE_BYTES if self.is_direct else num_bytes
        if whole <= 0:
            raise OSError(errno.EIO, f"only {num_bytes} bytes of a page were {what}")
        return whole


_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
# Python 3.11 has no name for it (sys/mman.h of Linux): pages that nobody writes to take no memory, and none is set aside for them.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def _opened(folder: str) -> tuple[int, bool]:
    """A new file without a name, and whether it is open for O_DIRECT."""
    descriptor, path = tempfile.mkstemp(dir=folder, prefix="tightfit-")
    try:
        try:
            direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | _DIRECT) if _DIRECT else -1
        except OSError as error:
            # open(2): "EINVAL: the filesystem does not support the O_DIRECT flag".
            if error.errno != errno.EINVAL:
                raise
            direct = -1
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        os.unlink(path)
    if direct < 0:
        return descriptor, False
    os.close(descriptor)
    return direct, True


def _takes_direct(descriptor: int) -> bool:
    """Whether a page can be moved past the page cache: some file systems take the flag, and refuse the call."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.pwritev(descriptor, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def _through_the_cache(descriptor: int) -> None:
    # Not at the head: other systems do not have it.
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)


def _refusal(message: str) -> Exception:
    # A proof that cannot be had is no fault of the plan.
    return OSError(message) if is_proof() else ApplyError(message)


def _check_is_on_disk(folder: str) -> None:
    if sys.platform != "linux":
        raise _refusal("what is moved to disk needs Linux; plan without --disk")
    kind = _file_system(folder)
    if kind in _IN_MEMORY and not is_proof():
        raise _refusal(
            f"{folder} is in memory ({kind}), so a file there would take the host memory that it is to save; "
            "choose a folder on a disk with --disk-folder, or set TMPDIR"
        )


def _file_system(folder: str) -> str:
    """The kind of the file system that `folder` is on; empty if the system does not tell."""
    found, longest = "", -1
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        # proc(5): the fifth field is the mount point, with blanks as \040; later mounts cover earlier ones.
        point = head.split()[4].replace("\\040", " ")
        if len(point) >= longest and (folder == point or folder.startswith(point.rstrip("/") + "/")):
            found, longest = tail.split()[0], len(point)
    return found

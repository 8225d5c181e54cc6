"""An overlay over each folder that a program can write to: it sees its own writes, and the folders below stay as they are.

Everything else becomes read-only. All paths stay the same.
"""

import dataclasses
import errno
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tightfit.capture.processes.containment import linux
from tightfit.capture.processes.containment.policy import DROPPED, UPPER
from tightfit.capture.processes.containment.written import remember

_FLAGS = {
    "ro": linux.READ_ONLY,
    "nosuid": linux.NO_SETUID,
    "nodev": linux.NO_DEVICES,
    "noexec": linux.NO_EXECUTION,
    "noatime": linux.NO_ACCESS_TIMES,
    "nodiratime": linux.NO_DIRECTORY_ACCESS_TIMES,
    "relatime": linux.RELATIVE_ACCESS_TIMES,
}
# File systems of the kernel itself, in which nobody keeps files.
_NOT_OF_FILES = frozenset(
    [
        "proc",
        "sysfs",
        "devtmpfs",
        "devpts",
        "cgroup",
        "cgroup2",
        "mqueue",
        "debugfs",
        "tracefs",
        "securityfs",
        "pstore",
        "bpf",
        "configfs",
        "fusectl",
        "hugetlbfs",
        "binfmt_misc",
        "autofs",
        "efivarfs",
        "nsfs",
        "rpc_pipefs",
        "selinuxfs",
    ]
)
_SHARED_MEMORY = "/dev/shm"
# Nobody trains in these, and each overlay takes time.
_LEFT_ALONE = ("/boot", "/lost+found", "/sys", "/proc", "/dev")
# Folders of more entries than this are not looked through: each may be on another machine.
_MAX_ENTRIES = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system, as /proc/self/mountinfo has it."""

    point: str
    kind: str
    flags: int

    @property
    def has_files(self) -> bool:
        """Whether it is one that programs keep files in."""
        return self.kind not in _NOT_OF_FILES


def mounts(text: str) -> list[Mount]:
    """The mounts of a mountinfo file, the visible one of each point, parents first."""
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        point, options = head.split()[4:6]
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point)
        flags = sum(_FLAGS.get(option, 0) for option in options.split(","))
        found[point] = Mount(point=point, kind=tail.split()[0], flags=flags)
    return sorted(found.values(), key=lambda mount: mount.point.count("/") if mount.point != "/" else 0)


def writable_folders(known: Sequence[Mount], paths: Iterable[str]) -> list[str]:
    """The outermost folders, parents first, that this process may write to, as far as they are known: mounts, the folders in them, and those
    of `paths`.
    """
    real = {mount.point: mount for mount in known if mount.has_files and not mount.flags & linux.READ_ONLY}
    found = {point for point in real if point != "/" and _may_write(point)}
    for point in real.keys() - found:
        found.update(entry for entry in _folders_in(point) if _may_write(entry))
    for path in paths:
        parents = [*reversed(Path(path).parents), Path(path)]
        # The root itself cannot be covered in place.
        found.update(str(folder) for folder in parents[1:] if folder.is_dir() and _may_write(str(folder)))
    found = {f for f in found if not any(_is_in(f, a) for a in _LEFT_ALONE) and os.path.realpath(f) == f}
    outermost = [f for f in found if not any(_covers(known, outer, f) for outer in found) and _is_of_files(known, f)]
    return sorted(outermost, key=lambda folder: folder.count("/"))


def _covers(known: Sequence[Mount], outer: str, inner: str) -> bool:
    """Whether an overlay over `outer` shows `inner` too: in the same mount, and ours, since nobody else's folder can be copied up."""
    if outer == inner or not inner.startswith(f"{outer}/"):
        return False
    if _mount_of(known, outer) != _mount_of(known, inner):
        return False
    between = [str(p) for p in Path(inner).parents if str(p).startswith(outer)]
    return os.geteuid() == 0 or all(os.stat(p).st_uid == os.geteuid() for p in [*between, inner] if p != outer)


def _mount_of(known: Sequence[Mount], path: str) -> str:
    points = {mount.point for mount in known}
    return next(str(p) for p in (Path(path), *Path(path).parents) if str(p) in points)


def _is_of_files(known: Sequence[Mount], path: str) -> bool:
    point = _mount_of(known, path)
    return next(mount for mount in known if mount.point == point).has_files


def _folders_in(point: str) -> list[str]:
    try:
        with os.scandir(point) as entries:
            found = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        # Not ours to read.
        return []
    return found if len(found) <= _MAX_ENTRIES else []


def _may_write(folder: str) -> bool:
    try:
        return os.access(folder, os.W_OK) or os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def cover(shared: Path, paths: Iterable[str], *, as_owner: bool) -> list[str]:
    """Puts the overlays over this process's mounts; what is written goes to a folder in `shared`, which itself stays as it is. Returns the folders
    that have one.

    `as_owner`: the process has rights over its own files alone (a namespace of users).

    Raises:
        OSError: the kernel does not allow it.
    """
    linux.mount("none", "/", flags=linux.RECURSIVE | linux.PRIVATE)
    known = mounts(Path("/proc/self/mountinfo").read_text())
    paths = [os.path.realpath(path) for path in paths]
    folders = writable_folders(known, paths)
    dropped = str(shared / DROPPED)
    below = [m.point for m in known if m.point != "/" and m.point not in folders]
    # By descriptors: once an overlay is there, paths lead into it.
    opened = {
        path: os.open(path, os.O_PATH) for path in (*folders, *below, str(shared), dropped) if os.path.exists(path)
    }
    try:
        covered = _overlays(folders, paths, opened, opened[dropped], as_owner=as_owner)
        for point in below:
            if point in opened and any(_is_in(point, folder) for folder in covered):
                linux.mount(_by(opened[point]), point, flags=linux.BIND | linux.RECURSIVE)
        if _SHARED_MEMORY in opened:
            _private_memory(opened[_SHARED_MEMORY], as_owner=as_owner)
        linux.mount(_by(opened[str(shared)]), str(shared), flags=linux.BIND)
        # What is below an overlay must be changed by nobody else.
        linux.mount("tmpfs", dropped, "tmpfs", linux.READ_ONLY, "size=4k")
        for mount in known:
            if mount.point not in (*covered, _SHARED_MEMORY):
                _forbid_writes(mount)
        return covered
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _by(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _overlays(
    folders: Sequence[str], paths: Sequence[str], opened: dict[str, int], dropped: int, *, as_owner: bool
) -> list[str]:
    """The folders that could be covered; what is written to the others will be refused.

    Raises:
        OSError: none could be.
    """
    # Most are never written to, and one in memory is made in a tenth of the time. What is large goes to the disk.
    os.mkdir(f"{_by(dropped)}/memory")
    linux.mount("tmpfs", f"{_by(dropped)}/memory", "tmpfs", linux.NO_SETUID | linux.NO_DEVICES)
    places = {
        f: f"{_by(dropped)}/{'' if any(_is_in(p, f) for p in paths) else 'memory/'}{n}" for n, f in enumerate(folders)
    }
    for folder, place in places.items():
        _make(place, os.stat(folder).st_mode & 0o7777 | 0o700)
        remember(Path(place), folder)
    covered, refused = [], OSError("there is no folder to write to")
    for folder, place in places.items():
        # What is dropped need not be safe from a loss of power.
        options = f"lowerdir={_by(opened[folder])},{_places(place)},volatile,{_attributes(as_owner)}"
        try:
            linux.mount("overlay", folder, "overlay", options=options)
        except OSError as error:
            refused = error
        else:
            covered.append(folder)
    if not covered:
        raise refused
    return covered


def _make(place: str, mode: int) -> None:
    os.mkdir(place)
    os.mkdir(f"{place}/work")
    os.mkdir(f"{place}/{UPPER}")
    # Those of the folder that is covered.
    os.chmod(f"{place}/{UPPER}", mode)


def _places(place: str) -> str:
    return f"upperdir={place}/{UPPER},workdir={place}/work"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _attributes(as_owner: bool) -> str:
    # Those of the trusted kind, which are needed to rename folders, are for the superuser.
    return "userxattr" if as_owner else "redirect_dir=on"


def _private_memory(real: int, *, as_owner: bool) -> None:
    """What the program's processes share in memory stays in memory."""
    linux.mount("tmpfs", _SHARED_MEMORY, "tmpfs", linux.NO_SETUID | linux.NO_DEVICES, "mode=1777")
    if os.listdir(_by(real)):
        _make(f"{_SHARED_MEMORY}/own", 0o1777)
        options = f"lowerdir={_by(real)},{_places(f'{_SHARED_MEMORY}/own')},{_attributes(as_owner)}"
        linux.mount("overlay", _SHARED_MEMORY, "overlay", linux.NO_SETUID | linux.NO_DEVICES, options)


def _forbid_writes(mount: Mount) -> None:
    try:
        linux.mount("none", mount.point, flags=linux.REMOUNT | linux.BIND | linux.READ_ONLY | mount.flags)
    except OSError as error:
        # No path leads to it any more, or none of this user's.
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES) and mount.has_files:
            raise

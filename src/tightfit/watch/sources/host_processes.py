"""Who a process is, from Linux's /proc: its user, its command line, its container."""

import contextlib
import functools
import os
import re
from pathlib import Path

from tightfit.watch.machine.printable import printable
from tightfit.watch.machine.readings import ProcessFacts

_MAX_COMMAND_BYTES = 4096
_CONTAINERS = (
    # cgroup paths as the runtimes write them: Docker and containerd (also below Kubernetes), CRI-O, Podman, LXC; and jobs of Slurm.
    (re.compile(r"(docker|containerd|cri-containerd|crio|libpod)[-/:]([0-9a-f]{12})[0-9a-f]{52}"), r"\1 \2"),
    (re.compile(r"kubepods.*/(?:[\w.-]+?-)?([0-9a-f]{12})[0-9a-f]{52}"), r"kubernetes \1"),
    (re.compile(r"/lxc(?:\.payload)?[./]([\w.-]+)"), r"lxc \1"),
    (re.compile(r"/job_(\d+)(?:/|$)"), r"slurm \1"),
)
_SHORT = {"cri-containerd": "containerd", "libpod": "podman"}


def facts_of_process(pid: int, proc: Path = Path("/proc")) -> ProcessFacts:
    """What /proc says of a process. In a container PIDs of the host's are not to be found there: then it is `?`."""
    folder = proc / str(pid)
    try:
        start_ticks = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        owner = folder.stat().st_uid
    except (OSError, ValueError, IndexError):
        return ProcessFacts(pid=pid, identity="?", started=None, user="?", command="?", container="")
    booted, boot_id = _boot(proc)
    return ProcessFacts(
        pid=pid,
        # Ticks since the machine booted: dates of starts move when the clock is set.
        identity=f"{boot_id}:{start_ticks}",
        started=booted + start_ticks / os.sysconf("SC_CLK_TCK"),
        user=_user(owner),
        command=_command(folder),
        container=container_of_cgroup(_text(folder / "cgroup")),
    )


def container_of_cgroup(text: str) -> str:
    """The container that a `/proc/PID/cgroup` (version 1 or 2) names, such as `docker 3f2a9c01b7de`; empty for none."""
    for pattern, words in _CONTAINERS:
        found = pattern.search(text)
        if found is not None:
            runtime, _, rest = found.expand(words).partition(" ")
            return printable(f"{_SHORT.get(runtime, runtime)} {rest}")
    return ""


def _command(folder: Path) -> str:
    with contextlib.suppress(OSError), open(folder / "cmdline", "rb") as file:
        words = file.read(_MAX_COMMAND_BYTES).rstrip(b"\0").split(b"\0")
        text = b" ".join(words).decode(errors="replace").strip()
        if text:
            return printable(text)
    # A zombie, or a thread of the kernel, has a name alone.
    return f"[{printable(_text(folder / 'comm').strip() or '?')}]"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@functools.cache
def _boot(proc: Path) -> tuple[float, str]:
    """When the machine booted (Unix seconds), and a few characters that name this boot."""
    found = re.search(r"^btime (\d+)", _text(proc / "stat"), re.MULTILINE)
    return float(found[1]) if found else 0.0, _text(proc / "sys/kernel/random/boot_id")[:8]


@functools.lru_cache(maxsize=1024)
def _user(owner: int) -> str:
    import pwd

    try:
        return printable(pwd.getpwuid(owner).pw_name)
    except KeyError:
        return str(owner)

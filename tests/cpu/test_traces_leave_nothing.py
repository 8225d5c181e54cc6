"""A traced program may do to files, processes and the network what it likes: it sees its own writes, and nobody else does, then or later."""

import json
import os
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tightfit
from tightfit.capture.processes.containment import landlock, namespaces
from tightfit.cli.main import run
from tightfit.errors import CaptureError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel keeps nothing"),
    pytest.mark.usefixtures("traces_import_libraries_themselves"),
]

TRAINS = """\
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
HOSTILE = """\
import ctypes, json, mmap, os, pathlib, shutil, sqlite3, subprocess, sys, tempfile, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

def read(path):
    return pathlib.Path(path).read_text()

def array():
    np.save("array.npy", np.zeros(3))
    assert np.load("array.npy").shape == (3,)

def append():
    with open("log.jsonl", "a") as file:
        file.write("invented")
    assert read("log.jsonl") == "{}invented"

def rename():
    os.rename("moved.txt", "elsewhere.txt")
    os.replace("folder", "another")
    assert sorted(os.listdir("another")) == ["inner.txt", "nested"] and not os.path.exists("folder") and not os.path.exists("moved.txt")
    assert read("another/nested/deep.txt") == "deep" and read("elsewhere.txt") == "moved"

def remove():
    shutil.rmtree("removed")
    assert not os.path.exists("removed/file.txt")
    os.makedirs("removed/new")
    assert os.listdir("removed") == ["new"]

def database():
    with sqlite3.connect("runs.db") as runs:
        runs.execute("insert into runs values (2)")
        assert runs.execute("select count(*) from runs").fetchone() == (2,)

def mapped():
    with open("mapped.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:4] = b"XXXX"
    assert read("mapped.bin") == "XXXXed"

def program():
    subprocess.run("echo more >> log.jsonl && touch touched.txt", shell=True, check=True, stderr=subprocess.DEVNULL)
    assert os.path.exists("touched.txt")

def shell():
    if os.system("rm shell.txt 2>/dev/null"):
        raise OSError("refused")
    assert not os.path.exists("shell.txt")

class Writes(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        pathlib.Path("by_worker.txt").write_text("worker")
        pathlib.Path("log.jsonl").write_text("worker")
        return index

def worker():
    list(DataLoader(Writes(), num_workers=1))

def attributes():
    os.chmod("mode.txt", 0o600)
    os.utime("mode.txt", (0, 0))
    os.symlink("mode.txt", "link")
    os.link("mode.txt", "hard")
    assert os.stat("mode.txt").st_mtime == 0 and os.path.islink("link") and read("hard") == "mode"

def temporary():
    handle, _ = tempfile.mkstemp()
    os.write(handle, b"left")
    torch.save({"real": torch.ones(3)}, "array.npy")
    torch.save(model.state_dict(), "checkpoint.pt")
    os.replace("checkpoint.pt", "best.pt")
    assert os.path.getsize("best.pt") > 0 and torch.load("array.npy")["real"].sum() == 3
    model.load_state_dict(torch.load("best.pt"))

def in_c():
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.open(b"in_c.txt", os.O_WRONLY | os.O_TRUNC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "refused")
    os.write(descriptor, b"C")
    assert read("in_c.txt") == "C"

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                with open("log.jsonl", "a") as file:
                    file.write("daemon")
                time.sleep(0.001)
        os._exit(0)
    os.wait()

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    if step == 1:
        for way in (array, append, rename, remove, database, mapped, program, shell, worker, attributes, temporary, in_c, daemon):
            if way.__name__ == os.environ.get("NOT"):
                continue
            try:
                way()
                print(way.__name__, "done", file=sys.stderr, flush=True)
            except (OSError, subprocess.SubprocessError) as error:
                print(way.__name__, "refused", error, file=sys.stderr, flush=True)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; its path is short, as those of sockets are."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


@pytest.fixture
def home(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    for folder in ("home/folder/nested", "home/removed"):
        (tmp_path / folder).mkdir(parents=True)
    home = tmp_path / "home"
    np.save(home / "array.npy", np.arange(5))
    texts = {
        "log.jsonl": "{}",
        "moved.txt": "moved",
        "folder/inner.txt": "inner",
        "folder/nested/deep.txt": "deep",
        "removed/file.txt": "removed",
        "mapped.bin": "mapped",
        "shell.txt": "shell",
        "mode.txt": "mode",
        "in_c.txt": "in C",
        "hostile.py": HOSTILE,
        "train.py": TRAINS,
    }
    for name, text in texts.items():
        (home / name).write_text(text)
    with sqlite3.connect(home / "runs.db") as runs:
        runs.execute("create table runs (number)")
        runs.execute("insert into runs values (1)")
    runs.close()
    monkeypatch.chdir(home)
    return home


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that can be seen of a folder from outside."""
    found = {}
    for path in sorted((folder, *folder.rglob("*"))):
        seen = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[str(path)] = (seen.st_mode, seen.st_mtime_ns, seen.st_ino, seen.st_nlink, content)
    return found


def processes() -> set[str]:
    """The commands of all processes that run hostile.py's folder as their working folder."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == os.getcwd() and int(entry.name) != os.getpid():
                found.add((entry / "cmdline").read_text())
        except OSError:
            continue
    return {command for command in found if "fork_server" not in command}


@pytest.mark.parametrize("mechanism", ["namespaces", "landlock", "python"])
def test_nothing_is_left_of_a_dozen_ways_to_write(
    mechanism: str, home: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if (mechanism == "namespaces" and not namespaces.are_possible()) or (
        mechanism == "landlock" and not landlock.is_possible()
    ):
        pytest.skip("not with this kernel")
    monkeypatch.setenv("TIGHTFIT_CONTAINMENT", mechanism)
    # What libraries in C write is kept from the files by the kernel alone.
    monkeypatch.setenv("NOT", "in_c" if mechanism == "python" else "")
    before = tree(home)
    assert run(["estimate", "hostile.py", "--device", "RTX 4090", "--show-output", "--json"]) == 0
    said = capfd.readouterr()
    assert tree(home) == before
    assert list(temporary.iterdir()) == []
    assert processes() == set()
    lines = dict(line.split(" ", 1) for line in said.err.splitlines() if " done" in line or " refused" in line)
    assert len(lines) == (12 if mechanism == "python" else 13), said.err
    refused = {way for way, line in lines.items() if not line.startswith("done")}
    programs = {"program", "shell"}
    assert refused == {"namespaces": set(), "landlock": programs | {"in_c"}, "python": programs}[mechanism], said.err
    # Files are no place in a program.
    files = [a["where"] for a in json.loads(said.out)["assumptions"] if "--allow-writes" in a["what"]]
    assert files == [""] or mechanism == "python"


def test_a_program_has_no_network_but_its_own_machine(home: Path) -> None:
    (home / "train.py").write_text(
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname()).close()\n"
        "for ask in (lambda: socket.create_connection(('192.0.2.1', 80)), lambda: socket.getaddrinfo('example.com', 80)):\n"
        "    try:\n        ask()\n        raise SystemExit('there is a network')\n    except OSError as error:\n        assert '--allow-network' in str(error)\n"
        + TRAINS
    )
    found = tightfit.estimate("train.py", "RTX 4090")
    said = [a.what for a in found.assumptions if a.where == "network"]
    assert said == ["192.0.2.1, example.com: refused while the program is traced; allow it with --allow-network"]


def test_a_program_that_ends_without_a_network_or_a_place_to_write_is_told_what_to_allow(home: Path) -> None:
    (home / "train.py").write_text("import urllib.request\nurllib.request.urlopen('http://example.com')\n" + TRAINS)
    with pytest.raises(CaptureError, match=r"example\.com.*--allow-network"):
        tightfit.estimate("train.py", "RTX 4090")
    (home / "train.py").write_text("open('/dev/a-file', 'w')\n" + TRAINS)
    with pytest.raises(CaptureError, match=r"Read-only file system.*--allow-writes"):
        tightfit.estimate("train.py", "RTX 4090")


def test_what_is_allowed_is_real(home: Path) -> None:
    (home / "train.py").write_text(
        TRAINS + "    open('log.jsonl', 'a').write('real')\n    torch.save(model.state_dict(), 'array.npy')\n"
    )
    array = (home / "array.npy").read_bytes()
    tightfit.estimate("train.py", "RTX 4090", allow_writes=True, steps=4)
    assert (home / "log.jsonl").read_text() == "{}" + 3 * "real"
    # There are no numbers to be written.
    assert (home / "array.npy").read_bytes() == array


@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "train.py", "--device", "4090"],
        ["report", "train.py", "--device", "4090", "-o", "out.json", "--format", "json"],
        ["record", "train.py", "--device", "4090", "-o", "out.pickle"],
        ["diff", "train.py", "train.py", "--device", "4090"],
        ["run", "--virtual", "--device", "4090", "train.py"],
    ],
    ids=lambda words: words[0],
)
def test_each_command_that_traces_allows_what_its_hints_name(home: Path, command: list[str]) -> None:
    (home / "train.py").write_text(TRAINS + "open('log.jsonl', 'a').write('real')\n")
    assert run(command) == 0
    assert (home / "log.jsonl").read_text() == "{}"
    assert run([*command, "--allow-writes", "--allow-network"]) == 0
    assert (home / "log.jsonl").read_text().startswith("{}real")


def test_a_model_with_tied_weights_is_saved_moved_and_loaded(home: Path) -> None:
    pytest.importorskip("safetensors")
    (home / "train.py").write_text(
        TRAINS
        + """\
import os
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.free = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

tied = Tied().cuda().bfloat16()
addresses = {name: value.data_ptr() for name, value in tied.state_dict().items()}
assert addresses["first.weight"] == addresses["last.weight"] != addresses["free.weight"] and addresses["free.weight"] % 512 == 0
assert tied.free.weight[1:].data_ptr() == addresses["free.weight"] + 8
save_model(tied, "tied.safetensors", metadata={"format": "pt"})
os.rename("tied.safetensors", "best.safetensors")
assert os.path.getsize("best.safetensors") > 64
load_model(tied, "best.safetensors")
with safe_open("best.safetensors", "pt") as file:
    assert file.metadata()["format"] == "pt" and {file.get_tensor(k).dtype for k in file.keys()} == {torch.bfloat16}
save_file({"real": torch.arange(3), "virtual": tied.free.weight}, "mixed.safetensors")
assert load_file("mixed.safetensors")["real"].tolist() == [0, 1, 2] and load_file("mixed.safetensors", device="cuda")["virtual"].is_cuda
raise SystemExit("all saved and loaded")
"""
    )
    with pytest.raises(CaptureError, match="all saved and loaded"):
        tightfit.estimate("train.py", "RTX 4090", steps=9)

"""Files that a process is kept from writing, in Python: what it does to links is what it sees, and nobody else does."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import os, pathlib, shutil, sqlite3, sys
from tightfit.capture.processes.containment import redirection
from tightfit.capture.processes.containment.policy import Containment, Policy

redirection.begin(Containment(policy=Policy(), shared=sys.argv[1]), why="it is a test")
before = {name: os.lstat(name) for name in os.listdir()}
for step in range(3):
    folder = pathlib.Path(f"checkpoints/step{step}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.pt").write_text(f"weights {step}")
    if os.path.islink("latest"):
        os.unlink("latest")
    os.symlink(folder, "latest")
    os.symlink(folder.absolute(), "next")
    os.replace("next", "best")
    assert pathlib.Path("latest/weights.pt").read_text() == pathlib.Path("best/weights.pt").read_text() == f"weights {step}"
    assert os.listdir("latest") == [each.name for each in os.scandir("best")] == ["weights.pt"]
assert os.readlink("latest") == "checkpoints/step2" and os.path.islink("best") and not os.path.lexists("next")
assert [each.path for each in os.scandir("best")] == ["best/weights.pt"]
# Through a link: what it leads to is written, and read by either name.
with open("to_text", "a") as file:
    file.write(" and more")
os.symlink("text", "another")
assert {pathlib.Path(each).read_text() for each in ("text", "to_text", "another")} == {"text and more"}
assert os.stat("another").st_size == 13 and os.lstat("another").st_size == 4
os.rename("another", "moved")
assert os.readlink("moved") == "text" and pathlib.Path("moved").read_text() == "text and more"
try:
    os.symlink("text", "to_text")
    raise AssertionError("there is something")
except FileExistsError:
    pass
os.rename("to_folder", "renamed")
assert os.path.islink("renamed") and os.listdir("renamed") == ["inner"] and os.path.exists("folder/inner")
os.remove("renamed")
assert not os.path.lexists("renamed") and not os.path.lexists("to_folder")
os.symlink("loop", "loop")
assert not os.path.exists("loop") and os.path.lexists("loop")
shutil.rmtree("checkpoints")
assert not os.path.exists("latest/weights.pt") and os.path.lexists("latest")
"""


def test_links_lead_to_what_the_program_sees(tmp_path: Path) -> None:
    own, home = tmp_path / "own", tmp_path / "home"
    (own / "dropped").mkdir(parents=True)
    (home / "folder").mkdir(parents=True)
    (home / "folder" / "inner").write_text("inner")
    (home / "text").write_text("text")
    os.symlink("text", home / "to_text")
    os.symlink("folder", home / "to_folder")
    # What was there when it began.
    (home / "checkpoints" / "step7").mkdir(parents=True)
    os.symlink("checkpoints/step7", home / "latest")
    before = sorted((str(p), os.lstat(p).st_mtime_ns) for p in home.rglob("*"))
    subprocess.run([sys.executable, "-c", PROGRAM, str(own)], cwd=home, check=True, timeout=60)
    assert sorted((str(p), os.lstat(p).st_mtime_ns) for p in home.rglob("*")) == before


LIBRARIES = """\
import bz2, codecs, gzip, lzma, os, pathlib, shelve, shutil, sys, tarfile, tempfile, zipfile
from tightfit.capture.processes.containment import redirection
from tightfit.capture.processes.containment.policy import Containment, Policy

redirection.begin(Containment(policy=Policy(), shared=sys.argv[1]), why="it is a test")
with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
    file.write("whole")
os.replace(file.name, "text")
assert pathlib.Path("text").read_text() == "whole"
with tempfile.TemporaryDirectory(dir=".") as folder:
    pathlib.Path(folder, "inner").write_text("inner")
with tarfile.open("all.tar", "w") as archive:
    archive.add("text")
with tarfile.open("all.tar.gz", "w:gz") as archive:
    archive.add("text")
for each in ("all.tar", "all.tar.gz"):
    with tarfile.open(each) as archive:
        assert archive.extractfile("text").read() == b"whole"
        archive.extractall("out", filter="data")
assert pathlib.Path("out/text").read_text() == "whole"
for library in (bz2, gzip, lzma):
    with library.open("packed", "wt") as file:
        file.write(library.__name__)
    with library.open("packed", "rt") as file:
        assert file.read() == library.__name__
with codecs.open("coded", "w", "utf-8") as file:
    file.write("coded")
assert codecs.open("coded").read() == "coded"
shutil.make_archive("archive", "zip", "out")
assert zipfile.ZipFile("archive.zip").namelist() == ["text"]
shutil.unpack_archive("archive.zip", "unpacked")
shutil.copytree("unpacked", "copied")
shutil.move("copied", "moved")
assert sorted(os.listdir()) == ["all.tar", "all.tar.gz", "archive.zip", "coded", "moved", "out", "packed", "text", "unpacked"], sorted(os.listdir())
"""


def test_pythons_libraries_for_files_write_copies(tmp_path: Path) -> None:
    own, home = tmp_path / "own", tmp_path / "home"
    (own / "dropped").mkdir(parents=True)
    home.mkdir()
    subprocess.run([sys.executable, "-c", LIBRARIES, str(own)], cwd=home, check=True, timeout=60)
    assert not list(home.iterdir())

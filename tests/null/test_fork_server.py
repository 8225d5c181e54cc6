"""Children of a fork server begin like ordinary ones, but for what has been imported already; the server ends when it should."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tightfit.capture.processes import fork_server
from tightfit.capture.processes.fork_server import ForkedChild, forked_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no server elsewhere")

CHILD = """
import gc, json, os, signal, sys, tempfile, time
from pathlib import Path
from tightfit.capture.processes.children import die_with_parent

def main(path, parent):
    die_with_parent(int(parent))
    asked = json.loads(Path(path).read_text())
    objects = []
    if asked == "objects":
        for generation in (1, 2):
            gc.collect(generation)
            objects.append(any(each is sys.modules["wave"].Wave_read for each in gc.get_objects()))
    print("on stderr", file=sys.stderr, flush=True)
    Path(path + ".answer").write_text(json.dumps({
        "server": int(parent), "modules": [m for m in ("wave", "colorsys") if m in sys.modules], "folder": os.getcwd(),
        "first_path": sys.path[0], "mine": os.environ.get("MINE"), "temporary": tempfile.gettempdir(), "argv": sys.argv, "group": os.getpgid(0) == os.getpid(),
        "objects": objects,
    }))
    if asked == "sleep":
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    if asked == "raise":
        raise ValueError("of the child")
    if asked == "exit":
        sys.exit(5)
    if asked == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "a_child_of_the_test.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}


def asked(
    environment: dict[str, str],
    what: str = "",
    *,
    reads_errors: bool = True,
    preloaded: tuple[str, ...] = ("wave",),
    imports: tuple[str, ...] = (),
) -> tuple[Any, dict[str, Any], str]:
    """The process, its answer and what it wrote to stderr."""
    request = Path("request.json")
    request.write_text(json.dumps(what))
    with forked_child(
        "a_child_of_the_test",
        request,
        environment=environment,
        reads_errors=reads_errors,
        preloaded=preloaded,
        imports=imports,
    ) as process:
        said = (process.communicate()[1] or b"").decode()
    return process, json.loads(Path("request.json.answer").read_text()), said


def test_children_have_what_was_imported_and_all_else_of_their_own(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, one, said = asked({**environment, "MINE": "1"})
    assert isinstance(first, ForkedChild) and (first.returncode, said) == (0, "on stderr\n")
    assert one["modules"] == ["wave"] and one["mine"] == "1" and one["group"]
    assert one["argv"] == [str(tmp_path / "a_child_of_the_test.py"), "request.json", str(one["server"])]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    _, other, _ = asked({**environment, "TMPDIR": str(tmp_path)})
    assert other["server"] == one["server"] and other["mine"] is None
    assert other["temporary"] == str(tmp_path) != one["temporary"]
    assert other["folder"] == other["first_path"] == str(tmp_path / "elsewhere")


def test_stderr_is_ours_where_it_is_not_read(environment: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert asked(environment, reads_errors=False)[2] == ""
    assert capfd.readouterr().err == "on stderr\n"


@pytest.mark.parametrize(("what", "code"), [("exit", 5), ("raise", 1), ("killed", -signal.SIGKILL)])
def test_the_exit_code_is_the_childs(environment: dict[str, str], what: str, code: int) -> None:
    process, answer, said = asked(environment, what)
    assert process.returncode == code
    assert ("ValueError: of the child" in said) == (what == "raise")
    assert asked(environment)[1]["server"] == answer["server"]


def test_what_python_or_torch_reads_at_its_start_needs_another_server(environment: dict[str, str]) -> None:
    servers = [asked({**environment, "OMP_NUM_THREADS": n})[1]["server"] for n in ("1", "1", "2")]
    assert servers[0] == servers[1] != servers[2]


def test_the_server_that_was_used_before_is_kept_and_no_other(environment: dict[str, str]) -> None:
    usual, once, *later = (asked({**environment, "OMP_NUM_THREADS": n})[1]["server"] for n in "12131")
    _wait_until(lambda: _group_of(str(once)) is None)
    assert later[0] == later[2] == usual


def test_what_is_preloaded_is_no_object_of_the_child_until_python_collects_all(environment: dict[str, str]) -> None:
    """The threshold for a full collection counts what was imported too: when tensors in cycles die must not depend on the server."""
    _, answer, _ = asked(environment, "objects", preloaded=("wave", "gc:disable"))
    assert answer["objects"] == [False, True]


def test_more_is_imported_once_when_it_is_first_asked_for(environment: dict[str, str], tmp_path: Path) -> None:
    noted = tmp_path / "noted.txt"
    (tmp_path / "imported_once.py").write_text(
        f"import os\nopen({str(noted)!r}, 'a').write(f'imported by {{os.getpid()}}\\n')\n"
        f"def call():\n    open({str(noted)!r}, 'a').write('called\\n')\n"
    )
    missing = ("no_such_module", "colorsys")
    answers = [asked(environment, imports=names)[1] for names in ((), missing, ("imported_once:call",) * 2, missing)]
    _, once, *_ = answers
    assert [each["modules"] for each in answers] == [["wave"], *[["wave", "colorsys"]] * 3]
    assert {each["server"] for each in answers} == {once["server"]}
    asked(environment, imports=("imported_once:call",))
    assert noted.read_text() == f"imported by {once['server']}\ncalled\n"


def _group_of(pid: str) -> int | None:
    """The process group of a process that has not ended."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(group)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_child_that_is_left_is_killed_with_what_it_has_started(environment: dict[str, str]) -> None:
    Path("request.json").write_text(json.dumps("sleep"))
    with forked_child(
        "a_child_of_the_test", Path("request.json"), environment=environment, reads_errors=True, preloaded=("wave",)
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        assert process.poll() is None
        group = process.pid
    assert process.returncode == -signal.SIGKILL
    _wait_until(lambda: not any(_group_of(path.name) == group for path in Path("/proc").glob("[0-9]*")))
    assert asked(environment)[0].returncode == 0


def test_while_a_child_runs_another_is_given_by_another_server(environment: dict[str, str]) -> None:
    Path("sleep.json").write_text(json.dumps("sleep"))
    with forked_child(
        "a_child_of_the_test", Path("sleep.json"), environment=environment, reads_errors=True, preloaded=("wave",)
    ) as process:
        inner = asked(environment)[0]
        assert inner.returncode == 0 and process.poll() is None


def test_a_server_that_has_died_is_replaced(environment: dict[str, str]) -> None:
    server = asked(environment)[1]["server"]
    os.kill(server, signal.SIGKILL)
    _wait_until(lambda: _group_of(str(server)) is None)
    process, answer, _ = asked(environment)
    assert process.returncode == 0 and answer["server"] != server


def test_where_no_server_can_be_had_the_child_is_an_ordinary_one(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.capture.processes.fork_server._Server.fork", lambda *_: None)
    process, answer, said = asked(environment)
    assert isinstance(process, subprocess.Popen)
    assert (process.returncode, answer["server"], said) == (0, os.getpid(), "on stderr\n")


def test_a_child_imports_what_was_written_after_its_server_has_listed_the_folder(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with_import = CHILD.replace("    asked = json", "    import imported_later_by_a_child\n    asked = json")
    (tmp_path / "another_child_of_the_test.py").write_text(with_import)
    server = asked(environment)[1]["server"]
    (tmp_path / "imported_later_by_a_child.py").touch()
    # As on a file system whose times are coarse: the folder looks as it did when it was listed.
    at = (tmp_path / "a_child_of_the_test.py").stat().st_mtime_ns
    os.utime(tmp_path, ns=(at, at))
    request = Path("request.json")
    with forked_child(
        "another_child_of_the_test", request, environment=environment, reads_errors=True, preloaded=("wave",)
    ) as process:
        assert process.communicate()[1] == b"on stderr\n"
    assert json.loads(Path("request.json.answer").read_text())["server"] == server


def test_a_server_that_has_nothing_to_do_ends(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0)
    begun = fork_server._Server({**environment, "OMP_NUM_THREADS": "5"}, ("wave",), is_kept=False)
    assert begun.process.wait(60) == 0
    begun.end()


def test_a_server_ends_with_the_thread_that_asked(environment: dict[str, str]) -> None:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(asked(environment)[1]))
    thread.start()
    thread.join()
    _wait_until(lambda: _group_of(str(answers[0]["server"])) is None)
    assert asked(environment)[1]["server"] != answers[0]["server"]


def test_a_process_forked_from_the_one_that_asked_has_its_own(environment: dict[str, str]) -> None:
    server = asked(environment)[1]["server"]
    pid = os.fork()
    if pid == 0:
        os._exit(int(asked(environment)[1]["server"] == server))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert asked(environment)[1]["server"] == server

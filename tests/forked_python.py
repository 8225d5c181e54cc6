"""Programs that tests run as `python PROGRAM` does, in processes that are forked with torch and transformers imported: a fresh interpreter takes longer to
import them than most such programs run. For those that ask what an import does, or what a whole command takes, it is the wrong place."""

import atexit
import contextlib
import dataclasses
import json
import os
import runpy
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

from tightfit.capture.processes.fork_server import forked_child

# The first optimizer imports the compiler.
_PRELOADED = ("torch", "torch._dynamo", "transformers.trainer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def forked_python(
    *words: str,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = False,
) -> Finished:
    """Runs `python WORDS...`: a script, `-m MODULE` or `-c CODE`, with its arguments, and `-W ignore` before them; `env` is added to our variables."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(cwd or os.getcwd()):
        request, output = Path(folder, "request.json"), Path(folder, "output.txt")
        request.write_text(json.dumps({"words": words, "stdout": str(output)}))
        with forked_child(
            "tests.forked_python",
            request,
            environment=os.environ | (env or {}),
            reads_errors=True,
            preloaded=_PRELOADED,
        ) as child:
            _, errors = child.communicate(timeout=timeout)
            returncode = child.wait()
        finished = Finished(returncode=returncode, stdout=output.read_text(), stderr=(errors or b"").decode())
    assert not check or returncode == 0, finished.stderr
    return finished


def main(request: str, _server: str) -> None:
    """In the forked process: becomes the program of `request`, a path."""
    asked = json.loads(Path(request).read_text())
    os.dup2(os.open(asked["stdout"], os.O_WRONLY | os.O_CREAT, 0o600), 1)
    words = list(asked["words"])
    if words[:2] == ["-W", "ignore"]:
        del words[:2]
        warnings.simplefilter("ignore")
    try:
        _run(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        raise
    finally:
        # The process is ended without what the interpreter does at its end.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _run(words: list[str]) -> None:
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(program))
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")

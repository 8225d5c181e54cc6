"""A test that leaves torch, or a library around it, other than it found it has failed: nothing is repaired for the next one."""

import gc
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from tests.process_state import changed_since, process_state
from tests.sampled import in_turn

from tightfit.capture.child_process import trace_server
from tightfit.capture.processes import fork_server
from tightfit.cli.shared.progress import ProgressLine

# Programs that tests write run in processes of their own, and take their models from this folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)

# There is a process of tests for every core; and a process that has used threads of OpenMP cannot compute after a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where the compiler keeps what it has compiled: it makes the folder as soon as it is imported, in a process that is shared by tests.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "tightfit-tests-inductor"))

# What a command writes while it waits depends on how long that takes; its tests have a clock of their own.
ProgressLine.INTERVAL_IN_A_PIPE = math.inf

# How long an example takes says more of what else the machine does than of the code.
hypothesis.settings.register_profile("tightfit", deadline=None)
hypothesis.settings.load_profile("tightfit")


# The next test that runs a program in a process that has torch may come later than a user's next estimate.
fork_server.IDLE_SECONDS = 3600

# Hugging Face's libraries take longer to import than most traces of tests take: these fork from a server that has done it. The commands that tests
# run in processes of their own import them in each trace, as a user's do.
_PRELOADED_ANYWHERE = trace_server.PRELOADED
trace_server.PRELOADED += (
    "transformers.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "t5")),
)


@pytest.fixture
def traces_import_libraries_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere but in tests: for those that ask what an import does to a trace."""
    monkeypatch.setattr(trace_server, "PRELOADED", _PRELOADED_ANYWHERE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked as slow and what has its turn with another commit, and runs the searches for leaks first.

    They ask each object for its class and identity, which Python tells the audit hooks: one that a later test has added stays for good, and makes
    them take five times as long.
    """
    items.sort(key=lambda item: item.path.name != "test_leaks.py")
    if os.environ.get("TIGHTFIT_SLOW_TESTS"):
        return
    usual = [item for item in items if not item.get_closest_marker("slow")]
    left = in_turn(usual, os.environ.get("TIGHTFIT_COMMIT"))
    if len(left) < len(items):
        kept = set(left)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = left


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_is_set_aside() -> None:
    """It stays for all tests: those that look at every object there is, as a recording does when it begins, need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def modules_set_aside() -> Iterator[set[str]]:
    """The modules that were imported when all objects were last set aside; none once a test has put back what was set aside.

    Python can be asked for the number of objects that are set aside, and counts them one by one: 80 ms before each test.
    """
    modules: set[str] = set()
    unfreeze = gc.unfreeze

    def unfrozen() -> None:
        modules.clear()
        unfreeze()

    gc.unfreeze = unfrozen
    yield modules
    gc.unfreeze = unfreeze


@pytest.fixture(autouse=True)
def what_is_imported_later_is_set_aside_too(modules_set_aside: set[str]) -> None:
    """Much of torch is imported when it is first used, by a test; and a test may have put back what was set aside."""
    if len(sys.modules) >= len(modules_set_aside) + 50:
        modules_set_aside.update(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    """Compares what the process has of torch before and after each test. Torch is not imported for that."""
    before = process_state()
    yield
    changed = changed_since(before)
    assert not changed, "the test has changed the process: " + "; ".join(changed)

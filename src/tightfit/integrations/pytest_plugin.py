"""The pytest plugin: `@pytest.mark.memory_budget("22 GiB", device="RTX 4090")`, `@pytest.mark.no_leak`, and the fixture `leaks`.

pytest loads it when it starts, so nothing is imported here but pytest: tightfit and torch come with the first test that has a marker.
"""

import ast
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tightfit.runtime.leaks.leak_watch import LeakWatch

BUDGET, NO_LEAK = "memory_budget", "no_leak"
_NUM_REPEATS = 8
_MARKERS = (
    f"{BUDGET}(budget, *, device, target=None, parameters=(), steps=3): fails if a workload needs more than the budget on that GPU. "
    "The workload is the test's own body, which runs on a virtual GPU instead of here, or `target`, as tightfit.estimate takes it; "
    "then the body runs afterwards.",
    f"{NO_LEAK}(*, repeats={_NUM_REPEATS}): runs the test that many times, and fails if memory grows from one run to the next.",
)
# The body of a test as a script: what the test's module finds on the path here, it finds there.
_SCRIPT = """\
import importlib.util, sys
sys.path[:0] = {path!r}
spec = importlib.util.spec_from_file_location({name!r}, {file!r})
module = sys.modules[{name!r}] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
{call}(**{arguments!r})
"""


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)


@pytest.fixture
def leaks() -> "Callable[[], LeakWatch]":
    """`with leaks() as found:` is `tightfit.leaks` without a report on stderr; `assert not found.leaks, found.explain()`."""
    import tightfit

    return lambda: tightfit.leaks(quiet=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that has a marker of ours; True where that is done."""
    budget, no_leak = pyfuncitem.get_closest_marker(BUDGET), pyfuncitem.get_closest_marker(NO_LEAK)
    if (budget or no_leak) and inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail("memory_budget and no_leak take functions that are not async", pytrace=False)
    if budget is not None:
        _check_budget(pyfuncitem, *budget.args, **budget.kwargs)
        # The workload was the body itself, on a virtual GPU; for leaks it runs here as well.
        if "target" not in budget.kwargs and no_leak is None:
            return True
    return None if no_leak is None else _check_leaks(pyfuncitem, *no_leak.args, **no_leak.kwargs)


def _check_budget(
    item: pytest.Function,
    budget: str | int,
    *,
    device: str,
    target: str | None = None,
    parameters: Sequence[str] = (),
    steps: int = 3,
) -> None:
    import tightfit
    from tightfit.units import format_bytes, to_bytes

    found, why, limit_bytes = None, "", 0
    try:
        card = tightfit.find_device(device)
        limit_bytes = min(to_bytes(budget, "the budget", whole_bytes=card.capacity_bytes), card.capacity_bytes)
        with tempfile.TemporaryDirectory() as folder:
            found = tightfit.estimate(target or _script_of(item, folder), device, parameters=parameters, steps=steps)
    except tightfit.TightfitError as error:
        why = str(error)
    if found is None:
        # Outside of the handler: pytest would print the line twice.
        pytest.fail(f"memory budget: nothing could be estimated: {why}", pytrace=False)
    needed = found.peak.device_high_bytes
    if needed > limit_bytes:
        said = f"{format_bytes(needed)} of {format_bytes(limit_bytes)} on {found.device}"
        pytest.fail(f"memory budget: {said}\n{found.explain()}", pytrace=False)


def _script_of(item: pytest.Function, folder: str) -> str:
    """Writes the script that runs the body of a test, and returns its path."""
    arguments = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    try:
        is_plain = ast.literal_eval(repr(arguments)) == arguments
    except (ValueError, SyntaxError):
        is_plain = False
    if not is_plain:
        pytest.fail(
            f"memory_budget runs the body of {item.name} in another process: give it parameters (numbers, texts) and no fixtures, or name a target=",
            pytrace=False,
        )
    path = os.path.join(folder, f"{item.originalname}.py")
    function = item.originalname if item.cls is None else f"{item.cls.__qualname__}().{item.originalname}"
    with open(path, "w", encoding="utf-8") as file:
        name, call = item.path.stem, f"module.{function}"
        file.write(
            _SCRIPT.format(
                path=list(filter(None, sys.path)), name=name, file=str(item.path), call=call, arguments=arguments
            )
        )
    return path


def _check_leaks(item: pytest.Function, *, repeats: int = _NUM_REPEATS) -> bool:
    import tightfit

    arguments: dict[str, Any] = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    with tightfit.leaks(quiet=True) as found:
        for _ in range(repeats):
            item.obj(**arguments)
            found.step()
    if found.report.leaks or found.report.note:
        pytest.fail(found.explain(), pytrace=False)
    return True

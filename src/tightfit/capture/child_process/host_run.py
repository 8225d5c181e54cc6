"""Runs the first steps of a target on the host with real numbers, and saves the results: losses, weights, buffers, random states.

    python -m tightfit.capture.child_process.host_run REQUEST.json PARENT

The process is used for one run; the answer file beside the request says whether the run finished.
"""

import dataclasses
import importlib
import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from tightfit.capture.child_process import program_stdin
from tightfit.capture.child_process.child import leave, prepare, quiet, raise_what_was_swallowed, target_of
from tightfit.capture.child_process.host_script import ScriptOnHost
from tightfit.capture.patches import eager, on_host
from tightfit.capture.processes import process_role, visible_devices
from tightfit.capture.processes.children import die_with_parent
from tightfit.capture.processes.containment.closed_in import ClosedIn
from tightfit.capture.targets.target_kinds import Script, generator_on
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError, CaptureError, InternalError, faults
from tightfit.errors.program_errors import one_line

_SEED = 0
_MAX_OBJECTS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """The request to the child; `is_double`: floating point numbers have double precision. Values go to the file `values`.

    `imported` are modules to import before anything of torch is replaced. `card` is the device, by name or path, that `torch.cuda` answers for; None where it says that there is none.
    """

    target: dict[str, Any]
    num_steps: int
    values: str
    is_double: bool
    card: str | None
    preparation: dict[str, Any] | None
    imported: Sequence[str] = ()
    containment: dict[str, Any] | None = None
    standard_input: list[Any] | None = None


def main(path: str, parent: str) -> None:
    """Runs the request at `path` and ends the process; the process also ends as soon as `parent` does."""
    die_with_parent(int(parent))
    request = HostRequest(**json.loads(Path(path).read_text()))
    closed_in = ClosedIn(request.containment)

    def done(values: Callable[[], dict[str, Any]]) -> None:
        # Also from within the program: what it would do next is not run.
        try:
            raise_what_was_swallowed()
            found = values()
            closed_in.end()
            torch.save(found, request.values)
        except BaseException as error:  # noqa: BLE001 - our own, which the program may not catch
            leave(path, _failure(error))
        leave(path, {"kind": "done"})

    try:
        with quiet(show_output=False):
            _run(request, closed_in, done)
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        leave(path, _failure(error))


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ApplyError):
        return {"kind": "refused", "message": str(error), "technique": error.technique, "places": list(error.places)}
    own = faults.noted() or faults.our_error(error, "the run on the host")
    if isinstance(own, InternalError):
        return {"kind": "internal", "message": str(own), "trace": own.trace}
    return {"kind": "failed", "message": one_line("the program", error)}


def _run(request: HostRequest, closed_in: ClosedIn, done: Callable[[Callable[[], dict[str, Any]]], None]) -> None:
    process_role.begin_proof()
    for module in request.imported:
        importlib.import_module(module)
    if request.standard_input is not None:
        program_stdin.install(lambda: None, request.standard_input)
    eager.keep_compiler_out()
    on_host.install(None if request.card is None else find(request.card))
    if request.card is not None:
        visible_devices.show(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    if request.is_double:
        on_host.compute_in_double()
    target = target_of(request.target)
    if isinstance(target, Script):
        script = ScriptOnHost(request.num_steps)
        # Before a plan is put on, as when it is traced.
        script.install()
        report = prepare(request.preparation)
        closed_in.begin()
        script.run(target, done=lambda: done(lambda: _of_script(script, report)))
        return
    report = prepare(request.preparation)
    closed_in.begin()
    generator = generator_on(target, device="cpu")
    assert isinstance(generator, GeneratorType)
    losses = [_numbers(value) for value in itertools.islice(generator, request.num_steps)]
    done(lambda: _of_generator(generator, losses, report))


def _of_script(script: ScriptOnHost, report: Callable[[], Any]) -> dict[str, Any]:
    if not script.num_steps_seen:
        raise CaptureError("no optimizer of torch.optim stepped")
    values = _values([], script.num_steps_seen)
    # By name, so a parameter that an optimizer has in common with a model is there twice.
    values["weights"] = {name: parameter.detach().clone() for name, parameter in script.parameters()}
    values["buffers"] = {name: buffer.detach().clone() for name, buffer in script.buffers()}
    report()
    return values


def _of_generator(generator: GeneratorType, losses: list[Any], report: Callable[[], Any]) -> dict[str, Any]:
    values = _values(losses, len(losses))
    # Those of the generator's own variables, which are there as long as it goes on: what trains has to be among them.
    for path, module in _modules(dict(generator.gi_frame.f_locals) if generator.gi_frame is not None else {}):
        for name, parameter in module.named_parameters():
            values["weights"][f"{path}.{name}"] = parameter.detach().clone()
        for name, buffer in module.named_buffers():
            values["buffers"][f"{path}.{name}"] = buffer.detach().clone()
    report()
    return values


def _values(losses: list[Any], num_steps: int) -> dict[str, Any]:
    return {
        "num_steps": num_steps,
        "losses": losses,
        "weights": {},
        "buffers": {},
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),
    }


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, int | float) else None


def _modules(variables: dict[str, Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules among a function's variables, including those in containers and objects."""
    waiting = list(variables.items())
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_OBJECTS:
        path, value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}[{name!r}]", inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{path}[{number}]", inner) for number, inner in enumerate(value)]
        # Objects of torch and of the standard library hold no user's model that a variable would not name, and
        # looking into them may run code.
        elif type(value).__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names):
            waiting += [(f"{path}.{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()]


if __name__ == "__main__":
    main(*sys.argv[1:])

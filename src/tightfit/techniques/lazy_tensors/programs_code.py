"""Code of the program's that runs within a backward pass which is made again: its own checkpoints. What it writes besides its results is written once.

The state that it may reach is that of the model, of the checkpointed functions and of their arguments (`tightfit.effects`): for a further run it is what the
first one found, and afterwards what it has become. What cannot be restored is refused before anything is updated.
"""

import functools
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.effects.outside_calls import OutsideCalls
from tightfit.effects.reachable.cells import contents
from tightfit.effects.state import RegionState, Snapshot, again, differences, restore, snapshot_of_arguments
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.repeated_pass import may_be_statistics
from tightfit.torch_hooks.manifest import SET_VERSIONS
from tightfit.torch_hooks.weak_references import WeakTable

# What is written to in place is copied before the first run; larger tensors are refused if they are written to.
_LARGEST_COPIED_BYTES = 1 << 20
_MAX_DEPTH = 4


class ProgramsCode:
    """The state before and after the first run of a pass. `functions` are those of the checkpoints in it, with their arguments but the tensors."""

    def __init__(self, states: "RegionStates", model: torch.nn.Module, functions: Sequence[Any]) -> None:
        inside = set(map(id, model.modules()))
        self._regions = [(states.of(model), model)]
        self._states, self._modules = states, list(_modules_in(functions, _MAX_DEPTH))
        for other in self._modules:
            if id(other) not in inside:
                self._regions.append((RegionState(), other))
                inside.update(map(id, other.modules()))
        self._before = [state.snapshot(module, is_kept=True) for state, module in self._regions]
        self._before.append(snapshot_of_arguments({"a checkpoint's function": functions}, inside=inside))
        # Snapshots refer weakly to tensors with a graph, which the pass keeps anyway.
        self._alive = [tensor for snapshot in self._before for tensor in snapshot.in_graphs()]
        reached = [tensor for snapshot in self._before for tensor in snapshot.reach.tensors]
        with torch.no_grad():
            self._copies = {
                tensor: (tensor._version, tensor.clone())
                for tensor in dict.fromkeys(reached)
                if _may_be_written(tensor)
            }
        self._lost = ""

    @property
    def reaches_outside(self) -> bool:
        """Whether code of it names something by which it may reach outside of the process's memory, or holds more than is looked at."""
        return any(snapshot.reach.names_outside or snapshot.reach.is_cut for snapshot in self._before)

    def reaches(self, optimizers: Container[torch.optim.Optimizer]) -> bool:
        """Whether the checkpointed code may read one of these optimizers, whose states an update within the pass changes."""
        inside = (self._states.of(module).snapshot(module) for module in self._modules)
        reached = {id(each): each for s in (*inside, self._before[-1]) for each in s.reach.optimizers}
        return any(optimizer in optimizers for reference in reached.values() if (optimizer := reference()) is not None)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Around the first run: finds what it writes, and calls that reach outside, as far as the pass runs in this thread (at the host)."""
        with OutsideCalls() as calls:
            yield
        changed = [d for pair in zip(self._before, self._now(), strict=True) for d in differences(*pair)]
        lost = [str(d) for d in changed if d.is_in_place and d.tensor not in self._copies]
        lost += [f"{calls.found} was called"] if calls.found else []
        self._lost = lost[0] if lost else ""
        # Of what was not written to, nothing is to be put back.
        written = {d.tensor for d in changed}
        self._copies = {tensor: first for tensor, first in self._copies.items() if tensor in written}

    @contextmanager
    def as_first(self, refuse: Callable[[str], ApplyError]) -> Iterator[None]:
        """Restores what the first run found for a block, and what there is now afterwards.

        Raises:
            ApplyError: that cannot be done.
        """
        if self._lost:
            raise refuse(self._lost)
        now = self._now()
        # Tensors that may be referred to only by the state that is being replaced.
        kept = [tensor for snapshot in now for tensor in snapshot.in_graphs()]
        present = {tensor: (tensor._version, tensor.detach().clone()) for tensor in self._copies}
        _put(self._copies)
        for snapshot in self._before:
            restore(snapshot)
        try:
            yield
        finally:
            for snapshot in now:
                restore(snapshot)
            _put(present)
            kept.clear()

    def _now(self) -> list[Snapshot]:
        *_, of_functions = self._before
        return [*(state.snapshot(module) for state, module in self._regions), again(of_functions)]


class RegionStates:
    """Those of modules, by module."""

    def __init__(self) -> None:
        self._known: WeakTable[torch.nn.Module, RegionState] = WeakTable()

    def of(self, module: torch.nn.Module) -> RegionState:
        """That of a module."""
        return self._known.setdefault(module, RegionState())


def _modules_in(value: Any, depth: int) -> Iterator[torch.nn.Module]:
    """The modules that a function or its arguments hold."""
    if isinstance(value, torch.nn.Module):
        yield value
        return
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, list | tuple):
        held = list(value)
    elif isinstance(value, functools.partial):
        held = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        held = [value.__self__]
    elif isinstance(value, types.FunctionType):
        held = [*(value.__defaults__ or ()), *(each for cell in value.__closure__ or () for each in contents(cell))]
    else:
        return
    for each in held if depth else ():
        yield from _modules_in(each, depth - 1)


def _may_be_written(tensor: torch.Tensor) -> bool:
    # The code has run in the forward pass before, and what it writes to has a version by then.
    return (
        not isinstance(tensor, torch.nn.Parameter)
        and not tensor.requires_grad
        and not tensor.is_inference()
        and tensor.nbytes <= _LARGEST_COPIED_BYTES
        and (tensor._version > 0 or may_be_statistics(tensor))
    )


def _put(values: dict[torch.Tensor, tuple[int, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, (version, value) in values.items():
            tensor.copy_(value)
            SET_VERSIONS.value()((tensor,), (version,))

"""Functions of torch that the run of a proof meets: those that are followed as one operator, hooks on gradients, and questions about the graph."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.effects.dispatched import dispatched
from tightfit.effects.independence.row_flow import FakeRun, Flow
from tightfit.effects.independence.row_states import Mixed, at_line
from tightfit.effects.independence.rows import Mixes, RowLayout
from tightfit.effects.reads import is_called_by_library

# What code may ask about the place of a tensor in the graph and in the step; parts are made anew, and each finds the gradients of those before it.
_OF_THE_GRAPH: dict[Any, str] = {
    getattr(torch.Tensor, name).__get__: name
    for name in ("grad", "grad_fn", "is_leaf", "_version", "retains_grad", "output_nr")
}


class Functions(TorchFunctionMode):
    """Intercepts functions of torch whose operators cannot be followed one by one, and hooks on gradients."""

    def __init__(self, run: FakeRun, atoms: Mapping[Any, Callable[..., RowLayout | None]]) -> None:
        super().__init__()
        self._run = run
        self._atoms = atoms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = dispatched(func)
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("register_hook", "register_post_accumulate_grad_hook"):
            raise self._run.fail(f"registers a hook on a gradient{at_line()}")
        if func in _OF_THE_GRAPH and not (self._run._is_atom or is_called_by_library(sys._getframe())):
            raise self._run.fail(f"asks for {_OF_THE_GRAPH[func]} of a tensor, which differs for parts,{at_line()}")
        atom = self._atoms.get(func)
        if atom is None or self._run._is_atom:
            return func(*args, **kwargs)
        out = self._run.atom(func, args, kwargs)
        if isinstance(self._run, Flow):
            try:
                layout = atom(self._run, *args, **kwargs)
                if layout is not None:
                    self._run.rows.put(out, layout)
            except Mixes as error:
                self._run.rows.set(out, Mixed(reason=f"{func.__name__} {error}{at_line()}"))
        return out

"""The models and optimizers of a script that is guarded: those that it calls and makes, held weakly, and the one that a plan goes on."""

from collections.abc import Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.runtime.apply import session_on
from tightfit.techniques.session import Session
from tightfit.torch_hooks.weak_references import WeakTable


class ScriptModels:
    """What the script was seen to call and to make until now. `optimizers` are those that are alive."""

    def __init__(self) -> None:
        self._called: WeakTable[torch.nn.Module, None] = WeakTable()
        self._made: WeakTable[torch.optim.Optimizer, None] = WeakTable()
        self.optimizers: Sequence[torch.optim.Optimizer] = _Living(self._made)

    def called(self, model: torch.nn.Module) -> None:
        """The script calls a model."""
        self._called.setdefault(model, None)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """The script has made an optimizer."""
        self._made[optimizer] = None

    def all(self) -> list[torch.nn.Module]:
        """The models that were called."""
        return list(self._called)

    def planned(self) -> torch.nn.Module:
        """The model that a plan goes on: the one with most parameters that are trained.

        Raises:
            ApplyError: there is none yet.
        """
        model = self._largest()
        if model is None:
            raise ApplyError("no model with an optimizer was called yet")
        return model

    def session(self) -> Session | None:
        """That of the plan that the script began with; it may end before it has a model."""
        model = self._largest()
        return None if model is None else session_on(model)

    def optimizers_of_planned(self) -> list[torch.optim.Optimizer]:
        """Those that train parameters of the model that a plan goes on."""
        held = {id(parameter) for parameter in self.planned().parameters()}
        return [o for o in self._made if any(id(p) in held for group in o.param_groups for p in group["params"])]

    def _largest(self) -> torch.nn.Module | None:
        trained = {id(p) for o in self._made for group in o.param_groups for p in group["params"]}
        sizes = {model: sum(p.numel() for p in model.parameters() if id(p) in trained) for model in self._called}
        return max(sizes, key=lambda model: sizes[model]) if any(sizes.values()) else None


class _Living(Sequence[torch.optim.Optimizer]):
    """The optimizers of a program that are alive now."""

    def __init__(self, table: WeakTable[torch.optim.Optimizer, None]) -> None:
        self._table = table

    def __getitem__(self, index: Any) -> Any:
        return list(self._table)[index]

    def __len__(self) -> int:
        return len(self._table)

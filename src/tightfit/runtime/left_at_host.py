"""Leaves weights at the host that a plan streams from there, when a program moves its model to the card before the plan is put on it.

A model that is larger than the card can be moved by no other means. What is left is what the choices of the streaming techniques name; it stays a parameter on
the host until the plan is applied, which takes it from there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from tightfit.planner.plan import Choice
from tightfit.torch_hooks.moves import on_module_moves
from tightfit.torch_hooks.replaced import Leave

_FROZEN, _TRAINED = "weight_streaming", "trained_weight_streaming"


class LeftAtHost:
    """Leaves what `choices` stream; nothing where they do not."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._places = {
            place: int(choice.settings.get("smallest_bytes", 0)) for choice in choices for place in _places_of(choice)
        }

    def begin(self) -> Leave:
        """Moves are watched from now on, until the returned function is called.

        Raises:
            ApplyError: this torch has no such name.
        """
        return on_module_moves(self) if self._places else _nothing

    @contextmanager
    def around_move(self, module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Hides them from a move to the card."""
        hidden: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        try:
            for owner, name, parameter in self._named(module):
                if _moves_to_card(function, parameter):
                    hidden.append((owner, name, parameter))
                    owner._parameters[name] = None
            yield
        finally:
            for owner, name, parameter in hidden:
                owner._parameters[name] = parameter

    def _named(self, module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
        """The parameters of streamed blocks inside of `module` that are large enough, with the modules that hold them."""
        for where, smallest_bytes in self._places.items():
            block = _block_at(module, where)
            for owner in block.modules() if block is not None else ():
                for name, parameter in list(owner._parameters.items()):
                    if parameter is not None and parameter.nbytes >= smallest_bytes:
                        yield owner, name, parameter


def _places_of(choice: Choice) -> list[str]:
    if choice.technique == _TRAINED:
        return [f"{choice.where}.{path}" for path in choice.settings.get("blocks", ())]
    return [choice.where] if choice.technique == _FROZEN else []


def _nothing() -> None:
    """Nothing is watched."""


def _block_at(module: torch.nn.Module, where: str) -> torch.nn.Module | None:
    """The block at `where`, of which `module` is the root or a part: a model is often moved before it is wrapped."""
    parts = where.split(".")[1:]
    while any(part.isdigit() for part in parts):
        try:
            return module.get_submodule(".".join(parts))
        except AttributeError:
            del parts[0]
    return None


def _moves_to_card(function: Callable[[torch.Tensor], torch.Tensor], parameter: torch.Tensor) -> bool:
    """Whether `function` takes `parameter` to the card and changes nothing else."""
    if parameter.device.type != "cpu" or type(parameter.data) is not torch.Tensor:
        return False
    with torch.no_grad():
        moved = function(torch.empty(0, dtype=parameter.dtype, device="cpu"))
    return isinstance(moved, torch.Tensor) and moved.device.type == "cuda" and moved.dtype == parameter.dtype

"""Parameters whose gradients DistributedDataParallel averages over processes: by hooks in C++ on the nodes where they arrive, which no parameter shows."""

import gc
import weakref
from collections.abc import Iterable
from typing import final

import torch
from torch.nn.parallel import DistributedDataParallel

from tightfit.torch_hooks.calls import on_new_reducer


@final
class ReducedGradients:
    """Looks for the wrappers that there are, once, and hears of those that are made afterwards."""

    def __init__(self) -> None:
        # Of other objects not even the class may be asked for: proxies answer by code of the program's.
        made = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
        self._wrappers = [weakref.ref(each) for each in made] if _is_any_possible() else []
        on_new_reducer(self)

    def after_reducer_was_made(self, wrapper: torch.nn.Module) -> None:
        """As `tightfit.torch_hooks.calls.ReducerOwner`."""
        self._wrappers.append(weakref.ref(wrapper))

    def is_any_of(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is averaged."""
        living = [wrapper for each in self._wrappers if (wrapper := each()) is not None]
        if not living:
            return False
        averaged = {id(parameter) for wrapper in living for parameter in wrapper.parameters()}
        return any(id(parameter) in averaged for parameter in parameters)


def _is_any_possible() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

"""Whether states or parameters of an optimizer lie in the same memory: an update of one parameter is then seen by that of another, so their order is a part of the
result."""

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.optimizer.updates.optimizer_steps import overlap
from tightfit.torch_hooks.weak_references import WeakTable


class CommonMemory:
    """Asked at each step; what was looked at once is not looked at again while the states are the same tensors, and the parameters lie where they did."""

    def __init__(self) -> None:
        self._without: WeakTable[torch.optim.Optimizer, list[int]] = WeakTable()
        self._apart: WeakTable[torch.optim.Optimizer, list[int]] = WeakTable()

    def of_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether two parameters share a byte, as those of a group that was added later may."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = [0 if isinstance(p, FakeTensor) or p.layout != torch.strided else p.data_ptr() for p in parameters]
        if known == self._apart.get(optimizer):
            return False
        if overlap(parameters):
            return True
        self._apart[optimizer] = known
        return False

    def of_states(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether two states of this optimizer share a byte."""
        states = list(_states(optimizer))
        known = list(map(id, states))
        if known == self._without.get(optimizer):
            return False
        if overlap(states):
            return True
        self._without[optimizer] = known
        return False


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        if isinstance(state, dict):
            # Those that are elsewhere between the steps are no one else's.
            yield from (
                value
                for value in dict.values(state)
                if isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor)
            )

"""Optimizer states at the host that are shown as tensors of the card, as the streamed weights are that they belong to (`engine.zero_copy`).

For the program they are where they would be without a plan: it may reset, copy, load or draw random numbers for them beside tensors of the card.
What the processor updates are twins at the host over the same bytes.
"""

from typing import Any

import torch

from tightfit.engine.host_slab import HostSlab
from tightfit.engine.zero_copy import seen_from
from tightfit.techniques.optimizer.updates.optimizer_kernels import is_dense
from tightfit.torch_hooks.weak_references import WeakTable

# Memory for small states is registered with the driver in blocks of this size.
_BLOCK_BYTES = 64 << 20
# What is shown, with its twin at the host; of all sessions, for a program may load one optimizer's states into another without a copy.
_TWINS = WeakTable[torch.Tensor, torch.Tensor]()


class ShownStates:
    """States of parameters that are streamed to `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab: HostSlab | None = None
        self._updated = WeakTable[torch.Tensor, None]()

    def awaits_states(self, parameter: torch.Tensor, states: Any) -> bool:
        """Whether the next update of a parameter is its first and may make its states; some optimizers have none."""
        is_first = not states and parameter not in self._updated
        self._updated[parameter] = None
        return is_first

    def at_host(self, states: Any, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of a parameter for an update at the host: twins of what is shown, copies of what has been put there since (`load_state_dict`)."""
        found = dict(dict.items(states))
        for name, value in found.items():
            if isinstance(value, torch.Tensor):
                there = _twin_of(value)
                # Counters that a fused optimizer has loaded.
                moves = value.shape == parameter.shape or value.numel() == 1
                found[name] = there if there is not None else value.to("cpu") if moves else value
        return found

    def put(self, states: Any, updated: dict[str, Any], parameter: torch.Tensor) -> None:
        """Has `states` show what an update has left."""
        for name, value in updated.items():
            own = dict.get(states, name)
            if isinstance(own, torch.Tensor) and _TWINS.get(own) is value:
                continue
            is_shown = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.device.type == "cpu"
            states[name] = self._shown(value) if is_shown else value
        for name in [name for name in dict.keys(states) if name not in updated]:
            del states[name]

    def take_back(self, states: Any) -> None:
        """Leaves copies on the card."""
        for name, value in list(dict.items(states)):
            if isinstance(value, torch.Tensor) and _TWINS.get(value) is not None:
                states[name] = value.clone()

    def _shown(self, value: torch.Tensor) -> torch.Tensor:
        if not value.numel() or value.layout != torch.strided:
            return value
        memory = self._memory(value.numel() * value.element_size())
        seen = seen_from(self._device, memory)
        if seen is memory:
            return value
        dense = value if is_dense(value) else value.contiguous()
        shape, stride = dense.shape, dense.stride()
        twin = memory.view(value.dtype).as_strided(shape, stride)
        twin.copy_(dense)
        shown = seen.view(value.dtype).as_strided(shape, stride)
        _TWINS[shown] = twin
        return shown

    def _memory(self, num_bytes: int) -> torch.Tensor:
        if self._slab is None or self._slab.free_bytes < num_bytes:
            self._slab = HostSlab(max(num_bytes, _BLOCK_BYTES if num_bytes < _BLOCK_BYTES else 0), self._device)
        return self._slab.take(num_bytes).with_storage()


def _twin_of(shown: torch.Tensor) -> torch.Tensor | None:
    """Its twin, if it still is what it was made as: a program may have given it other data since."""
    twin = _TWINS.get(shown)
    if twin is None or (twin.data_ptr(), twin.shape, twin.stride()) != (shown.data_ptr(), shown.shape, shown.stride()):
        return None
    return twin

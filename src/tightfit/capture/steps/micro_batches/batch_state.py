"""All that a model's call can read besides its arguments, and whether it is as it was: attributes, globals, random states (`tightfit.effects.state`).

A snapshot keeps the tensors of a model alive. Where a model keeps others than its weights and buffers on the card, or puts others in their place, the
tape must have them freed when it drops them, so that such a model is left alone.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from tightfit.capture.dispatch.values.known_values import KnownValues
from tightfit.effects.state import DRAWN, RegionState, Snapshot, StateDifference, differences


class BatchState:
    """The state of `module`, which is passed with each call and not kept."""

    def __init__(self, known_values: KnownValues) -> None:
        self._known_values = known_values
        self._region = RegionState()
        self._tensors = frozenset[int]()
        self._is_left_alone = False

    def begin_step(self, module: torch.nn.Module) -> None:
        """The first call of a step comes, which is not looked at."""
        self._tensors = _tensors(module)

    def snapshot(self, module: torch.nn.Module) -> Snapshot | None:
        """The state now; None for a model that is left alone."""
        self._is_left_alone |= _tensors(module) != self._tensors
        if self._is_left_alone:
            return None
        found = self._region.snapshot(module, is_kept=True)
        self._is_left_alone = any(isinstance(t, FakeTensor) and id(t) not in self._tensors for t in found.reach.tensors)
        if self._is_left_alone:
            self.forget()
            return None
        return found

    def forget(self) -> None:
        """Keeps nothing of the model alive."""
        self._region = RegionState()

    def has_changed(self, module: torch.nn.Module, before: Snapshot) -> bool:
        """Whether anything has since a snapshot."""
        if self._region.is_still(before):
            return False
        has_changed = bool(differences(before, self._region.snapshot(module, is_kept=True)))
        if has_changed:
            # Nothing that the model keeps is to live longer than without a look at it.
            self.forget()
        return has_changed

    def is_same(self, module: torch.nn.Module, then: Snapshot) -> bool:
        """Whether the model would find what it has found then, but for values that the card has."""
        if self._is_left_alone or _tensors(module) != self._tensors:
            return False
        if self._region.is_still(then):
            return True
        return all(map(self._is_unknown, differences(then, self._region.snapshot(module, is_kept=True))))

    def _is_unknown(self, difference: StateDifference) -> bool:
        """Whether nothing that runs can tell: random states that are not drawn from, and values of large tensors on the card."""
        tensor = difference.tensor
        if tensor is None:
            return difference.what == DRAWN
        is_on_card = isinstance(tensor, FakeTensor) and tensor.is_cuda
        return difference.what == "was written to" and is_on_card and not self._known_values.known(tensor)

    def randomness(self) -> bytes:
        """The states of torch's generator for the host, by which layers are dropped, and of the card's."""
        with torch._C._DisableTorchDispatch():
            return (
                torch.default_generator.get_state().numpy().tobytes()
                + self._known_values.random_state.numpy().tobytes()
            )


def _tensors(module: torch.nn.Module) -> frozenset[int]:
    """The weights and buffers of a model, and their storages, by identity."""
    tensors = [*module.parameters(), *module.buffers()]
    return frozenset(map(id, tensors)) | {
        t.untyped_storage()._cdata for t in tensors if not is_lazy(t) and t.layout == torch.strided
    }

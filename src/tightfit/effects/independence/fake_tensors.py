"""Tensors without data, which a proof runs on in place of those that the program has."""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tightfit.effects.independence.row_states import key_of
from tightfit.effects.state import moved_weights


class FakeTensors:
    """Those of one run of a proof on `device`, the card, if there is one.

    Weights that are brought there for the blocks that use them are taken to be there: a proof runs without what brings them.
    """

    def __init__(self, fake: FakeTensorMode, device: torch.device | None) -> None:
        self._fake = fake
        self._device = device
        self._away = {key_of(p) for p in moved_weights() if device is not None and p.device.type != device.type}
        # By the number of the tensor, which is kept with its fake one.
        self._known: dict[int, tuple[torch.Tensor, FakeTensor]] = {}

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """What FakeTensorMode makes of a tensor with data anyway; but it finds what it knows of an operator only where all arguments are fake."""
        is_away = self.are_any_away([tensor])
        if isinstance(tensor, FakeTensor) and not is_away:
            return tensor
        # Detached: what is converted is asked for its gradient as well, which is the program's own matter, or one of ours that nobody may read.
        known = self._known.get(id(tensor))
        if known is None:
            made = self._on(self._device, tensor) if is_away else self._made(tensor.detach())
            known = self._known[id(tensor)] = (tensor, made)
        return known[1]

    def are_any_away(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of these is, or is a view of, a weight that is at the host now."""
        return bool(self._away) and any(t.layout == torch.strided and key_of(t) in self._away for t in tensors)

    def _made(self, tensor: torch.Tensor) -> FakeTensor:
        is_plain_layout = not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_plain_layout:
            # `from_tensor` makes the same, but imports torch's compiler to name where the tensor comes from: two to three seconds in each process.
            return self._on(tensor.device, tensor)
        return self._fake.from_tensor(tensor)

    def _on(self, device: torch.device | None, tensor: torch.Tensor) -> FakeTensor:
        with self._fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        assert isinstance(made, FakeTensor)
        return made

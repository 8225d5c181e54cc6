"""Memory of tensors, as it was, and whether it was written to since: through torch, `.data`, numpy or an address. It is referred to weakly."""

import weakref

import torch

from tightfit.effects.values.contents import StoredAt, checksum_of


class WrittenSince:
    """The memory of the tensors that are added. What lies on a card is not read: of it only writes that torch counts are seen."""

    def __init__(self) -> None:
        self._versions: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._stored: list[tuple[StoredAt, int]] = []
        self._borrowed: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor as it is now."""
        # A view counts with the tensor that it was taken from, and is often gone sooner.
        whole = tensor if tensor._base is None else tensor._base
        if not whole.is_inference():
            self._versions.append((weakref.ref(whole), whole._version))
        if (checksum := checksum_of(tensor)) is None:
            return
        self._stored.append((StoredAt(tensor), checksum))
        # The memory of an array of numpy's outlives the storage that torch has made of it.
        if not tensor.untyped_storage().resizable():
            self._borrowed.append(tensor)

    def is_any_written(self) -> bool:
        """Whether one that is still there was written to."""
        living = ((tensor, version) for reference, version in self._versions if (tensor := reference()) is not None)
        return any(tensor._version != version for tensor, version in living) or any(
            (now := place.checksum()) is not None and now != before for place, before in self._stored
        )

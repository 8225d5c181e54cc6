"""The data of a parameter that are exchanged for other ones of the same values: their form, and how often the parameter was written to meanwhile."""

import torch


class ParameterData:
    """The data of `parameter`, a strided view of a storage of its own. `is_at_host`: its bytes are at the host already.

    Writes are counted by the parameter's versions, which other data may have others of.
    """

    def __init__(self, parameter: torch.Tensor, *, is_at_host: bool) -> None:
        self.parameter = parameter
        self._dtype, self._shape, self._stride = parameter.dtype, parameter.shape, parameter.stride()
        self._offset = parameter.storage_offset()
        self._num_writes, self._base = 0, parameter._version
        # The writes up to which the bytes on the card and at the host are equal.
        self._writes_there = 0 if is_at_host else -1

    @property
    def num_writes(self) -> int:
        """How often it was written to, as far as versions say."""
        return self._num_writes + self.parameter._version - self._base

    @property
    def was_written(self) -> bool:
        """Whether it was written to since its bytes on the card and at the host were equal."""
        return self.num_writes != self._writes_there

    def are_copied(self) -> None:
        """The bytes at the host are copied to the card as they are now."""
        self._writes_there = self.num_writes

    def exchange(self, data: torch.Tensor) -> None:
        """Sets other data, of the same values."""
        self._num_writes = self.num_writes
        self.parameter.data = data
        self._base = self.parameter._version

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of all bytes of its storage."""
        elements = whole.view(self._dtype)
        # Offsets are those in the storage, and a part of the slab has one of its own.
        return elements.as_strided(self._shape, self._stride, elements.storage_offset() + self._offset)

    def are(self, data: torch.Tensor) -> bool:
        """Whether the parameter has these data, and not what the program has set since (another dtype, another device)."""
        return _place(self.parameter) == _place(data)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which bytes a tensor is, and as what."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype

"""Sees writes past autograd to what the program was given: through `.data`, numpy or an address, which change no version."""

from collections.abc import Iterable

import torch

from tightfit.effects.values.contents import content_of


class WrittenPast:
    """Of tensors whose memory a plain graph would have saved: a plain backward pass reads what was written there. Those on a card are not read, and not kept."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Kept: the program may have dropped them, and what its loss has saved of them is freed before this is asked. An alias has the same count of versions.
        self._known = [
            (tensor.detach(), content, tensor._version)
            for tensor in tensors
            if (content := content_of(tensor)) is not None
        ]

    def is_any(self) -> bool:
        """Whether one is written so. A write that autograd knows of is no matter: it goes on with another tensor, or is an error by itself."""
        return any(
            alias._version == version and content_of(alias) != content for alias, content, version in self._known
        )

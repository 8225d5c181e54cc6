"""Compares what a second run of a region saves for backward with what the first run saved, tensor by tensor, in every step.

A backward pass goes through the graph of the first run, with its scalars, hooks and `ctx` objects; all that the second run contributes are the saved
tensors. So where each of these has the bits that it had, the gradients are those of the plain run, whatever the region's code has read in between: a
file, a queue, the clock, a library's state. At the host each tensor is read whole, at the speed of memory (`effects.contents`). On a card the words
of the last ones, which are made of those before, are summed there, and the sums compared before the optimizer's step (`effects.card_sums`).

What the program itself still holds of them when the second run begins (an activation that a module keeps) may have been written to past torch: the
plain run would use what is there now, and the second run makes it anew. Their memory is read once more then.
"""

import sys
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.effects import card_sums
from tightfit.effects.asked_of_saved import question_of
from tightfit.effects.contents import StoredAt, checksum_of
from tightfit.effects.reads import line_of_code
from tightfit.torch_hooks.manifest import TOP_SAVED_HOOKS
from tightfit.torch_hooks.saving_functions import saving_function

# Libraries of recurrent layers save memory of their own behind their results (tools/autograd/derivatives.yaml: `mkldnn_rnn_layer`, `_cudnn_rnn`), of which they do not
# write all: its bytes differ between two runs whose results are the same.
_WORKSPACES_BEHIND = frozenset({"MkldnnRnnLayerBackward0", "CudnnRnnBackward0"})
# Only what torch's own layers save there: bytes that a program saves behind such a result (a mask for its backward pass) are its own.
_RECURRENT_LAYERS = torch.nn.modules.rnn.__file__
# Attention saves the seed and the offset of its random numbers, which its kernels do not write where there is no dropout
# (aten/src/ATen/native/transformers/cuda/attention.cu).
_NUM_SEEDS = 2
_OF_SEEDS = (torch.int64, torch.uint64)
# On a card, where each look is a kernel of its own: what comes last is made of what comes before it.
_NUM_SUMMED = 4
_UNKNOWN = 1 << 40
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Saved:
    """One tensor that the first run has saved: `checksum` of its bits, None if it could not be read at once; on a card the `total` of its words.
    `place` is where it lies, for what an operator has made.
    """

    __slots__ = ("_packed", "checksum", "place", "total")

    def __init__(self, checksum: int | None, total: torch.Tensor | None, place: StoredAt | None, packed: Any) -> None:
        self.checksum = checksum
        self.total = total
        self.place = place
        # A checkpoint has an object of its own for each, which goes with the node.
        self._packed = weakref.ref(packed)

    @property
    def is_needed(self) -> bool:
        """Whether a node of the graph still has it."""
        return self._packed() is not None


class SavedValues:
    """What the first run of one call has saved, in order. `weights` are the tensors, by `id`, whose contents are compared elsewhere; of the `num_expected` tensors
    that the last call has saved the last ones are summed on a card; none with 0."""

    def __init__(self, weights: Container[int] = (), num_expected: int = 0) -> None:
        self._weights = weights
        self._num_expected = num_expected
        self._saved: list[_Saved | None] = []
        self.question = ""
        """Where the backward pass of a function asks what a saved tensor is, besides its values (`effects.asked_of_saved`)."""

    def __len__(self) -> int:
        return len(self._saved)

    @contextmanager
    def of_first_run(self) -> Iterator[None]:
        """Notes what is saved inside; the hooks of the checkpoint around it see it as before."""
        hooks: Hooks | None = TOP_SAVED_HOOKS.call(False)
        if hooks is None:
            yield
            return
        pack, unpack = hooks
        last = ""

        def noted(tensor: torch.Tensor) -> Any:
            nonlocal last
            caller = sys._getframe().f_back
            function = saving_function()
            self.question = self.question or question_of(function)
            is_on_card = tensor.device.type in card_sums.DEVICE_TYPES
            num_before = self._num_expected - _NUM_SUMMED - len(self._saved) if self._num_expected else _UNKNOWN
            # The name of what is not summed counts only for the tensor right behind it.
            if is_on_card and num_before > 1:
                self._saved.append(None)
                return pack(tensor)
            behind, last = last, "" if tensor.grad_fn is None else tensor.grad_fn.name()
            if is_on_card and num_before > 0:
                self._saved.append(None)
                return pack(tensor)
            is_unwritten = (
                tensor.dtype == torch.uint8
                and behind in _WORKSPACES_BEHIND
                and caller is not None
                and caller.f_code.co_filename == _RECURRENT_LAYERS
            ) or (is_on_card and function is None and tensor.numel() <= _NUM_SEEDS and tensor.dtype in _OF_SEEDS)
            checksum = None if is_unwritten else self._checksum(tensor)
            total = card_sums.sum_on_card(tensor) if is_on_card and checksum is None and not is_unwritten else None
            whole = tensor if tensor._base is None else tensor._base
            place = None if checksum is None or whole.grad_fn is None else StoredAt(tensor)
            packed = pack(tensor)
            self._saved.append(_Saved(checksum, total, place, packed))
            return packed

        with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
            yield

    @contextmanager
    def of_later_run(self) -> Iterator["SavedValueMismatch"]:
        """Compares what is saved inside with the first run's; the first difference is in what is yielded."""
        found = SavedValueMismatch()
        hooks: Hooks | None = TOP_SAVED_HOOKS.call(False)
        if hooks is None:
            yield found
            return
        pack, unpack = hooks
        waiting = iter(self._saved)

        def compared(tensor: torch.Tensor) -> Any:
            first = next(waiting, None)
            if first is not None and not found.words and first.checksum is not None and first.is_needed:
                checksum = self._checksum(tensor)
                if checksum is not None and checksum != first.checksum:
                    found.note(tensor)
            elif first is not None and first.total is not None and first.is_needed:
                found.compare(first.total, tensor)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(compared, unpack):
            yield found

    def _checksum(self, tensor: torch.Tensor) -> int | None:
        whole = tensor if tensor._base is None else tensor._base
        if whole.requires_grad and id(whole) in self._weights:
            return hash((id(whole), tensor.storage_offset(), tensor.stride()))
        return checksum_of(tensor)

    def is_any_written(self) -> bool:
        """Whether a result that the first run has saved, and that the program still holds, has other values now."""
        for saved in self._saved:
            if saved is not None and saved.place is not None and saved.is_needed:
                now = saved.place.checksum()
                if now is not None and now != saved.checksum:
                    return True
        return False


class SavedValueMismatch:
    """The first saved tensor of a later run that is not that of the first one: `words` say which, and are empty if there is none."""

    def __init__(self) -> None:
        self.words = ""
        self.sums: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        """On a card: the sum of the first run, that of the later one, and the words if they differ."""

    def compare(self, first: torch.Tensor, tensor: torch.Tensor) -> None:
        """`tensor` is to have the sum `first`."""
        again = card_sums.sum_on_card(tensor)
        if again is not None and again.device == first.device:
            self.sums.append((first, again, _other_values(tensor)))

    def note(self, tensor: torch.Tensor) -> None:
        """`tensor` differs."""
        line = line_of_code()
        at = f" at {line}" if line else ""
        self.words = _other_values(tensor) + at


def _other_values(tensor: torch.Tensor) -> str:
    return f"saved other values for its backward pass ({tuple(tensor.shape)}, {tensor.dtype})"

"""What the first run of a call saves for backward, tensor by tensor, and what a second run of it saves in its place, which is compared in every step.

A backward pass goes through the graph of the first run, with its scalars, hooks and `ctx` objects; all that the second run contributes are the saved
tensors. So where each of these has the bits that it had, the gradients are those of the plain run, whatever the region's code has read in between: a
file, a queue, the clock, a library's state. At the host each tensor is read whole, at the speed of memory (`effects.contents`). On a card the words
of the last ones, which are made of those before, are summed there, and the sums compared before the optimizer's step (`effects.card_sums`).

What the program itself still holds of them when the second run begins (an activation that a module keeps) may have been written to past torch: the
plain run would use what is there now, and the second run makes it anew. Their memory is read once more then.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Container

import torch
from torch.utils.checkpoint import _StopRecomputationError

from tightfit.effects.bytecode.asked_of_saved import question_of
from tightfit.effects.reads import line_of_code
from tightfit.effects.values import card_sums
from tightfit.effects.values.contents import StoredAt, checksum_of
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


class SavedTensor:
    """What a node of the graph has in the place of one tensor that the first run has saved; it goes with the node.

    `checksum` is that of its bits, None if it could not be read at once; on a card `total` are the sums of its words, in the layout of `stride`. `stored_at` is where it lies, for what an operator has
    made. `again` are the tensors of second runs that are not taken yet, by the backward passes that they are for.
    """

    __slots__ = ("__weakref__", "_dtype", "_shape", "again", "checksum", "device", "stored_at", "stride", "total")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.checksum: int | None = None
        self.total: torch.Tensor | None = None
        self.stride: tuple[int, ...] = ()
        self.stored_at: StoredAt | None = None
        self.again: dict[int, torch.Tensor] = {}

    def is_alike(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the shape, dtype and device of this one."""
        return tensor.shape == self._shape and tensor.dtype == self._dtype and tensor.device == self.device


class SavedValues:
    """What the first run of one call has saved, in order. `weights` are the tensors, by `id`, whose contents are compared elsewhere; of the `num_expected` tensors
    that the last call has saved the last ones are summed on a card; none with 0. Without `has_values`, on the virtual GPU, there is nothing to compare."""

    def __init__(self, weights: Container[int] = (), num_expected: int = 0, *, has_values: bool = True) -> None:
        self._weights = weights
        # From which on they are summed, and of how many before that the name counts.
        self._num_before = max(0, num_expected - _NUM_SUMMED) if num_expected else _UNKNOWN
        self._has_values = has_values
        self.saved: list[weakref.ref[SavedTensor]] = []
        self.is_complete = False
        """Whether the first run is over; a backward pass may begin within it."""
        self.question = ""
        """Where the backward pass of a function asks what a saved tensor is, besides its values (`effects.asked_of_saved`)."""
        self._last = ""
        self._is_any_stored = False

    def __len__(self) -> int:
        return len(self.saved)

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Notes a tensor that the first run saves: a hook for saved tensors."""
        saved = SavedTensor(tensor)
        number = len(self.saved)
        self.saved.append(weakref.ref(saved))
        if not self._has_values:
            return saved
        caller = sys._getframe().f_back
        function = saving_function()
        if function is not None:
            self.question = self.question or question_of(function)
        is_on_card = saved.device.type in card_sums.DEVICE_TYPES
        # The name of what is not summed counts only for the tensor right behind it.
        if is_on_card and number < self._num_before - 1:
            return saved
        behind, self._last = self._last, "" if tensor.grad_fn is None else tensor.grad_fn.name()
        if is_on_card and number < self._num_before:
            return saved
        is_unwritten = (
            tensor.dtype == torch.uint8
            and behind in _WORKSPACES_BEHIND
            and caller is not None
            and caller.f_code.co_filename == _RECURRENT_LAYERS
        ) or (is_on_card and function is None and tensor.numel() <= _NUM_SEEDS and tensor.dtype in _OF_SEEDS)
        if is_unwritten:
            return saved
        saved.checksum = self.checksum(tensor)
        if saved.checksum is None:
            saved.total = card_sums.sums_on_card(tensor) if is_on_card else None
            saved.stride = tensor.stride() if saved.total is not None else ()
        elif (tensor if tensor._base is None else tensor._base).grad_fn is not None:
            saved.stored_at = StoredAt(tensor)
            self._is_any_stored = True
        return saved

    def checksum(self, tensor: torch.Tensor) -> int | None:
        """The checksum of a tensor that is read at once; of a view of a weight what view it is."""
        whole = tensor if tensor._base is None else tensor._base
        if whole.requires_grad and id(whole) in self._weights:
            # A compressed sparse one has no places in memory.
            view = (tensor.storage_offset(), tensor.stride()) if tensor.layout is torch.strided else ()
            return hash((id(whole), *view))
        return checksum_of(tensor)

    def forget(self, task: int) -> None:
        """Drops what a later run has made for a backward pass and nobody has taken."""
        for saved in [reference() for reference in self.saved]:
            if saved is not None:
                saved.again.pop(task, None)

    def forget_after(self, task: int) -> None:
        """The same at the end of the backward pass that runs: of one that needs no gradient of some nodes there is something left, and a graph may be gone through
        for each row of a Jacobian matrix."""
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self.forget, task))

    def is_any_written(self) -> bool:
        """Whether a result that the first run has saved, and that the program still holds, has other values now."""
        for saved in [reference() for reference in self.saved] if self._is_any_stored else ():
            if saved is not None and saved.stored_at is not None:
                now = saved.stored_at.checksum()
                if now is not None and now != saved.checksum:
                    return True
        return False


class LaterRun:
    """One more run of the call that has saved `first`: what it saves is given to those of the first run that are still needed, for the backward pass with the
    number `task`. `stops_early` ends it with the last one; otherwise `at_last` is called there."""

    def __init__(
        self, first: SavedValues, task: int, *, stops_early: bool, at_last: Callable[[], None] | None = None
    ) -> None:
        self._first = first
        self._task = task
        self._stops_early = stops_early
        self._at_last = at_last
        self._number = 0
        self.is_stopped = False
        self.is_alike = True
        """Whether what was saved had the shapes, dtypes and devices of the first run's."""
        self.words = ""
        """Which saved tensor is the first that is not that of the first run; empty if there is none."""
        self.sums: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        """On a card: the sum of the first run, that of the later one, and the words if they differ."""

    @property
    def is_whole(self) -> bool:
        """Whether as many tensors were saved as in the first run; one that has not ended yet is gone through as far as it is."""
        return self._number == len(self._first) or not self._first.is_complete

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes a tensor that the run saves: a hook for saved tensors."""
        saved = tensor.detach() if tensor.requires_grad else tensor
        number, all_saved = self._number, self._first.saved
        self._number += 1
        if number >= len(all_saved):
            return saved
        # Not that of a node that the backward pass is through with.
        first = all_saved[number]()
        if first is not None:
            self.is_alike &= first.is_alike(tensor)
            if first.checksum is not None and not self.words:
                checksum = self._first.checksum(tensor)
                if checksum is not None and checksum != first.checksum:
                    line = line_of_code()
                    self.words = _other_values(tensor) + (f" at {line}" if line else "")
            elif first.total is not None:
                total = card_sums.sums_on_card(tensor)
                # Sums know the places of words in memory, which another layout changes.
                if total is not None and total.device == first.total.device and tensor.stride() == first.stride:
                    self.sums.append((first.total, total, _other_values(tensor)))
            first.again[self._task] = saved
        if self._number == len(all_saved):
            if self._stops_early:
                self.is_stopped = True
                raise _StopRecomputationError
            if self._at_last is not None:
                self._at_last()
        return saved


def _other_values(tensor: torch.Tensor) -> str:
    return f"saved other values for its backward pass ({tuple(tensor.shape)}, {tensor.dtype})"

"""Detects what the program changes between the forward and the backward pass, of all that a plain backward pass would read then.

The backward pass of each part has run within the forward. A plain one reads what its graph has saved when it runs, and with it what was written there
meanwhile past autograd (through `.data`, numpy, an address): buffers, frozen weights, class weights, constants, results that the program keeps. Checkpoints
of the program's run code again, which reads attributes and globals too.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.effects.values.contents import contents_of, is_any_written
from tightfit.effects.values.value_checks import checksum
from tightfit.techniques.lazy_tensors.code_in_graphs import CodeInGraph
from tightfit.techniques.lazy_tensors.saved_and_shared import saved_and_shared, unpack_hooks
from tightfit.techniques.lazy_tensors.written_since import WrittenSince
from tightfit.torch_hooks.backward import nodes_behind

# The node of a re-entrant checkpoint.
_REENTRANT = "CheckpointFunctionBackward"


class SavedByParts:
    """What the graphs of parts have saved, and something outside of them may write to. It refers to it weakly."""

    def __init__(self) -> None:
        self._constants: dict[int, weakref.ref[torch.Tensor]] = {}
        self._written = WrittenSince()
        self.runs_again = False
        """Whether code is run again, by a checkpoint of the program's or by a plan's, or what is saved is behind hooks."""

    def add(self, loss: torch.Tensor, model: torch.nn.Module, known: Sequence[torch.Tensor]) -> None:
        """Adds what the graph of a part's loss has saved besides `known`, before its backward pass frees it."""
        nodes = list(nodes_behind([loss]))
        for tensor in saved_and_shared(nodes, known):
            # A result is saved as another tensor with its memory, which goes with the graph; anything else as it is.
            self._constants[id(tensor)] = weakref.ref(tensor)
            self._written.add(tensor)
        code = CodeInGraph()
        for node in nodes:
            code.reason_of_hooks(node)
            # What is saved behind hooks, of our own recomputation too, is not looked at: all that the model can reach is.
            is_hidden = any(True for _ in unpack_hooks(node)) or type(node).__name__ == _REENTRANT
            self.runs_again = self.runs_again or is_hidden
        self.runs_again = self.runs_again or bool(code.checkpoints())
        if self.runs_again:
            left_out = {id(tensor) for tensor in known}
            of_model = (*model.parameters(), *model.buffers())
            self._constants |= {id(tensor): weakref.ref(tensor) for tensor in of_model if id(tensor) not in left_out}

    def constants(self) -> list[torch.Tensor]:
        """The tensors that are still there."""
        return [tensor for reference in self._constants.values() if (tensor := reference()) is not None]

    def is_any_written(self) -> bool:
        """Whether memory that a part has saved, and that is still there, was written to since."""
        return self._written.is_any_written()


class Unchanged:
    """Checks that weights, the batch and what parts have saved are unchanged when the loss's backward pass runs: by address, version and values.

    Values on a card are read with `has_checksum` alone, as they are waited for. It refers to them weakly: a batch that was freed cannot be changed.
    `state` is set to what says which else of the model's state has changed.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        batch: Sequence[torch.Tensor],
        saved: SavedByParts,
        *,
        has_checksum: bool,
    ) -> None:
        self._saved = saved
        self.state: Callable[[], str] | None = None
        constants = saved.constants()
        tensors = [*weights, *batch, *constants]
        self._names = [
            *("a weight was changed" for _ in weights),
            *("the batch was overwritten" for _ in batch),
            *("a tensor saved for the backward pass was modified" for _ in constants),
        ]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._places = [_place(tensor) for tensor in tensors]
        self._contents = contents_of(tensors)
        self._checksums = [checksum([tensor]) for tensor in tensors] if has_checksum else None

    def what_changed(self) -> str:
        """The change in words; empty if there is none."""
        for number, reference in enumerate(self._tensors):
            tensor = reference()
            if tensor is None:
                continue
            is_same = _place(tensor) == self._places[number] and (
                self._checksums is None or checksum([tensor]) == self._checksums[number]
            )
            if not is_same or is_any_written([self._contents[number]], [tensor]):
                return self._names[number]
        if self._saved.is_any_written():
            return "a tensor saved for the backward pass was modified"
        return "" if self.state is None else self.state()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    version = -1 if tensor.is_inference() else tensor._version
    return (0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()), version

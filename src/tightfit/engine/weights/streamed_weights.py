"""Brings the weights of blocks to the card when they are used, one block ahead, and drops them afterwards.

Uses are places in the program: a block's forward begins, the backward pass comes to its outputs. Which use follows which is taken from the order of the
blocks first, and from what was seen since; the following block comes while a block computes. Where another one follows than was expected, it is brought
when it is needed. So the memory that is held does not depend on how fast the copies are.
"""

import enum
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.engine.copy_engines import CopyEngine, copies_for
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.host_slab import HostSlab, Part, unregister_gone
from tightfit.engine.weights.streamed_gradient import StreamedGradient
from tightfit.engine.weights.streamed_weight import Residence, StreamedWeight
from tightfit.engine.weights.weights_in_files import PartOfFile, WeightFiles
from tightfit.errors import ApplyError


class Pass(enum.Enum):
    """What uses a block: a forward pass with gradients, one without, a backward pass, or a forward pass inside of that."""

    FORWARD = enum.auto()
    ALONE = enum.auto()
    BACKWARD = enum.auto()
    AGAIN = enum.auto()


Use = tuple[Pass, int]
# What is learned of the order. Between a forward and a backward pass, and after either, nothing is on the card or on its way: whatever the program does
# there to weights, also without a version that would tell (`weight.data`), it does to those at the host.
_MAY_FOLLOW = {
    Pass.FORWARD: (Pass.FORWARD,),
    Pass.ALONE: (Pass.ALONE,),
    Pass.BACKWARD: (Pass.BACKWARD, Pass.AGAIN),
    Pass.AGAIN: (Pass.BACKWARD, Pass.AGAIN),
}


class StreamedBlock:
    """A block with its weights, the `number`-th in the order of a forward pass; one without weights only counts for the order."""

    def __init__(self, number: int, weights: Sequence[StreamedWeight]) -> None:
        self.number = number
        self.weights = list(weights)
        self.num_calls = 0
        """How many calls of it are under way."""


class SavedWeight:
    """What autograd holds in place of a tensor of a streamed weight that it saves: a view of the weight's bytes, and how often it was written to."""

    __slots__ = ("dtype", "is_parameter", "num_writes", "offset", "shape", "stride", "weight")

    def __init__(self, weight: StreamedWeight, tensor: torch.Tensor) -> None:
        self.weight = weight
        self.num_writes = weight.num_writes
        # Of a leaf itself autograd uses the data that it has in the backward pass, of a view of it those that it had.
        self.is_parameter = tensor is weight.parameter
        self.dtype, self.shape, self.stride, self.offset = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )

    def tensor(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor; `whole` has the weight's bytes on the card.

        Raises:
            RuntimeError: it was written to since, as autograd has it (torch/csrc/autograd/saved_variable.cpp).
        """
        if self.weight.num_writes != self.num_writes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {tuple(self.weight.parameter.shape)} that was saved for the backward pass"
            )
        usable = whole[: len(whole) // self.dtype.itemsize * self.dtype.itemsize]
        return usable.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class StreamedWeights:
    """The weights of blocks of one model. `statistics` counts what is moved; `when_unchanged` is called with a weight that is about to leave the card
    without having been written to."""

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        statistics: Counter[str],
        disk: DiskSpace | None = None,
        when_unchanged: Callable[[StreamedWeight], object] = lambda _: None,
    ) -> None:
        self.slab = HostSlab(host_bytes, device)
        self.device = device
        link = copies_for(device)
        self._copies: CopyEngine = link
        self.files: WeightFiles | None = None
        """For blocks whose weights are on disk."""
        if disk is not None:
            slab, self._copies = disk.opened(device, link)
            self.files = WeightFiles(slab, self._copies)
        self._statistics = statistics
        self._when_unchanged = when_unchanged
        self._blocks: list[StreamedBlock] = []
        self._following: dict[Use, Use] = {}
        self._last: Use | None = None
        self._leaving: list[StreamedGradient] = []
        # The backward pass runs in threads of autograd's own.
        self._lock = threading.RLock()

    def add(
        self, parameters: Sequence[torch.Tensor], *, with_gradients: bool = False, on_disk: bool = False
    ) -> StreamedBlock:
        """A block with these parameters, each alone in its storage, on the card or at the host; they leave the card at once, to the host or to be `on_disk`. Their
        gradients too, as they are made, if they are trained: `with_gradients`.

        Raises:
            ApplyError: the disk fails.
        """
        with self._lock:
            weights = [StreamedWeight(p, self._part_for(p, on_disk=on_disk), self.device) for p in parameters]
            block = StreamedBlock(len(self._blocks), weights)
            self._blocks.append(block)
            self._expect_in_order(block.number)
            for weight in weights:
                if with_gradients and weight.parameter.requires_grad:
                    weight.gradient = StreamedGradient(weight.parameter, weight.num_bytes, self.slab, self.device)
                    self._begin_to_leave(weight.gradient)
                weight.leave(self._copies)
            self._gradients_leave()
            return block

    def _part_for(self, parameter: torch.Tensor, *, on_disk: bool) -> Part | PartOfFile:
        if not on_disk:
            return self.slab.take(parameter.untyped_storage().nbytes())
        assert self.files is not None
        return self.files.part_of(parameter)

    def _expect_in_order(self, number: int) -> None:
        if number:
            for kind in (Pass.FORWARD, Pass.ALONE):
                self._following[kind, number - 1] = kind, number
            self._following[Pass.BACKWARD, number] = Pass.BACKWARD, number - 1

    @contextmanager
    def call(self, block: StreamedBlock, kind: Pass) -> Iterator[None]:
        """Runs a call of `block` with its weights on the card."""
        with self._lock:
            block.num_calls += 1
        try:
            self.use(block, kind)
            yield
        finally:
            with self._lock:
                block.num_calls -= 1
                self._after_call(block, kind)

    def use(self, block: StreamedBlock, kind: Pass) -> None:
        """Has the weights of `block` on the card for what is computed from now on, and begins to bring those of the block that follows."""
        use = (kind, block.number)
        with self._lock:
            # Where the program has set other data (another dtype, another device), that is the weight from now on.
            block.weights = [weight for weight in block.weights if weight.is_ours()]
            # Those of the block before have had the time of this one's.
            self._gradients_leave()
            self._learn(use)
            following = self._following.get(use)
            ahead = block if following is None else self._blocks[following[1]]
            self._drop_all_but((block, ahead))
            for weight in (*block.weights, *ahead.weights):
                if weight.residence is Residence.HOST:
                    self._fetch(weight)
            for weight in block.weights:
                self._have(weight)
                if kind in (Pass.BACKWARD, Pass.AGAIN):
                    self._have_gradient(weight)

    def _learn(self, use: Use) -> None:
        last, self._last = self._last, use
        if last is None or use[0] not in _MAY_FOLLOW[last[0]]:
            return
        # A forward pass that begins anew is not waited for: the program may do anything before.
        is_new_pass = use[0] is last[0] and use[0] in (Pass.FORWARD, Pass.ALONE) and use[1] < last[1]
        if not is_new_pass:
            self._following[last] = use

    def end_pass(self) -> None:
        """A backward pass is over: what it needed is dropped."""
        with self._lock:
            self._last = None
            self._drop_all_but(())
            self._gradients_leave()

    def stay(self, block: StreamedBlock) -> None:
        """Brings the weights of `block` to the card for good."""
        with self._lock:
            self._gradients_leave()
            for weight in block.weights:
                self._have(weight)
                self._have_gradient(weight)
            block.weights.clear()

    def end(self) -> None:
        """Brings all weights back for good.

        Raises:
            ApplyError: some cannot be read back from disk; all others are on the card.
        """
        failure: ApplyError | None = None
        with self._lock:
            for block in self._blocks:
                block.weights = [weight for weight in block.weights if weight.is_ours()]
                try:
                    self.stay(block)
                except ApplyError as error:
                    failure = failure or error
                except RuntimeError:
                    # The link has failed, say; the weights are at the host all the same.
                    for weight in block.weights:
                        if weight.residence is not Residence.CARD:
                            weight.bring_alone()
                    block.weights.clear()
        unregister_gone()
        close_gone()
        if failure is not None:
            raise failure

    def saved(self, block: StreamedBlock, tensor: torch.Tensor) -> SavedWeight | None:
        """What to save in place of `tensor`; None where it is not of a weight of `block`. The block is being called."""
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        weight = next((w for w in block.weights if w.residence is Residence.CARD and w.key == key), None)
        return None if weight is None else SavedWeight(weight, tensor)

    def restored(self, saved: SavedWeight) -> torch.Tensor:
        """The tensor that was saved.

        Raises:
            RuntimeError: it was written to since.
        """
        with self._lock:
            weight = saved.weight
            if not weight.is_ours():
                # The program has set other data since.
                return weight.parameter.data if saved.is_parameter else saved.tensor(weight.copied(self._copies))
            self._have(weight)
            self._have_gradient(weight)
            return saved.tensor(weight.on_card)

    def _after_call(self, block: StreamedBlock, kind: Pass) -> None:
        # What runs again in a backward pass is used there next.
        if block.num_calls or kind is Pass.AGAIN:
            return
        following = self._following.get((kind, block.number))
        self._drop_all_but(() if following is None else (self._blocks[following[1]],))

    def _drop_all_but(self, kept: Collection[StreamedBlock]) -> None:
        for block in self._blocks:
            if block not in kept and not block.num_calls:
                # A forward may have set other data as well.
                block.weights = [weight for weight in block.weights if weight.is_ours()]
                for weight in block.weights:
                    self._drop(weight)

    def _drop(self, weight: StreamedWeight) -> None:
        if weight.residence is Residence.COMING:
            weight.forget_copy(self._copies)
        if weight.residence is Residence.CARD:
            if not weight.was_written:
                self._when_unchanged(weight)
            if weight.gradient is not None:
                self._begin_to_leave(weight.gradient)
            if weight.leave(self._copies):
                self._statistics["weight bytes to the host"] += weight.num_bytes

    def _begin_to_leave(self, gradient: StreamedGradient) -> None:
        gradient.begin_to_leave(self._copies)
        if gradient.is_leaving:
            self._leaving.append(gradient)

    def _gradients_leave(self) -> None:
        """Frees the memory on the card of gradients whose copies have begun."""
        leaving, self._leaving = self._leaving, []
        for gradient in leaving:
            self._statistics["gradient bytes to the host"] += gradient.leave(self._copies)

    def _have_gradient(self, weight: StreamedWeight) -> None:
        if weight.gradient is not None:
            moved = weight.gradient.come(self._copies)
            if moved:
                self._statistics["gradient bytes to the card"] += moved

    def _fetch(self, weight: StreamedWeight) -> None:
        weight.fetch(self._copies)
        self._statistics["weight bytes to the card"] += weight.num_bytes

    def _have(self, weight: StreamedWeight) -> None:
        if weight.residence is Residence.HOST:
            self._fetch(weight)
        if weight.residence is Residence.COMING:
            weight.arrive(self._copies)

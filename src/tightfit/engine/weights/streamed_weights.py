"""Brings the weights of blocks to the card when they are used, one block ahead, and drops them afterwards.

Uses are places in the program: a block's forward begins, the backward pass comes to its outputs. Which use follows which is taken from the order of the
blocks first, and from what was seen since; the following block comes while a block computes. Where another one follows than was expected, it is brought
when it is needed. So the memory that is held does not depend on how fast the copies are.
"""

import dataclasses
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.values.fingerprints import paused
from tightfit.engine.copy_engines import CopyEngine, copies_for
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.host_slab import HostSlab, Part, unregister_gone
from tightfit.engine.weights.not_in_forks import forget_those_elsewhere
from tightfit.engine.weights.streamed_gradient import StreamedGradient
from tightfit.engine.weights.streamed_weight import Residence, StreamedWeight
from tightfit.engine.weights.trained_files import TrainedFiles
from tightfit.engine.weights.use_order import Pass, UseOrder
from tightfit.engine.weights.weight_traffic import WeightTraffic
from tightfit.engine.weights.weights_in_files import PartOfFile, WeightFiles
from tightfit.errors import ApplyError
from tightfit.torch_hooks.manifest import NEGATED_VIEW
from tightfit.torch_hooks.selections import outside_of_selection


class StreamedBlock:
    """A block with its weights, the `number`-th in the order of a forward pass; one without weights only counts for the order."""

    def __init__(self, number: int, weights: Sequence[StreamedWeight]) -> None:
        self.number = number
        self.weights = list(weights)
        for weight in weights:
            weight.block = number
        self.num_calls = 0
        """How many calls of it are under way."""

    def saved(self, tensor: torch.Tensor) -> "SavedWeight | None":
        """What to save in place of `tensor` while the block is being called; None where it is not of one of its weights."""
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        for weight in self.weights:
            if weight.residence is Residence.CARD and weight.on_card.whole.untyped_storage()._cdata == key:
                return SavedWeight(weight, tensor)
        return None


class SavedWeight:
    """What autograd holds in place of a tensor of a streamed weight that it saves: a view of the weight's bytes, and how often it was written to."""

    __slots__ = (
        "dtype",
        "is_conjugated",
        "is_negated",
        "is_parameter",
        "num_writes",
        "offset",
        "shape",
        "stride",
        "weight",
    )

    def __init__(self, weight: StreamedWeight, tensor: torch.Tensor) -> None:
        self.weight = weight
        self.num_writes = weight.data.num_writes
        # Of a leaf itself autograd uses the data that it has in the backward pass, of a view of it those that it had.
        self.is_parameter = tensor is weight.parameter
        self.dtype, self.shape, self.stride, self.offset = (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
        # Lazily, by a bit of the tensor: its bytes are those of the weight.
        self.is_conjugated, self.is_negated = tensor.is_conj(), tensor.is_neg()

    def tensor(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor; `whole` has the weight's bytes on the card.

        Raises:
            RuntimeError: it was written to since, as autograd has it (torch/csrc/autograd/saved_variable.cpp).
        """
        if self.weight.data.num_writes != self.num_writes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {tuple(self.weight.parameter.shape)} that was saved for the backward pass"
            )
        usable = whole[: len(whole) // self.dtype.itemsize * self.dtype.itemsize]
        view = usable.view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        view = view.conj() if self.is_conjugated else view
        return NEGATED_VIEW.call(view) if self.is_negated else view


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """The bytes at the host of a parameter, and of its gradient where that is there, as tensors of the host."""

    weight: torch.Tensor
    gradient: torch.Tensor | None


class StreamedWeights:
    """The weights of blocks of one model. `statistics` counts what is moved; `when_unchanged` is called with a weight that is about to leave the card
    without having been written to, `when_viewed` with one of which the program holds a view that misses its writes."""

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        statistics: Counter[str],
        disk: DiskSpace | None = None,
        are_trained: bool = False,
        when_unchanged: Callable[[StreamedWeight], object] = lambda _: None,
        when_viewed: Callable[[StreamedWeight], object] = lambda _: None,
    ) -> None:
        self._when_viewed = when_viewed
        self.slab = HostSlab(host_bytes, device)
        self.device = device
        link = copies_for(device)
        copies: CopyEngine = link
        self.files: WeightFiles | TrainedFiles | None = None
        """For blocks whose weights are on disk; which `are_trained` there, or not."""
        if disk is not None:
            slab, copies = disk.opened(device, link)
            self.files = TrainedFiles(slab, copies, disk.on_failure) if are_trained else WeightFiles(slab, copies)
        self._traffic = WeightTraffic(copies, statistics, when_unchanged)
        self._blocks: list[StreamedBlock] = []
        # The numbers of those with weights that are on the card or coming: a use of one block does not look at all others.
        self._blocks_here: set[int] = set()
        self._order = UseOrder()
        # Whether something was used since a pass was over last.
        self._is_used = False
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
        assert self.files is not None or not on_disk
        with self._lock:
            weights = [
                StreamedWeight(p, _part_for(p, self.slab, self.files if on_disk else None), self.device)
                for p in parameters
            ]
            if isinstance(self.files, TrainedFiles) and on_disk:
                self.files.have(weights)
            block = StreamedBlock(len(self._blocks), weights)
            self._blocks.append(block)
            self._order.expect(block.number)
            for weight in weights:
                if with_gradients and weight.parameter.requires_grad:
                    weight.gradient = StreamedGradient(
                        weight.parameter, weight.num_bytes, self.slab, self.device, is_shown=not on_disk
                    )
                    self._traffic.begin_to_leave(weight.gradient)
                weight.leave(self._traffic.copies)
            self._traffic.gradients_leave()
            return block

    @contextmanager
    def call(self, block: StreamedBlock, kind: Pass) -> Iterator[None]:
        """Runs a call of `block` with its weights on the card."""
        with self._lock:
            block.num_calls += 1
        try:
            with _unseen():
                self.use(block, kind)
            yield
        finally:
            with self._lock, _unseen():
                block.num_calls -= 1
                # What runs again in a backward pass is used there next.
                if not block.num_calls and kind is not Pass.AGAIN:
                    following = self._order.block_after((kind, block.number))
                    self._drop_all_but(() if following is None else (self._blocks[following],))

    def use(self, block: StreamedBlock, kind: Pass) -> None:
        """Has the weights of `block` on the card for what is computed from now on, and begins to bring those of the block that follows."""
        use = (kind, block.number)
        spends(HostWork.STREAMED_CALL)
        spends(HostWork.STREAMED_PARAMETER, len(block.weights))
        with self._lock:
            self._is_used = True
            # Those of the block before have had the time of this one's.
            self._traffic.gradients_leave()
            self._order.learn(use)
            following = self._order.block_after(use)
            ahead = block if following is None else self._blocks[following]
            for each in (block, ahead):
                # Where the program has set other data (another dtype, another device), that is the weight from now on.
                each.weights = [weight for weight in each.weights if weight.is_ours()]
            self._drop_all_but((block, ahead))
            self._blocks_here |= {block.number, ahead.number}
            for weight in (*block.weights, *ahead.weights):
                if weight.residence is Residence.HOST:
                    self._traffic.fetch(weight)
            for weight in block.weights:
                self._traffic.have(weight)
                if kind in (Pass.BACKWARD, Pass.AGAIN):
                    self._traffic.have_gradient(weight)

    def twins(self) -> dict[torch.Tensor, Twin]:
        """What is at the host of the parameters that are away and shown as tensors of the card."""
        with self._lock:
            weights = [weight for block in self._blocks for weight in block.weights if weight.is_ours()]
            return {
                weight.parameter: Twin(
                    weight=twin, gradient=None if weight.gradient is None else weight.gradient.twin()
                )
                for weight in weights
                if (twin := weight.twin()) is not None
            }

    def end_pass(self) -> None:
        """A backward pass is over: what it needed is dropped."""
        with self._lock:
            # Each block that the pass has come to asks for it.
            if not self._is_used:
                return
            self._is_used = False
            self._order.end_pass()
            for block in self._blocks:
                # The program may have set other data for weights that were away.
                block.weights = [weight for weight in block.weights if weight.is_ours()]
            self._drop_all_but(())
            self._traffic.gradients_leave()

    def check_views(self, block: StreamedBlock | None = None) -> None:
        """Calls `when_viewed` with a weight of `block` of which the program holds a view that has missed a write; without one, with any of which it holds a view
        on the card: all are about to be updated at the host."""
        with self._lock:
            for each in self._blocks if block is None else (block,):
                for weight in each.weights:
                    if weight.left.is_held(unless_written=None if block is None else weight.data.num_writes):
                        self._when_viewed(weight)

    def stay(self, block: StreamedBlock) -> bool:
        """Brings the weights of `block` to the card for good; whether the program holds views of them at the host, which are copies from now on."""
        is_viewed = False
        with self._lock:
            self._traffic.gradients_leave()
            for weight in block.weights:
                self._traffic.have(weight)
                self._traffic.have_gradient(weight)
                weight.is_streamed = False
                is_viewed |= _keep_views(weight, self._traffic.copies, self.device)
            block.weights.clear()
        return is_viewed

    def end(self) -> None:
        """Brings all weights back for good.

        Raises:
            ApplyError: some cannot be read back from disk; all others are on the card.
        """
        failure: ApplyError | None = None
        is_viewed = False
        with self._lock:
            for block in self._blocks:
                block.weights = [weight for weight in block.weights if weight.is_ours()]
                try:
                    is_viewed |= self.stay(block)
                except ApplyError as error:
                    failure = failure or error
                except RuntimeError:
                    # The link has failed, say; the weights are at the host all the same.
                    for weight in block.weights:
                        if weight.residence is not Residence.CARD:
                            weight.bring_alone()
                        weight.is_streamed = False
                        is_viewed |= weight.has_view_at_host()
                    block.weights.clear()
        forget_those_elsewhere()
        unregister_gone()
        close_gone()
        if failure is not None:
            raise failure
        if is_viewed:
            warnings.warn(
                "the program holds views of weights or gradients, taken while those were at the host: as streaming has ended, they are copies from now on",
                stacklevel=2,
            )

    def restored(self, saved: SavedWeight) -> torch.Tensor:
        """The tensor that was saved.

        Raises:
            RuntimeError: it was written to since.
        """
        with self._lock:
            weight = saved.weight
            if not weight.is_ours():
                # The program has set other data since.
                return (
                    weight.parameter.data
                    if saved.is_parameter
                    else saved.tensor(weight.on_card.copied(self._traffic.copies))
                )
            if weight not in self._blocks[weight.block].weights:
                # The program had set other data, and has set those again: they stay where they are, as nothing would take them there.
                return saved.tensor(weight.on_card.copied(self._traffic.copies))
            self._is_used = True
            self._blocks_here.add(weight.block)
            self._traffic.have(weight)
            self._traffic.have_gradient(weight)
            return saved.tensor(weight.on_card.whole)

    def _drop_all_but(self, kept: Collection[StreamedBlock]) -> None:
        for number in sorted(self._blocks_here):
            block = self._blocks[number]
            if block not in kept and not block.num_calls:
                # A forward may have set other data as well.
                block.weights = [weight for weight in block.weights if weight.is_ours()]
                for weight in block.weights:
                    self._traffic.drop(weight)
                self._blocks_here.discard(number)


@contextmanager
def _unseen() -> Iterator[None]:
    """Moves weights and gradients outside of what counts the operators of a block, in one run of which other ones are moved than in the other."""
    with paused(), outside_of_selection():
        yield


def _part_for(parameter: torch.Tensor, slab: HostSlab, files: WeightFiles | TrainedFiles | None) -> Part | PartOfFile:
    """Where the bytes of a parameter are while it is away: in host memory, or in `files`."""
    return slab.take(parameter.untyped_storage().nbytes()) if files is None else files.part_of(parameter)


def _keep_views(weight: StreamedWeight, copies: CopyEngine, device: torch.device) -> bool:
    """Leaves a weight and its gradient where the program has views of them, if that is no worse; whether there are views that are lost."""
    viewed = [each for each in (weight, weight.gradient) if each is not None and each.has_view_at_host()]
    if device.type != "cpu":
        return bool(viewed)
    for each in viewed:
        each.return_to_host(copies)
    return False

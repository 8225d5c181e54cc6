"""The gradient of a weight that is at the host: it is there too while no backward pass needs it.

It leaves the card once its block's part of the backward pass is over, beside what follows; `p.grad` is the same tensor all the time, and its `data` is
switched when the copy is over. Where a backward pass adds to it, it comes back first, so that what is added, and in which order, is as without it.
A gradient that something else refers to (a flat buffer, a hook that keeps it), or that has a graph of its own, stays where it is.
"""

import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.patches import gradients_of_data
from tightfit.capture.processes.process_role import is_simulated
from tightfit.effects.values.contents import checksum_of
from tightfit.engine.copy_engines import CopyEngine, Ticket
from tightfit.engine.host_slab import HostSlab, host_bytes
from tightfit.engine.zero_copy import at_host as bytes_there
from tightfit.engine.zero_copy import seen_from
from tightfit.errors import ApplyError
from tightfit.torch_hooks.manifest import STORAGE_USES, TENSOR_USES
from tightfit.torch_hooks.weak_references import WeakTable

if TYPE_CHECKING:
    from collections.abc import Sequence

_USES = 2
"""The gradient, and the name of its storage that is looked at."""
_HANDLES = 2
"""In C++: the parameter's and Python's. What exports the gradient without a copy (DLPack) is one more."""
_USES_OF_OURS = 2
"""The tensor that is kept here, and that name."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Home:
    """Where a gradient lay at the host before it came to the card, with the checksum of what it was, where something else refers to that memory."""

    at_host: torch.Tensor
    checksum: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Leaving:
    """A gradient that is being copied to `at_host`, as it was at `version`."""

    gradient: torch.Tensor
    version: int
    at_host: torch.Tensor
    ticket: Ticket


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetAside:
    """A gradient that is not its parameter's at the time, and its memory at the host; or none."""

    gradient: torch.Tensor | None = None
    away: torch.Tensor | None = None


_STREAMED: "WeakTable[torch.Tensor, weakref.ref[StreamedGradient]]" = WeakTable()


def streamed_gradient_of(parameter: torch.Tensor) -> "StreamedGradient | None":
    """What has the gradient of a parameter at the host; None where it is on the card."""
    found = _STREAMED.get(parameter)
    return None if found is None else found()


class StreamedGradient:
    """The gradient of `parameter`, of at most `num_bytes`, which are taken from `slab`; `is_shown` as a tensor of the card, where its weight is."""

    def __init__(
        self, parameter: torch.Tensor, num_bytes: int, slab: HostSlab, device: torch.device, *, is_shown: bool = True
    ) -> None:
        self._parameter = parameter
        self._device = device
        self._seen_from = device if is_shown else torch.device("cpu")
        self._part = slab.take(num_bytes)
        # Whether the program still holds the last gradient is asked of its storage.
        self._memory = seen_from(self._seen_from, self._part.with_storage())
        # For the gradient of a pass that is made beside the parameter's own: pinning memory anew for each pass takes longer than the pass.
        self._beside: torch.Tensor | None = None
        self._is_aside = False
        self._away: torch.Tensor | None = None
        self._leaving: _Leaving | None = None
        # A gradient that backward passes add to returns to where it lay: what the program has of it (a view, an array) is of that memory.
        self._homes = WeakTable[torch.Tensor, _Home]()
        _STREAMED[parameter] = weakref.ref(self)

    @property
    def is_leaving(self) -> bool:
        """Whether a copy to the host is under way."""
        return self._leaving is not None

    def begin_to_leave(self, copies: CopyEngine) -> None:
        """Begins to copy it to the host, where there is one that can be moved; its memory on the card is kept until `leave`."""
        gradient = self._parameter.grad
        if gradient is None or self._leaving is not None or self._is_away(gradient) or not _is_movable(gradient):
            return
        # What refers to one that returns refers to where it lay.
        if self._homes.get(gradient) is None and TENSOR_USES.call(gradient) != _HANDLES:
            return
        # In an evaluation in inference mode too: what leaves there is the gradient of steps after it.
        with torch.inference_mode(False), torch.no_grad():
            at_host = self._memory_for(gradient)
            ticket = copies.begin(_bytes_of(gradient), bytes_there(_bytes_of(at_host)), to_host=True)
        self._leaving = _Leaving(gradient=gradient, version=gradient._version, at_host=at_host, ticket=ticket)

    def leave(self, copies: CopyEngine) -> int:
        """Waits for the copy, and gives the memory on the card back; the bytes that have been moved."""
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return 0
        copies.finish(leaving.ticket)
        gradient = _gradient_of(self._parameter)
        if gradient is not leaving.gradient or gradient._version != leaving.version:
            # Written to, or replaced, since.
            self.begin_to_leave(copies)
            return self.leave(copies)
        _switch(self._parameter, gradient, leaving.at_host)
        self._away = leaving.at_host
        return gradient.nbytes

    def come(self, copies: CopyEngine) -> int:
        """Has it on the card, for what is computed from now on; the bytes that have been moved."""
        moved = self.leave(copies)
        gradient = _gradient_of(self._parameter)
        if gradient is None or not self._is_away(gradient):
            return moved
        with torch.inference_mode(False), torch.no_grad():
            on_card = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device=self._device)
            ticket = copies.begin(bytes_there(_bytes_of(gradient)), _bytes_of(on_card), to_host=False)
            # What is at the host may be written to again as soon as this returns.
            copies.finish(ticket)
            copies.wait(ticket)
        at_host = self._away
        assert at_host is not None
        _switch(self._parameter, gradient, on_card)
        self._away = None
        self._homes[gradient] = _Home(
            at_host=at_host, checksum=_checksum(at_host) if _is_held(at_host, self._memory) else None
        )
        return moved + gradient.nbytes

    def exchange(self, other: "SetAside") -> "SetAside":
        """Puts another gradient in the place of the parameter's; the one that was there. No copy may be under way."""
        before = SetAside(gradient=self._parameter.grad, away=self._away)
        self._is_aside = before.gradient is not None and other.gradient is None
        self._parameter.grad, self._away = other.gradient, other.away
        return before

    def twin(self) -> torch.Tensor | None:
        """Its bytes at the host as a tensor there, where it is away."""
        gradient = _gradient_of(self._parameter)
        if gradient is None or not self._is_away(gradient):
            return None
        return _shaped(bytes_there(_bytes_of(gradient)), gradient.dtype, gradient.shape, gradient.stride())

    def has_view_at_host(self) -> bool:
        """Whether the program holds something that lies where this gradient has come from."""
        gradient = _gradient_of(self._parameter)
        home = None if gradient is None else self._homes.get(gradient)
        return home is not None and home.checksum is not None

    def return_to_host(self, copies: CopyEngine) -> None:
        """Goes back to where it has come from, for good."""
        self.begin_to_leave(copies)
        self.leave(copies)

    def _is_away(self, gradient: torch.Tensor) -> bool:
        away = self._away
        return away is not None and away.untyped_storage()._cdata == gradient.untyped_storage()._cdata

    def _memory_for(self, gradient: torch.Tensor) -> torch.Tensor:
        """Memory at the host that nobody refers to, as the gradient lies in its own."""
        self._away = None
        home = self._homes.get(gradient)
        if home is not None and (home.at_host.shape, home.at_host.stride()) == (gradient.shape, gradient.stride()):
            if home.checksum is not None and _checksum(home.at_host) != home.checksum:
                raise ApplyError(
                    "a gradient was written to through a view of it while a backward pass added to it on the card; leave trained_weight_streaming out"
                )
            return home.at_host
        num_bytes = gradient.untyped_storage().nbytes()
        memory = next((each for each in (self._memory, self._beside) if _is_free(each, num_bytes)), None)
        if memory is None:
            is_pinned = self._device.type == "cuda" and not is_simulated()
            memory = seen_from(self._seen_from, host_bytes(num_bytes, is_pinned=is_pinned))
            if self._is_aside:
                self._beside = memory
        return _shaped(memory[:num_bytes], gradient.dtype, gradient.shape, gradient.stride())


def _is_free(memory: torch.Tensor | None, num_bytes: int) -> bool:
    """Whether nobody refers to memory of ours that is large enough."""
    if memory is None or num_bytes > len(memory):
        return False
    return is_simulated() or STORAGE_USES.call(memory.untyped_storage()._cdata) == _USES_OF_OURS


def _is_held(at_host: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the program has something that lies at the host where a gradient has just left, which may be `memory`, its own."""
    if is_simulated():
        return False
    storage = at_host.untyped_storage()
    ours = _USES_OF_OURS + (storage._cdata == memory.untyped_storage()._cdata)
    return STORAGE_USES.call(storage._cdata) > ours


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = parameter.grad
    # A virtual parameter has none on another device than its own.
    return gradients_of_data.elsewhere(parameter) if gradient is None else gradient


def _switch(parameter: torch.Tensor, gradient: torch.Tensor, data: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(gradient, FakeTensor) or isinstance(data, FakeTensor):
            # The parameter would not know of other contents that its gradient is given.
            gradients_of_data.replace(parameter, data)
        else:
            gradient.data = data


def _shaped(memory: torch.Tensor, dtype: torch.dtype, shape: "Sequence[int]", stride: "Sequence[int]") -> torch.Tensor:
    return memory.view(dtype).as_strided(shape, stride)


def _checksum(at_host: torch.Tensor) -> int | None:
    if at_host.device.type == "cuda":
        # Kernels may still write there.
        torch.cuda.current_stream(at_host.device).synchronize()
    return checksum_of(bytes_there(_bytes_of(at_host)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def _is_movable(gradient: torch.Tensor) -> bool:
    """Whether it is one storage of its own, all of it, that nothing else refers to."""
    if type(gradient) not in _PLAIN or gradient.layout != torch.strided or gradient.requires_grad:
        return False
    if gradient.storage_offset() or not gradient.numel() or gradient.is_conj() or gradient.is_neg():
        return False
    storage = gradient.untyped_storage()
    is_whole = storage.nbytes() == gradient.numel() * gradient.element_size()
    return is_whole and storage.resizable() and STORAGE_USES.call(storage._cdata) == _USES

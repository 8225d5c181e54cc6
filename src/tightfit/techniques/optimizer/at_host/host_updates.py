"""Updates parameters on the host, where their optimizer states are: gradients go there, and new weights come back.

The optimizer's own fused implementation for the host (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and beside it) works on the states in the slab and
on a second copy of the weight beside them. That copy is used again as long as the weight on the card has the bits that it was given: sums over rows and
columns of its bits say so (at the host a checksum), since a write through `.data` changes no version.
"""

import dataclasses
import itertools
import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.values.contents import checksum_of
from tightfit.engine.copy_engines import CopyEngine, Ticket
from tightfit.engine.host_slab import HostSlab, Part
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.lazy_tensors.unchanged import INTEGERS
from tightfit.techniques.optimizer.at_host.host_codec import AtHost, flat_bytes
from tightfit.techniques.optimizer.at_host.offloaded_updates import HOST_AHEAD
from tightfit.techniques.optimizer.states.quantized_states import EncodedState
from tightfit.techniques.optimizer.updates.common_memory import CommonMemory
from tightfit.techniques.optimizer.updates.optimizer_kernels import goes_wrong_at_host, is_dense
from tightfit.techniques.optimizer.updates.optimizer_steps import beside, step_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_LARGEST_SUMMED = 4
# The implementation on the host; it takes no flags that are for a card.
_FLAGS = {"fused": True, "foreach": False, "capturable": False}


@dataclasses.dataclass(slots=True, kw_only=True)
class _HostWeight:
    """The copy of a weight at the host, and the sums of the bits that the weight on the card has had since."""

    part: Part
    sums: "_Sums | None" = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A parameter whose gradient is on its way to the host, and its weight, where that has changed."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    tickets: tuple[Ticket, ...]


@final
class HostUpdates:
    """The updates of `optimizer` on the host; buffers are parts of `slab`, and `copies` are those of the states, which are over before later ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, slab: HostSlab, copies: CopyEngine) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._step = step_of(optimizer)
        self._slab = slab
        self._copies = copies
        self._weights: dict[torch.Tensor, _HostWeight] = {}
        self._common_memory = CommonMemory()
        self._gradients: list[Part] = []
        """Used in turn: that of the present update, and those that come."""

    def taken(self, parameters: Iterable[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> list[torch.Tensor]:
        """Those that can be updated on the host: whose states are there, and that lie in memory as these and their gradients do."""
        optimizer = self._live()
        # A fused optimizer unscales gradients itself, by scales on the card.
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return []
        # Each has a copy of its own at the host.
        if self._common_memory.of_parameters(optimizer):
            return []
        taken = [
            p
            for p in parameters
            if not goes_wrong_at_host(optimizer, p.dtype)
            and _can_be_updated(p, optimizer.state.get(p, {}), optimizer.param_groups[groups[p]])
        ]
        for parameter in list(self._weights):
            if parameter not in groups:
                del self._weights[parameter]
        return taken

    def update(self, parameters: Sequence[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> None:
        """Updates them in order; when this returns, what is computed from then on sees the new weights."""
        if not parameters:
            return
        spends(HostWork.OFFLOADED_PARAMETER, len(parameters))
        self._forget_changed(parameters)
        self._make_room(max(parameter.nbytes for parameter in parameters))
        left, under_way, uploads = deque(enumerate(parameters)), deque[_Coming](), list[Ticket]()
        # Updated at the host, and not yet on its way to the card.
        updated: list[torch.Tensor] = []
        try:
            while left or under_way:
                while left and len(under_way) <= HOST_AHEAD:
                    under_way.append(self._begin(*left.popleft()))
                coming = under_way.popleft()
                for ticket in coming.tickets:
                    self._copies.finish(ticket)
                self._update(coming, groups[coming.parameter])
                updated.append(coming.parameter)
                uploads.append(self._upload(coming.parameter))
                updated.clear()
        finally:
            for parameter in updated:
                # Its states are those of after the update: so is to be the weight.
                _write(parameter, self._weights[parameter].part)
            for ticket in itertools.chain.from_iterable(coming.tickets for coming in under_way):
                self._copies.finish(ticket)
            for ticket in uploads:
                self._copies.wait(ticket)
        for parameter in parameters:
            self._weights[parameter].sums = _sums(parameter)

    def _live(self) -> torch.optim.Optimizer:
        live = self._optimizer()
        assert live is not None
        return live

    def _forget_changed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Forgets the copies of weights that the program has written to since their last update."""
        known = [
            (p, kept)
            for p in parameters
            if (kept := self._weights.get(p)) is not None and not isinstance(p, FakeTensor)
        ]
        flags = []
        for parameter, kept in known:
            # Taken as changed until the step is over: one that is cut short has updated no one knows which.
            sums, kept.sums = kept.sums, None
            flags.append(_is_other(parameter, sums))
        if flags:
            for (parameter, _), is_other in zip(known, torch.stack(flags).tolist(), strict=True):
                if is_other:
                    del self._weights[parameter]

    def _make_room(self, num_bytes: int) -> None:
        if not self._gradients or len(self._gradients[0].bytes) < num_bytes:
            self._gradients.clear()
            self._gradients += [self._slab.take(num_bytes) for _ in range(1 + HOST_AHEAD)]

    def _begin(self, number: int, parameter: torch.Tensor) -> _Coming:
        assert parameter.grad is not None
        gradient = flat_bytes(parameter.grad.detach())
        # The update that had it before is over.
        part = self._gradients[number % len(self._gradients)]
        at_host = part.bytes[: len(gradient)]
        tickets = [self._copies.begin(gradient, at_host, to_host=True, held=(part,))]
        if parameter not in self._weights:
            weight = flat_bytes(parameter.detach())
            kept = self._weights[parameter] = _HostWeight(part=self._slab.take(len(weight)))
            tickets.append(self._copies.begin(weight, kept.part.bytes, to_host=True, held=(kept.part,)))
        return _Coming(parameter=parameter, gradient=at_host, tickets=tuple(tickets))

    def _update(self, coming: _Coming, group: int) -> None:
        optimizer, parameter = self._live(), coming.parameter
        weight = self._weights[parameter].part.bytes.view(parameter.dtype)
        weight.grad = coming.gradient.view(parameter.dtype)
        own = optimizer.state[parameter]
        states = {name: _at_host(value) for name, value in dict.items(own)}
        given = {name: value for name, value in optimizer.param_groups[group].items() if name != "params"}
        flags = {name: value for name, value in _FLAGS.items() if name in given}
        self._step(beside(optimizer, [{**given, **flags, "params": [weight]}], {weight: states}))
        for name, value in dict.items(own):
            # Step counters of a fused optimizer are on the card.
            if isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and value.device.type != "cpu":
                value.copy_(states[name])

    def _upload(self, parameter: torch.Tensor) -> Ticket:
        part = self._weights[parameter].part
        return self._copies.begin(part.bytes, flat_bytes(parameter.detach()), to_host=False, held=(part,))


def _write(parameter: torch.Tensor, part: Part) -> None:
    with torch.no_grad():
        flat_bytes(parameter.detach()).copy_(part.bytes)


def _can_be_updated(parameter: torch.Tensor, states: dict[str, Any], group: Mapping[str, Any]) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided or "fused" not in group or group.get("capturable"):
        return False
    if not parameter.is_floating_point() or gradient.dtype != parameter.dtype:
        return False
    if type(gradient) not in _PLAIN or type(parameter) not in _PLAIN:
        return False
    if not is_dense(parameter) or gradient.stride() != parameter.stride():
        return False
    if any(isinstance(value, torch.Tensor) for value in group.values()):
        return False
    large = [
        value for value in dict.values(states) if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    return bool(large) and all(_lies_alike(value, parameter) for value in large)


def _lies_alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    if not isinstance(value, LazyTensor) or value.dtype != parameter.dtype:
        return False
    source = value.source
    encoded = source.encoded if isinstance(source, EncodedState) else None
    return isinstance(encoded, AtHost) and encoded.stride == parameter.stride()


def _at_host(value: Any) -> Any:
    """A state as the update on the host sees it: flat, in the order of memory, as weight and gradient are."""
    if isinstance(value, LazyTensor):
        source: Any = value.source
        return source.encoded.part.bytes.view(value.dtype)
    return value.cpu() if isinstance(value, torch.Tensor) else value


_Sums = tuple[torch.Tensor, torch.Tensor] | int


def _sums(parameter: torch.Tensor) -> _Sums:
    """The sums of the bits over the rows and over the columns of a dense tensor in the order of memory, int64: exact in any order, and other ones where
    two elements have changed places. Of a tensor that is at the host itself the checksum.
    """
    checksum = checksum_of(parameter)
    if checksum is not None:
        return checksum
    with torch.no_grad():
        flat = flat_bytes(parameter.detach())
        # Not of 64 bits: their sums wrap around, and the signs of two numbers would cancel.
        bits = flat.view(INTEGERS[min(parameter.element_size(), _LARGEST_SUMMED)])
        matrix = bits.view(-1, _row_length(len(bits)))
        return matrix.sum(0, dtype=torch.int64), matrix.sum(1, dtype=torch.int64)


def _is_other(parameter: torch.Tensor, sums: _Sums | None) -> torch.Tensor:
    """Whether these are not the sums of a parameter, as a tensor on its device."""
    now = _sums(parameter)
    if isinstance(now, int) or not isinstance(sums, tuple):
        return torch.tensor(not isinstance(now, int) or now != sums, device=parameter.device)
    if any(one.shape != other.shape for one, other in zip(now, sums, strict=True)):
        return torch.ones((), dtype=torch.bool, device=parameter.device)
    return torch.stack([(one != other).any() for one, other in zip(now, sums, strict=True)]).any()


def _row_length(numel: int) -> int:
    """A divisor near the root: so the sums take little memory."""
    return next(length for length in range(math.isqrt(numel), 0, -1) if numel % length == 0)

"""What a rank receives, as far as it is taken to be known: gathered from values that are known, or a message of a peer that is taken to send what was sent to it."""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.collectives import gathered_values
from tightfit.capture.collectives.arguments import Collective
from tightfit.capture.dispatch.values.known_values import Unknown, limit
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.tape import CollectiveKind


class ReceivedValues:
    """The values that collectives of the traced rank bring."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._last_sent: dict[tuple[str, int], list[torch.Tensor]] = {}  # by group and receiver

    def note(self, call: Collective) -> None:
        """Writes what is received, where it is known."""
        gpu = self._gpu
        found = None
        if call.kind is CollectiveKind.RECEIVE:
            found = self._message(call)
        with contextlib.suppress(Unknown):
            sent = [gpu.known_values.values(t) if isinstance(t, FakeTensor) else t for t in call.sent]
            with torch.no_grad():
                found = found or gathered_values.results(call, sent, [t.shape for t in call.received])
            if call.kind is CollectiveKind.SEND:
                self._last_sent[(call.group.group_name, call.peer)] = [value.clone() for value in sent]
        virtual = [t for t in call.received if isinstance(t, FakeTensor)]
        if found is None:
            gpu.operators.note_writes(virtual)
            return
        if gpu.operators.on_write is not None:
            gpu.operators.on_write(virtual)
        for target, raw in zip(call.received, found, strict=True):
            value = raw.reshape(target.shape).to(target.dtype)
            if not isinstance(target, FakeTensor):
                if value is not target:
                    target.detach().copy_(value)
            elif gpu.known_values.known(target):
                gpu.known_values.values(target).copy_(value)
            elif target.untyped_storage().nbytes() == target.numel() * target.element_size() <= limit(target.dtype):
                gpu.known_values.adopt(target, value)

    def _message(self, call: Collective) -> list[torch.Tensor] | None:
        """What a peer sends, as far as it is taken to be known: what was last sent to that peer, or one whole number, which is 1: ranks vote so on how they go on."""
        last = self._last_sent.get((call.group.group_name, call.peer), [])
        if [(t.shape, t.dtype) for t in last] == [(t.shape, t.dtype) for t in call.received]:
            return last
        if len(call.received) == 1 and call.received[0].numel() == 1 and not call.received[0].dtype.is_floating_point:
            self._gpu.recorder.assume(
                self._gpu.attribution.where(), "one whole number that another rank sends is assumed to be 1"
            )
            return [torch.ones(call.received[0].shape, dtype=call.received[0].dtype, device="cpu")]
        return None

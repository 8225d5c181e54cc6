"""Collectives of a distributed program on the virtual GPU: nothing is sent, and the tape has what is moved, among whom, on which stream and who waits for it.

As `ProcessGroupNCCL` runs them (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective`, of torch 2.8 and later): one that is waited for at once
(`async_op=False`) runs on the stream that it is called on; an asynchronous one on a stream of its group, after what the current stream was given so
far, and its tensors are held (`stashed_for_allocator_safety_`) until `wait`, which has the stream that is current then wait for it. Messages between two ranks run on a stream of that
pair.
"""

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # pyrefly: ignore[missing-module-attribute]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.collectives import arguments, gathered_values, groups
from tightfit.capture.collectives.arguments import Collective
from tightfit.capture.dispatch.known_values import Unknown, limit
from tightfit.capture.dispatch.operators import facts
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.streams import VirtualEvent, VirtualStream, current_stream, set_stream
from tightfit.capture.replace import replace
from tightfit.capture.world import World
from tightfit.errors.faults import is_own_file
from tightfit.tape import Category, CollectiveKind, Phase

_OF_PYTHON = "torch/distributed/distributed_c10d.py"
_OF_SHARDING = "torch/distributed/fsdp/"
# What torch puts around every mode (torch/_compile.py, `_disable_dynamo`), and around the functions of `torch.distributed` to log them.
_AROUND = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/distributed/c10d_logger.py")

# Programs wait for a few at a time; one that nobody waits for must not hold its tensors for ever.
_MAX_PENDING = 64


@dataclasses.dataclass(slots=True, kw_only=True)
class Pending:
    """An asynchronous collective: what torch returned for it, the event at its end, and the tensors that it holds."""

    work: Any
    event: VirtualEvent
    tensors: tuple[torch.Tensor, ...]


class Communication:
    """The collectives of the traced rank of `world`."""

    def __init__(self, gpu: VirtualGpu, world: World) -> None:
        self._gpu, self._world = gpu, world
        self._streams: dict[tuple[str, int], VirtualStream] = {}
        self._groups: dict[str, int] = {}  # numbers on the tape, by the name of the group
        self._of_reducer: list[VirtualEvent] = []
        self._pending: collections.deque[Pending] = collections.deque(maxlen=_MAX_PENDING)

    def install(self) -> None:
        """Makes all process groups fake ones, and takes their operators."""
        gpu = self._gpu
        recorder = gpu.recorder
        recorder.world = (self._world.rank, self._world.num_ranks, self._world.num_nodes)
        if self._world.num_ranks > 1:
            recorder.assume(
                "",
                "the time per step leaves out collectives, and the peak the memory that NCCL itself takes for each communicator",
            )
        groups.install(self._world, self._new_group)
        for func in arguments.operators():
            is_in_place = func._schema.name.startswith(f"{arguments.IN_PLACE}::")
            gpu.communication[func] = self._run if is_in_place else self._run_functional
        gpu.communication[torch.ops._c10d_functional.wait_tensor.default] = self._wait_for_tensor
        gpu.on_backward_end = self._end_backward
        wait = dist.Work.wait

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait_for([p for p in self._pending if p.work is work])
            return wait(work, *args, **kwargs)

        replace(dist.Work, wait=waited)

    def _new_group(self, group: Any, is_eager: bool) -> None:
        if is_eager:
            self._number(group)

    def _number(self, group: Any) -> int:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = self._gpu.recorder.communicator(groups.ranks_of(group))
        return self._groups[name]

    def _run(self, gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = arguments.collective_of(func, args, kwargs)
        self._drop_unheld()
        pending = self._note(func, args, call, call.is_async)
        self._receive(call)
        future: Any = torch.futures.Future()
        future.set_result(list(call.received or call.sent))
        work = _create_work_from_future(future)
        if call.is_async:
            self._hold(pending, work)
        returns = func._schema.returns
        if not returns:
            return None
        return work.boxed() if len(returns) == 1 else (args[0], work.boxed())

    def _run_functional(self, gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = arguments.bound(func, args, kwargs)
        is_virtual = isinstance(next(arguments.flat(tensors.get("input", tensors.get("inputs")))), FakeTensor)
        run = gpu.fake.dispatch if is_virtual else None
        out = gpu.host.run(func, args, kwargs) if run is None else run(func, (FakeTensor,), args, kwargs)
        call = arguments.functional_of(func, args, kwargs, out)
        self._drop_unheld()
        pending = self._note(func, args, call, is_virtual)
        if is_virtual:
            self._pending.append(pending)
        if is_virtual and facts(func).creates:
            for tensor in call.received:
                gpu.storages.add(tensor)
        self._receive(call)
        return out

    def _note(self, func: OpOverload, args: Sequence[Any], call: Collective, is_async: bool) -> Pending:
        """Adds the collective to the tape, if it moves tensors of the card."""
        gpu, recorder = self._gpu, self._gpu.recorder
        tensors = (*call.sent, *call.received)
        if _is_called_by_sharding(sys._getframe()):
            gpu.storages.mark(tensors, Category.COMMUNICATION)
        current = current_stream()
        stream = current
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if is_async:
                stream = self._stream_of(call)
                stream.wait_stream(current)
            set_stream(stream)
            try:
                gpu.note_operator(func, facts(func), (list(call.sent),), {}, call.received, None)
            finally:
                set_stream(current)
            peer = -1 if call.peer < 0 else groups.ranks_of(call.group)[call.peer]
            recorder.collective(call.kind, call.num_bytes, self._number(call.group), call.group.size(), peer)
        event = VirtualEvent()
        if stream is not current:
            event.record(stream)
        return Pending(work=None, event=event, tensors=tensors)

    def _hold(self, pending: Pending, work: Any) -> None:
        """Keeps the tensors of an asynchronous collective until it is waited for."""
        if _is_called_by_python(sys._getframe()):
            pending.work = work
            self._pending.append(pending)
        elif self._gpu.recorder.phase == Phase.BACKWARD:
            # The reducer of DistributedDataParallel, which waits for all of its buckets when the pass ends, and holds them itself.
            self._of_reducer.append(pending.event)
            self._gpu.storages.mark(pending.tensors, Category.COMMUNICATION)
        else:
            # The broadcast of a module's states, which waits for each (`broadcast_coalesced` in torch/csrc/distributed/c10d/comm.cpp).
            pending.event.wait()

    def _drop_unheld(self) -> None:
        """Frees the tensors of collectives that nobody can wait for any more: the program has dropped what they returned."""
        # One reference is the entry's own, and one the argument of `getrefcount`.
        for each in [p for p in self._pending if p.work is not None and sys.getrefcount(p.work) <= 2]:
            self._pending.remove(each)

    def _end_backward(self) -> None:
        """A backward pass ends: the current stream waits for the buckets of DistributedDataParallel."""
        for event in self._of_reducer:
            event.wait()
        self._of_reducer.clear()

    def _stream_of(self, call: Collective) -> VirtualStream:
        is_message = call.kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
        key = (call.group.group_name, call.peer if is_message else -1)
        if key not in self._streams:
            self._streams[key] = VirtualStream()
        return self._streams[key]

    def _wait_for_tensor(
        self, gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        storage = args[0].untyped_storage()._cdata
        self._wait_for([p for p in self._pending if any(t.untyped_storage()._cdata == storage for t in p.tensors)])
        return args[0]

    def _wait_for(self, pending: Sequence[Pending]) -> None:
        for each in pending:
            each.event.wait()
            self._pending.remove(each)

    def _receive(self, call: Collective) -> None:
        """Writes what is received, where it is known."""
        gpu = self._gpu
        found = None
        with contextlib.suppress(Unknown):
            sent = [gpu.shadows.values(t) if isinstance(t, FakeTensor) else t for t in call.sent]
            with torch.no_grad():
                found = gathered_values.results(call, sent, [t.shape for t in call.received])
        virtual = [t for t in call.received if isinstance(t, FakeTensor)]
        if found is None:
            gpu.note_writes(virtual)
            return
        if gpu.on_write is not None:
            gpu.on_write(virtual)
        for target, raw in zip(call.received, found, strict=True):
            value = raw.reshape(target.shape).to(target.dtype)
            if not isinstance(target, FakeTensor):
                if value is not target:
                    target.detach().copy_(value)
            elif gpu.shadows.known(target):
                gpu.shadows.values(target).copy_(value)
            elif target.untyped_storage().nbytes() == target.numel() * target.element_size() <= limit(target.dtype):
                gpu.shadows.adopt(target, value)


def _callers(frame: FrameType | None) -> Iterator[str]:
    """The files of the functions around `frame` that are not ours, the innermost first."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own_file(file) and not file.endswith(_AROUND):
            yield file
        frame = frame.f_back


def _is_called_by_python(frame: FrameType) -> bool:
    """Whether a function of `torch.distributed` has called the group, which returns to the program what there is to wait for; else C++ has."""
    return next(_callers(frame), "").endswith(_OF_PYTHON)


def _is_called_by_sharding(frame: FrameType) -> bool:
    """Whether FSDP gathers parameters or scatters gradients, in buffers of its own."""
    callers = (file for file in _callers(frame) if not file.endswith(_OF_PYTHON))
    return _OF_SHARDING in next(callers, "")

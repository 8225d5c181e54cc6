"""Collectives of a distributed program on the virtual GPU: nothing is sent, and the tape has what is moved, among whom, on which stream and who waits for it.

As `ProcessGroupNCCL` runs them (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective`, of torch 2.8 and later): one that is waited for at once
(`async_op=False`) runs on the stream that it is called on; an asynchronous one on a stream of its group, after what the current stream was given so
far, and its tensors are held (`stashed_for_allocator_safety_`) until `wait`, which has the stream that is current then wait for it. Messages between two ranks run on a stream of that
pair.
"""

import functools
import sys
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # pyrefly: ignore[missing-module-attribute]
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tightfit.capture.collectives import arguments, groups, reducer_times
from tightfit.capture.collectives.arguments import Collective
from tightfit.capture.collectives.callers import is_called_by_python, is_called_by_sharding
from tightfit.capture.collectives.objects import Objects
from tightfit.capture.collectives.pending import Pending, PendingCollectives
from tightfit.capture.collectives.received_values import ReceivedValues
from tightfit.capture.collectives.world import World
from tightfit.capture.dispatch.operators import facts
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.streams import VirtualEvent, VirtualStream, current_stream, set_stream
from tightfit.capture.patches import gradients_of_data, libraries
from tightfit.capture.patches.manifest import WRAP_COLLECTIVE
from tightfit.capture.replace import replace
from tightfit.tape import Category, CollectiveKind, Phase

_CHECKPOINTS = "torch.distributed.checkpoint.default_planner"


def _accept_plans(module: types.ModuleType) -> None:
    """A distributed checkpoint is planned from the plans of all ranks, and the others are taken to have that of the traced one, which leaves most shards out."""
    if hasattr(module, "_validate_global_plan"):
        replace(module, _validate_global_plan=lambda *_args, **_kwargs: [])


def _mark_buckets(gpu: VirtualGpu) -> None:
    """What the reducer of DistributedDataParallel allocates when it is made, and when it has seen the order of the gradients, are its buckets."""
    storages, categories = gpu.storages, gpu.recorder.storages["category"]

    def marking(method: Any) -> Any:
        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            first = len(categories)
            try:
                return method(*args, **kwargs)
            finally:
                for index in storages.indices():
                    if index >= first and categories[index] == Category.TEMPORARIES:
                        categories[index] = Category.COMMUNICATION

        return marked

    reducer: Any = dist.Reducer
    replace(reducer, __init__=marking(reducer.__init__), _rebuild_buckets=marking(reducer._rebuild_buckets))


class Communication:
    """The collectives of the traced rank of `world`."""

    def __init__(self, gpu: VirtualGpu, world: World) -> None:
        self._gpu, self._world = gpu, world
        self._streams: dict[tuple[str, int], VirtualStream] = {}
        self._groups: dict[str, int] = {}  # numbers on the tape, by the name of the group
        self._of_reducer: list[VirtualEvent] = []
        self._pending = PendingCollectives()
        self._received = ReceivedValues(gpu)

    def install(self) -> None:
        """Makes all process groups fake ones, and takes their operators."""
        gpu = self._gpu
        recorder = gpu.recorder
        recorder.communication.world = (self._world.rank, self._world.num_ranks, self._world.num_nodes)
        groups.install(self._world, self._new_group)
        for func in arguments.operators():
            is_in_place = func._schema.name.startswith(f"{arguments.IN_PLACE}::")
            gpu.communication[func] = self._run if is_in_place else self._run_functional
        functional = torch.ops._c10d_functional
        gpu.communication[functional.wait_tensor.default] = self._wait_for_tensor
        if WRAP_COLLECTIVE.is_expected():
            # Its shape rule makes another tensor, where what is called makes a wrapper that waits when it is used.
            gpu.communication[functional._wrap_tensor_autograd.default] = lambda _gpu, _func, args, _kwargs: (
                AsyncCollectiveTensor(args[0])
            )
        gpu.on_backward_end = self._end_backward
        wait = dist.Work.wait

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._pending.wait_for_work(work)
            return wait(work, *args, **kwargs)

        replace(dist.Work, wait=waited)
        reducer_times.install()
        gradients_of_data.show_those_unlike()
        _mark_buckets(self._gpu)
        Objects(self._world).install()
        libraries.answer_at_import(_CHECKPOINTS, _accept_plans)

    def _new_group(self, name: str, ranks: tuple[int, ...], is_eager: bool) -> None:
        if is_eager:
            self._groups[name] = self._gpu.recorder.communication.group(ranks)

    def _number(self, group: Any) -> int:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = self._gpu.recorder.communication.group(groups.ranks_of(group))
        return self._groups[name]

    def _run(self, gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = arguments.collective_of(func, args, kwargs)
        self._pending.drop_unheld()
        pending = self._note(func, args, call, call.is_async)
        self._received.note(call)
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
        self._pending.drop_unheld()
        pending = self._note(func, args, call, is_virtual)
        if is_virtual and facts(func).creates:
            for tensor in call.received:
                gpu.storages.add(tensor)
        if is_virtual:
            pending.tensors = call.sent
            pending.results = tuple(weakref.ref(tensor.untyped_storage()) for tensor in call.received)
            self._pending.add(pending)
        self._received.note(call)
        return out

    def _note(self, func: OpOverload, args: Sequence[Any], call: Collective, is_async: bool) -> Pending:
        """Adds the collective to the tape, if it moves tensors of the card."""
        gpu, recorder = self._gpu, self._gpu.recorder
        tensors = (*call.sent, *call.received)
        if is_called_by_sharding(sys._getframe()):
            gpu.storages.mark(tensors, Category.COMMUNICATION)
        current = current_stream()
        stream = current
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if is_async:
                stream = self._stream_of(call)
                stream.wait_stream(current)
            set_stream(stream)
            try:
                gpu.operators.note(func, facts(func), (list(call.sent),), {}, call.received, None)
            finally:
                set_stream(current)
            peer = -1 if call.peer < 0 else groups.ranks_of(call.group)[call.peer]
            recorder.communication.collective(
                recorder.num_operators - 1, call.kind, call.num_bytes, self._number(call.group), call.group.size(), peer
            )
        event = VirtualEvent()
        if stream is not current:
            event.record(stream)
        return Pending(event=event, tensors=tensors)

    def _hold(self, pending: Pending, work: Any) -> None:
        """Keeps the tensors of an asynchronous collective until it is waited for."""
        if is_called_by_python(sys._getframe()):
            pending.work = work
            self._pending.add(pending)
        elif self._gpu.recorder.phase == Phase.BACKWARD:
            # The reducer of DistributedDataParallel, which waits for all of its buckets when the pass ends, and holds them itself.
            self._of_reducer.append(pending.event)
            self._gpu.storages.mark(pending.tensors, Category.COMMUNICATION)
        else:
            # The broadcast of a module's states, which waits for each (`broadcast_coalesced` in torch/csrc/distributed/c10d/comm.cpp).
            pending.event.wait()

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
        self._pending.wait_for_tensor(args[0])
        return args[0]

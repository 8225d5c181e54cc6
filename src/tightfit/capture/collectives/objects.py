"""Python objects that ranks send each other: `send_object_list`, `recv_object_list`, `broadcast_object_list` and `scatter_object_list`.

One process is traced, so what another rank sends is known only from a trace of that rank. A channel is a sender and its receivers; its objects are numbered in the order in
which they are sent. A rank that needs an object that nobody has sent yet ends with `WaitsForRank`, and is traced again when the other rank has been traced so far (`tightfit.capture.collectives.rank_traces`). Stages of
`torch.distributed.pipelining` tell each other so the shapes of what they send.
"""

import base64
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tightfit.capture.collectives.channels import channel_name
from tightfit.capture.collectives.world import World
from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError, WaitsForRank
from tightfit.errors.faults import hands_over


class Objects:
    """The objects that the traced rank of `world` has sent and received."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: dict[str, list[str]] = {}
        self._num_received: dict[str, int] = {}

    def install(self) -> None:
        """Replaces torch's functions, in the module and where the package has them."""
        found = {
            "send_object_list": self._sending(distributed_c10d.send_object_list),
            "recv_object_list": self._receive_list,
            "broadcast_object_list": self._broadcasting(distributed_c10d.broadcast_object_list),
            "scatter_object_list": self._scattering(distributed_c10d.scatter_object_list),
        }
        replace(distributed_c10d, **found)
        replace(dist, **found)

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @hands_over
        @functools.wraps(send)
        def send_object_list(
            object_list: list[Any], dst: int | None = None, group: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            receiver = _global_rank(dst, group, kwargs.get("group_dst"))
            send(object_list, dst, group, *args, **kwargs)
            self._note(channel_name(self._world.rank, [receiver]), object_list)

        return send_object_list

    @hands_over
    def _receive_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
        group_src: int | None = None, use_batch: bool = False,
    ) -> int:  # fmt: skip
        """`recv_object_list`."""
        sender = _global_rank(src, group, group_src)
        values = self._next(channel_name(sender, [self._world.rank]))
        for tensor in _received(values, group, device):
            dist.recv(tensor, src=sender, group=group)
        object_list[:] = values
        return sender

    def _broadcasting(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        @hands_over
        @functools.wraps(broadcast)
        def broadcast_object_list(
            object_list: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            sender = _global_rank(src, group, kwargs.get("group_src"), first=True)
            channel = channel_name(sender, dist.get_process_group_ranks(group))
            if sender != self._world.rank:
                object_list[:] = self._next(channel)
                for tensor in _received(object_list, group, args[0] if args else kwargs.get("device")):
                    dist.broadcast(tensor, src=sender, group=group)
                return
            broadcast(object_list, src, group, *args, **kwargs)
            self._note(channel, object_list)

        return broadcast_object_list

    def _scattering(self, scatter: Callable[..., Any]) -> Callable[..., Any]:
        @hands_over
        @functools.wraps(scatter)
        def scatter_object_list(
            scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
            src: int | None = None, group: Any = None, *args: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            sender = _global_rank(src, group, kwargs.get("group_src"), first=True)
            channel = channel_name(sender, dist.get_process_group_ranks(group))
            if sender != self._world.rank:
                scatter_object_output_list[0] = self._next(channel)[dist.get_rank(group)]
                return
            scatter(scatter_object_output_list, scatter_object_input_list, src, group, *args, **kwargs)
            self._note(channel, scatter_object_input_list or ())

        return scatter_object_list

    def _note(self, channel: str, values: Sequence[Any]) -> None:
        try:
            packed = base64.b64encode(pickle.dumps(list(values))).decode()
        except Exception as error:
            raise CaptureError(
                f"{user_line()} sends an object to another rank that cannot be pickled: {error}"
            ) from error
        self._sent.setdefault(channel, []).append(packed)
        if self._world.ends_after is not None:
            wanted, number = self._world.ends_after
            if len(self._sent.get(wanted, ())) >= number:
                raise WaitsForRank(f"rank {self._world.rank} has sent what another rank waits for", sent=self._sent)

    def _next(self, channel: str) -> list[Any]:
        index = self._num_received.get(channel, 0)
        known = self._world.received.get(channel, ())
        if index >= len(known):
            raise WaitsForRank(
                f"{user_line()}: rank {self._world.rank} receives an object that no traced rank has sent",
                channel=channel,
                index=index,
                sent=self._sent,
            )
        self._num_received[channel] = index + 1
        # Written by a trace of the same program.
        return pickle.loads(base64.b64decode(known[index]))


def _received(values: Sequence[Any], group: Any, device: Any) -> Iterator[torch.Tensor]:
    """The tensors that torch receives for objects, one after the other: their sizes, then their bytes (torch/distributed/distributed_c10d.py)."""
    current = device or distributed_c10d._get_object_coll_device(group)
    num_bytes = sum(len(pickle.dumps(value)) for value in values)
    yield torch.empty(len(values), dtype=torch.int64, device=current)
    yield torch.empty(num_bytes, dtype=torch.uint8, device=current)


def _global_rank(rank: int | None, group: Any, group_rank: int | None, *, first: bool = False) -> int:
    """The rank in the world that a call names, by itself or within its group."""
    if group_rank is not None:
        return dist.get_process_group_ranks(group)[group_rank]
    if rank is None and not first:
        raise CaptureError(f"{user_line()} receives from any rank, but only one rank is traced; name the sending rank")
    return 0 if rank is None else rank

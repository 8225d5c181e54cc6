"""Process groups without other processes: each is torch's own `fake` one, whatever backend the program asks for.

`init_process_group`, `new_group` and device meshes all make their groups in `_new_process_group_helper` (torch/distributed/distributed_c10d.py), so that
is the one function that is replaced; the program is still told the backend that it asked for. No port is opened and nothing is waited for.
"""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch.cuda.nccl
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg

from tightfit.capture.collectives.world import World
from tightfit.capture.observe.attribution import user_line
from tightfit.capture.patches import spawned
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError
from tightfit.errors.faults import hands_over

_FAKE = dist.Backend(fake_pg.dist.Backend.FAKE)
_NCCL_VERSION = (2, 29, 3)
"""What programs and torch's hooks for gradients are told (`torch.cuda.nccl.version`): of the wheels of torch 2.13."""
# No other process sets a key, so what waits for one would wait for its whole timeout, half an hour.
_STORE_TIMEOUT = datetime.timedelta(seconds=1)


class NcclOptions:
    """Answers to `ProcessGroupNCCL.Options`, which a CPU build lacks: what a program sets on it is kept and changes nothing."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = datetime.timedelta(minutes=10)


class Nccl:
    """Answers to `ProcessGroupNCCL` where a program names the class."""

    Options = NcclOptions


def install(world: World, on_group: Callable[[str, tuple[int, ...], bool], None]) -> None:
    """Has every process group be a fake one of `world`; `on_group` is called with the name and the ranks of each new group that this rank is a member of, and whether its
    communicator is made at once (`device_id` was given) and not by the first collective.
    """
    make, begin = distributed_c10d._new_process_group_helper, dist.init_process_group

    @functools.wraps(make)
    def make_fake(
        group_size: int,
        group_rank: int,
        ranks: Any,
        backend: Any,
        store: Any,
        group_name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_eager = kwargs.pop("device_id", None) is not None
        for name in ("backend_options", "pg_options"):
            if name in kwargs:
                kwargs[name] = None
        pair = make(group_size, group_rank, ranks, _fake_of(backend), store, group_name, *args, **kwargs)
        group = pair[0]
        if isinstance(group, dist.ProcessGroup):
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            known: Any = distributed_c10d._world.pg_map
            known[group] = (backend, pair[1])
            # It is not in torch's table of groups yet.
            on_group(group.group_name, tuple(ranks) or tuple(range(group_size)), is_eager)
        return pair

    @hands_over
    @functools.wraps(begin)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if world_size not in (-1, world.num_ranks):
            raise CaptureError(
                f"{user_line()} joins {world_size} processes, but {world.num_ranks} GPUs are simulated; estimate it with --gpus {world_size}"
            )
        if rank not in (-1, world.rank):
            raise CaptureError(
                f"{user_line()} joins as rank {rank}, but rank {world.rank} is traced; give --rank {rank}"
            )
        store = dist.HashStore()
        store.set_timeout(_STORE_TIMEOUT)
        # Without one torch asks its NCCL, which a CPU build lacks, for the default.
        timeout = timeout or dist.default_pg_timeout
        begin(backend, None, timeout, world.num_ranks, world.rank, store, *args, **kwargs)

    replace(distributed_c10d, _new_process_group_helper=make_fake)
    replace(dist, init_process_group=init_process_group)
    replace(distributed_c10d, init_process_group=init_process_group)
    replace(dist, is_nccl_available=lambda: True)
    replace(distributed_c10d, is_nccl_available=lambda: True)
    if not hasattr(dist, "ProcessGroupNCCL"):
        setattr(dist, "ProcessGroupNCCL", Nccl)  # noqa: B010 - a CPU build has no such name
        setattr(distributed_c10d, "ProcessGroupNCCL", Nccl)  # noqa: B010
    replace(torch.cuda.nccl, version=lambda: _NCCL_VERSION)
    # It reads timers of the card, which a CPU build has none of (torch/csrc/distributed/c10d/logger.cpp).
    replace(dist.Logger, set_runtime_stats_and_log=lambda self: None)
    spawned.install(world.ranks_per_node, world.local_rank)


def _fake_of(backend: Any) -> str:
    """The fake backend for the devices of the backend that was asked for: `nccl` serves cards alone, `gloo` and the default also the host."""
    return f"cuda:{_FAKE}" if str(backend or "").lower() in ("nccl", "cuda:nccl") else f"cpu:{_FAKE},cuda:{_FAKE}"


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group's members, in its order."""
    return tuple(dist.get_process_group_ranks(group))
